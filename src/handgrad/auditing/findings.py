"""What `hg.audit` and `hg.check` found, as text, HTML or JSON: the first thing that is wrong, and what else is.

`Audit` is of a model: tensors in the order in which a fault spreads, and the checks of its set-up. `Check` is of one
function: cases, and the smallest example of the first that failed.
"""

import math
from dataclasses import asdict, dataclass, field
from html import escape

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..formatting import number, plural
from ..proof.check_report import MARKS, Printed, colored, html_row
from ..web.document import document
from .diagnosis import Diagnosis

KINDS = {"activation": "activations", "loss": "loss", "error signal": "error signals", "gradient": "gradients"}
SHOWN = 6  # wrong tensors listed in a report, besides the first


@dataclass(frozen=True)
class Compared:
    """One tensor of the audited model, compared with the hand-derived one."""

    name: str  # a parameter's name, or the module and what passes there
    kind: str  # one of KINDS
    layer: str  # the module that computes it
    diagnosis: Diagnosis

    @property
    def right(self) -> bool:
        return self.diagnosis.right

    @property
    def used(self) -> float:
        """The error as a share of what rounding allows."""
        d = self.diagnosis
        return d.error / d.bound if d.bound else (0.0 if self.right else math.inf)

    def sentence(self) -> str:
        subject = {"gradient": f"the gradient of {self.name}", "error signal": f"the error signal of {self.name}"}
        return f"{subject.get(self.kind, self.name)} {self.diagnosis.sentence}"


@dataclass(frozen=True)
class SetUp:
    """One line of a report, as a check of the set-up; `passed` is None if it does not apply."""

    name: str
    passed: bool | None
    note: str = ""


@dataclass(repr=False)
class Audit(Printed):
    """What an audit found. Prints as a short report, displays as HTML in a notebook, and converts to JSON."""

    title: str
    dtype: str
    compared: list[Compared] = field(default_factory=list)  # in the order in which a fault spreads
    setup: list[SetUp] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[Compared]:
        return [x for x in self.compared if not x.right]

    @property
    def first(self) -> Compared | None:
        """The first tensor that is wrong: forward first, then in the order of the backward pass."""
        return next(iter(self.wrong), None)

    @property
    def passed(self) -> bool:
        return bool(self.compared) and not self.wrong and all(x.passed is not False for x in self.setup)

    @property
    def worst(self) -> float:
        """The largest error, as a share of what rounding allows."""
        return max((x.used for x in self.compared), default=math.inf)

    def summary(self) -> str:
        failed = [x.name for x in self.setup if x.passed is False]
        if self.passed:
            return (
                f"all gradients are right: {self._counts()} agree; the largest error is {number(self.worst)} of what"
                f" {self.dtype} allows"
            )
        if self.first is None:
            return (
                f"the gradients are right, but {plural(len(failed), 'check')} of the set-up failed: {', '.join(failed)}"
            )
        return f"{self.first.layer} is wrong: {self.first.sentence()}"

    def _counts(self) -> str:
        counts = {kind: sum(x.kind == kind for x in self.compared) for kind in KINDS}
        named = [plural(n, kind) for kind, n in counts.items() if n and kind != "loss"]
        return ", ".join(named[:-1]) + f" and {named[-1]}" if len(named) > 1 else "".join(named)

    # ── the three forms ─────────────────────────────────────────────────────────────────────────────────────────────

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold")
        if self.first is None:
            yield Text(f"✔ {self.summary()}" if self.passed else f"✘ {self.summary()}",
                       style="bold green" if self.passed else "bold red")  # fmt: skip
        else:
            yield Text(f"✘ {self.first.layer} is wrong", style="bold red")
            yield Text(f"  {self.first.sentence()}")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for row in self._rows():
            mark, style = MARKS[row.passed]
            table.add_row(Text(mark, style=style), row.name, row.note)
        yield Text("")
        yield table
        if self.first is not None and len(self.wrong) > 1:
            yield Text("")
            yield Text(self._others(), style="dim")
        for note in self.notes:
            yield Text(f"note: {note}", style="dim")

    def _rows(self) -> list[SetUp]:
        """One line for each kind of tensor and for each check of the set-up."""
        rows = []
        for kind, name in KINDS.items():
            group = [x for x in self.compared if x.kind == kind]
            wrong = sum(not x.right for x in group)
            largest = max((x.used for x in group if x.right), default=0.0)
            note = f"largest error {number(largest)} of what {self.dtype} allows"
            note = f"{wrong} of {len(group)} wrong" if wrong else note
            if group:
                rows.append(SetUp(name if kind == "loss" else f"{len(group)} {name}", not wrong, note))
        return rows + self.setup

    def _others(self) -> str:
        others = [x.name for x in self.wrong[1:]]
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        return f"Wrong after it, perhaps because of it: {', '.join(others[:SHOWN])}{more}."

    def as_dict(self) -> dict[str, object]:
        def plain(x: Compared) -> dict[str, object]:
            d = x.diagnosis
            return {
                "name": x.name, "kind": x.kind, "layer": x.layer, "right": x.right, "diagnosis": d.kind,
                "sentence": x.sentence(), "error": _finite(d.error), "allowed": _finite(d.bound),
                "factor": _finite(d.factor), "detail": d.detail, "part": d.part,
            }  # fmt: skip

        return {
            "title": self.title, "passed": self.passed, "summary": self.summary(), "dtype": self.dtype,
            "first": None if self.first is None else plain(self.first), "compared": [plain(x) for x in self.compared],
            "setup": [asdict(x) for x in self.setup], "notes": self.notes,
        }  # fmt: skip

    def _repr_html_(self) -> str:
        rows = "".join(html_row(row.passed, row.name, row.note) for row in self._rows())
        notes = "".join(f"<p>note: {escape(note)}</p>" for note in self.notes)
        return (
            f"<p><b>{escape(self.title)}</b></p><p><b>{colored(self.passed, self.summary())}</b></p>"
            f"<table><tbody>{rows}</tbody></table>{notes}"
            + (_html_details("wrong", self.wrong, True) if self.wrong else "")
            + _html_details("compared", self.compared, False)
        )

    def to_html(self) -> str:
        """A complete page, without anything from elsewhere."""
        return document(f"Audit of {self.title}", self._repr_html_(), STYLE)


@dataclass(frozen=True)
class Failure:
    """What is wrong in one case."""

    case: str
    output: int | None  # the number of the output and the input, where the failure is about a gradient
    input: int | None
    diagnosis: Diagnosis

    def sentence(self) -> str:
        if self.input is None:
            return self.diagnosis.sentence
        return f"the gradient of input {self.input} from output {self.output} {self.diagnosis.sentence}"


@dataclass(repr=False)
class Check(Printed):
    """What a check found. Prints as a short report and converts to JSON."""

    name: str
    results: dict[str, str] = field(default_factory=dict)  # by case: "passed", "failed" or "refused: why"
    failures: list[Failure] = field(default_factory=list)
    example: list[str] = field(default_factory=list)  # the smallest failing case, line by line
    notes: list[str] = field(default_factory=list)

    @property
    def first(self) -> Failure | None:
        return self.failures[0] if self.failures else None

    @property
    def passed(self) -> bool:
        return "passed" in self.results.values() and not self.failures

    def summary(self) -> str:
        counts = {
            kind: sum(x.startswith(kind) for x in self.results.values()) for kind in ("passed", "failed", "refused")
        }
        if self.first is None:
            refused = f"; {plural(counts['refused'], 'shape')} refused by the function" if counts["refused"] else ""
            return f"{self.name}: right in {plural(counts['passed'], 'case')}{refused}"
        return f"{self.name}: {self.first.sentence()}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        mark, style = ("✔", "bold green") if self.passed else ("✘", "bold red")
        yield Text(f"{mark} {self.summary()}", style=style)
        if self.first is not None:
            failed = sum(x == "failed" for x in self.results.values())
            yield Text(f"  first in the case {self.first.case}; {failed} of {len(self.results)} cases fail")
            for line in self.example:
                yield Text(f"  {line}")
        for note in self.notes:
            yield Text(f"  note: {note}", style="dim")

    def as_dict(self) -> dict[str, object]:
        first = None
        if self.first is not None:
            d = self.first.diagnosis
            first = {
                "case": self.first.case, "output": self.first.output, "input": self.first.input, "diagnosis": d.kind,
                "sentence": self.first.sentence(), "factor": d.factor, "detail": d.detail, "example": self.example,
            }  # fmt: skip
        return {"name": self.name, "passed": self.passed, "cases": self.results, "first": first, "notes": self.notes}


def _finite(x: float | None) -> float | None:
    return x if x is None or math.isfinite(x) else None


def _html_details(what: str, tensors: list[Compared], opened: bool) -> str:
    """A table of tensors, in the order in which a fault spreads."""
    columns = "".join(f"<th>{x}</th>" for x in ("", "tensor", "kind", "computed by", "error / allowed", "finding"))
    rows = ""
    for x in tensors:
        used = "∞" if math.isinf(x.used) else number(x.used)
        rows += html_row(x.right, x.name, x.kind, x.layer, used, "" if x.right else x.diagnosis.sentence)
    return (
        f"<details{' open' if opened else ''}><summary>{plural(len(tensors), 'tensor')} {what}</summary>"
        f"<table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table></details>"
    )


STYLE = """
body{max-width:1280px}th{text-align:left;color:var(--soft);padding:2px 16px 2px 0}td,th{border-bottom:1px solid var(--line)}
td:nth-child(2),td:nth-child(4){overflow-wrap:anywhere}details td:nth-child(3),details td:nth-child(5){white-space:nowrap}
details{margin-top:24px;overflow-x:auto}summary{cursor:pointer}
@media(prefers-color-scheme:dark){.good{color:#7fd492!important}.bad{color:#ff9088!important}}
"""
