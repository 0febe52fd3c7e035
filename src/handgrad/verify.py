"""The judge: autograd, finite differences and a counter of operations, and the report of what they found.

This is the only file of the package in which autograd may appear, and nothing that trains or runs a model imports it.
`ledger/` uses these oracles to prove the paper line by line; `verify` uses them on a whole model.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

# Largest relative error of a gradient or an error signal, by the dtype in which it was computed.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}
FINITE_DIFFERENCE_TOLERANCE = 1e-6


# ── the oracles ─────────────────────────────────────────────────────────────────────────────────────────────────────


def relative_error(ours: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """max|ours − truth| / max(max|truth|, floor). Not a number anywhere, or another shape, is an infinite error."""
    if ours.shape != truth.shape:
        return math.inf
    if truth.numel() == 0:
        return 0.0
    ours, truth = ours.detach().double(), truth.detach().double()
    difference = (ours - truth).abs().max().item()
    scale = max(truth.abs().max().item(), floor)
    if math.isnan(difference):
        return math.inf
    return difference if scale == 0 else difference / scale


def autograd(f: Callable[..., Tensor], *inputs: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, ...]:
    """∂(upstream · f(inputs))/∂inputs by torch's automatic differentiation; `upstream` is Δ_i, or 1 for a scalar f."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = f(*leaves)
        total = out.sum() if upstream is None else (out * upstream).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))


def forward_mode(f: Callable[[Tensor], Tensor], x: Tensor, dx: Tensor) -> Tensor:
    """df for a given dx, by torch's forward-mode differentiation."""
    _, df = torch.func.jvp(f, (x.detach(),), (dx,))
    return df


def finite_difference(f: Callable[[Tensor], float], x: Tensor, direction: Tensor, step: float = 1e-3) -> float:
    """d f(x + s·direction)/ds at s = 0: central differences of fourth order, so that s may be large and rounding small."""
    values = [f(x + k * step * direction) for k in (1, -1, 2, -2)]
    return (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step)


def direction_near(grad: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction of length about 1 that is not orthogonal to `grad`, or the derivative along it would be noise."""
    noise = torch.randn(grad.shape, generator=generator, dtype=grad.dtype, device=grad.device)
    noise = noise / noise.norm()
    size = grad.norm()
    return noise if size == 0 else noise + grad / size


def directional_error(
    f: Callable[[Tensor], float],
    x: Tensor,
    grad: Tensor,
    generator: torch.Generator,
    floor: float = 0.0,
    step: float = 1e-3,
) -> float:
    """|⟨grad, u⟩ − finite difference of f along u| relative to ‖grad‖, for a random direction u."""
    u = direction_near(grad, generator)
    claimed = (grad * u).sum().item()
    measured = finite_difference(f, x, u, step)
    scale = max(grad.norm().item(), floor)
    error = abs(claimed - measured)
    return math.inf if math.isnan(error) else error if scale == 0 else error / scale


def count_multiply_adds(f: Callable[[], object]) -> int:
    """How many multiply-adds the matrix products inside f perform (torch's counter gives two FLOP for each)."""
    with FlopCounterMode(display=False) as counter:
        f()
    return int(counter.get_total_flops()) // 2


# ── the report ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Result:
    """One check and what came out of it."""

    id: str
    section: str
    equation: str
    statement: str
    oracle: str
    error: float
    tolerance: float
    passed: bool
    note: str = ""
    seconds: float = 0.0


def judge(
    id: str, section: str, equation: str, statement: str, oracle: str, tolerance: float, measure: Callable[[], object]
) -> Result:
    """Run one measurement. It returns an error, or an error and a note; raising counts as failing, with the reason."""
    start = time.perf_counter()
    note = ""
    try:
        outcome = measure()
        if isinstance(outcome, tuple):
            outcome, note = outcome
        error = float(outcome)  # type: ignore[arg-type]
    except Exception as reason:
        error, note = math.inf, f"{type(reason).__name__}: {reason}".splitlines()[0]
    passed = error <= tolerance  # false for NaN too
    return Result(id, section, equation, statement, oracle, error, tolerance, passed, note, time.perf_counter() - start)


@dataclass
class Report:
    """The results, in order. Prints as a table, shows as HTML in a notebook, writes itself as JSON."""

    title: str
    checks: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        return [c for c in self.checks if not c.passed]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and not self.failed

    @property
    def seconds(self) -> float:
        return sum(c.seconds for c in self.checks)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.checks)

    def __len__(self) -> int:
        return len(self.checks)

    def __getitem__(self, id: str) -> Result:
        for c in self.checks:
            if c.id == id:
                return c
        raise KeyError(id)

    def to_json(self) -> str:
        def plain(c: Result) -> dict[str, object]:
            row = asdict(c)
            if not math.isfinite(c.error):
                row["error"] = None  # JSON has no infinity; `passed` is false and `note` has the reason
            return row

        counts = {"passed": len(self.checks) - len(self.failed), "failed": len(self.failed)}
        return json.dumps({"checks": [plain(c) for c in self.checks], **counts}, indent=1, ensure_ascii=False)

    def summary(self) -> str:
        n = len(self.checks)
        worst = max((c.error / c.tolerance for c in self.checks if c.tolerance > 0), default=0.0)
        if self.failed:
            names = ", ".join(c.id for c in self.failed[:8]) + (" …" if len(self.failed) > 8 else "")
            return f"{len(self.failed)} of {n} checks FAILED in {self.seconds:.1f} s: {names}"
        return f"all {n} checks passed in {self.seconds:.1f} s; the closest came to {worst:.0%} of its tolerance"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=self.title, title_justify="left", header_style="bold", pad_edge=False, expand=False)
        wide = console.width >= 110
        table.add_column("", width=1)
        table.add_column("check", no_wrap=True)
        table.add_column("eq.", no_wrap=True)
        if wide:
            table.add_column("statement", overflow="ellipsis", no_wrap=True, ratio=1)
        table.add_column("oracle", no_wrap=True)
        table.add_column("error", justify="right", no_wrap=True)
        table.add_column("limit", justify="right", no_wrap=True)
        table.add_column("ms", justify="right", no_wrap=True)
        section = None
        for c in self.checks:
            if c.section != section:
                section = c.section
                table.add_section()
                heading = Text(section, style="bold magenta")
                table.add_row("", *([heading] if not wide else ["", "", heading]))
            mark = Text("✔", style="green") if c.passed else Text("✘", style="bold red")
            statement = c.statement if c.passed or not c.note else f"{c.statement} — {c.note}"
            table.add_row(
                mark,
                Text(c.id, style="" if c.passed else "bold red"),
                c.equation,
                *([Text(" ".join(statement.split()))] if wide else []),
                c.oracle,
                Text(_number(c.error), style="" if c.passed else "bold red"),
                _number(c.tolerance),
                f"{1e3 * c.seconds:.0f}",
            )
        yield table
        yield Text(self.summary(), style="bold red" if self.failed else "bold green")

    def __str__(self) -> str:
        console = Console(width=120, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def _repr_html_(self) -> str:
        from html import escape

        def row(c: Result) -> str:
            colour = "#2a7a3f" if c.passed else "#b3261e"
            cells = [c.id, c.equation, c.statement, c.oracle, _number(c.error), _number(c.tolerance)]
            mark = f'<td style="color:{colour}">{"✔" if c.passed else "✘"}</td>'
            return "<tr>" + mark + "".join(f"<td>{escape(x)}</td>" for x in cells) + "</tr>"

        head = "".join(f"<th>{x}</th>" for x in ("", "check", "eq.", "statement", "oracle", "error", "limit"))
        body = "".join(row(c) for c in self.checks)
        return (
            f"<p><b>{escape(self.title)}</b><br>{escape(self.summary())}</p>"
            f"<details{' open' if self.failed else ''}><summary>{len(self.checks)} checks</summary>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"
        )


def _number(x: float) -> str:
    if x == 0:
        return "0"
    if not math.isfinite(x):
        return "∞"
    return f"{x:.1e}"
