"""The report of a check: which cases passed, and for the first that failed what is wrong and the smallest example of it."""

import json
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ...formatting import plural
from ..diagnosis import Diagnosis
from ..report import as_text


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


@dataclass
class Check:
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

    def __repr__(self) -> str:
        return f"<Check: {self.summary()}>"

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

    def __str__(self) -> str:
        return as_text(self)

    def to_json(self) -> str:
        first = None
        if self.first is not None:
            d = self.first.diagnosis
            first = {
                "case": self.first.case, "output": self.first.output, "input": self.first.input, "diagnosis": d.kind,
                "sentence": self.first.sentence(), "factor": d.factor, "detail": d.detail, "example": self.example,
            }  # fmt: skip
        made = {"name": self.name, "passed": self.passed, "cases": self.results, "first": first, "notes": self.notes}
        return json.dumps(made, indent=1, ensure_ascii=False)
