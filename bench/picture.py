"""The plot, as SVG: the speed and memory of each case relative to the reference, and how time and memory grow with the
number of tokens, on logarithmic axes with the slope of each line (1: linear, 2: quadratic)."""

import itertools
import math
import statistics
from html import escape

from handgrad.formatting import number

from .cases import MATMULS
from .generate import WITHOUT_CACHE
from .machine import Machine
from .row import BOUND, Row

WIDTH, MARGIN, LABEL, ROOM, BAR, LINE = 1000, 28, 420, 50, 14, 22
ORANGE, BLUE, GRAY, RED = "#d9822b", "#2b6cb0", "#8a94a3", "#c0392b"
COLORS = (ORANGE, BLUE, "#2f855a", "#7a4fa3", GRAY)
STYLE = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#1f2933}"
    ".h{font-size:15px;font-weight:600}.s{font-size:12px;fill:#52606d}.t{font-size:11px;fill:#7b8794}"
    ".g{stroke:#e4e7eb}.one{stroke:#52606d;stroke-dasharray:3 3}.v{font-weight:600}"
)
Curves = dict[str, list[tuple[int, float]]]


class Sheet:
    """SVG elements from top to bottom."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 24.0

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start", color: str = "") -> None:
        style = f' style="fill:{color}"' if color else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
        )

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        size = f'width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="2" fill="{color}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def heading(self, title: str, below: str = "") -> None:
        self.y += 14
        self.text(MARGIN, self.y, title, "h")
        if below:
            self.y += 18
            self.text(MARGIN, self.y, below, "s")
        self.y += 14

    def svg(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.y + 12:.0f}" width="{WIDTH}" height="{self.y + 12:.0f}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{STYLE}</style>'
        return f'{head}<rect width="100%" height="100%" fill="#fff"/>{"".join(self.parts)}</svg>\n'


def draw(rows: list[Row], machine: Machine) -> str:
    """Bars of speed and memory ratios with a line at 1, the reference; lines of time and memory over tokens; the load of
    the machine."""
    sheet = Sheet()
    speed, memory = [], []
    for mine, others in pairs(rows):
        for other in others:
            name = f"{mine.scenario}: {mine.case} · {other.contender}"
            if other.seconds / mine.seconds > 0:
                speed.append((name, other.seconds / mine.seconds))
            if mine.memory and other.memory:
                memory.append((name, mine.memory / other.memory))
    bars(sheet, "Speed", "times as fast as the reference, logarithmic (further right is better)", speed, from_one=True)
    bars(sheet, "Peak memory", "share of the reference's (shorter is better)", memory, from_one=False)
    for scenario, title, of_memory in (
        ("train", "a training step", "of a step above weights and optimizer state"),
        ("lora", "a step with LoRA", "of a step above weights and optimizer state"),
        ("context", "a LoRA step on one example", "of the process above an interpreter with torch"),
        ("attention", "the backward pass of attention, 12 heads of 64", ""),
        ("generate", "generating a text", ""),
    ):
        steps = [row for row in rows if row.scenario == scenario and row.seconds > 0 and comparable(row)]
        growth(sheet, title, of_memory, sorted(steps, key=lambda row: row.tokens))
    sheet.y += 20
    cpu = f"{machine.cpu}, " if machine.cpu else ""
    sheet.text(MARGIN, sheet.y, cpu + machine.state, "s")
    if machine.busy:
        sheet.y += 18
        sheet.text(MARGIN, sheet.y, "busy machine: do not publish", "v", color=RED)
    return sheet.svg()


def comparable(row: Row) -> bool:
    """Whether a case differs from its neighbors in the number of tokens only."""
    if row.scenario == "attention":
        return "backward, 12 heads of 64, 1×" in row.case
    if row.scenario == "generate":
        return row.case.endswith(WITHOUT_CACHE)
    return "bfloat16" not in row.case and "nano" not in row.case and row.contender != MATMULS


def pairs(rows: list[Row]) -> list[tuple[Row, list[Row]]]:
    """The first contender of each case with its peers, or with the reference if all are ours; and mixed precision with the
    peers under autocast."""
    cases: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.contender not in (MATMULS, BOUND):
            cases.setdefault((row.scenario, row.case), []).append(row)
    found = []
    for (scenario, _), (first, *others) in cases.items():
        if scenario != "context" and first.seconds > 0:
            found.append((first, [row for row in others if not (row.is_ours or row.is_rounded)] or others[:1]))
        mixed = [row for row in others if row.is_mixed and row.seconds > 0]
        found += [(row, [other for other in others if other.is_rounded and not other.is_ours]) for row in mixed]
    return found


def bars(sheet: Sheet, title: str, below: str, values: list[tuple[str, float]], from_one: bool) -> None:
    """A bar for every value, from 0, or on a logarithmic axis from 1; gray where the reference is better."""
    if not values:
        return
    sheet.heading(title, below)
    top, found = sheet.y, [value for _, value in values]
    low, high, width = min(0.8, *found), max(1.25, *found), WIDTH - LABEL - 2 * ROOM - 16
    for name, value in values:
        x, y = (LABEL + ROOM, sheet.y) if from_one else (LABEL, sheet.y)
        at = {v: x + width * (math.log(v / low) / math.log(high / low) if from_one else v / high) for v in (value, 1.0)}
        start, end = sorted((at[value], at[1.0] if from_one else x))
        good = (value >= 1) == from_one
        sheet.text(LABEL - 10, y + 12, shortened(name), anchor="end")
        sheet.bar(start, y, max(1.0, end - start), BAR, ORANGE if good else GRAY)
        left = from_one and value < 1
        sheet.text(
            start - 6 if left else end + 6, y + 12, f"{value:.2f}{'×' * from_one}", "v", "end" if left else "start"
        )
        sheet.y += LINE
    sheet.line(at[1.0], top - 6, at[1.0], sheet.y - 2, "one")
    sheet.y += 12


def shortened(name: str, most: int = 64) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


# ── growth ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def growth(sheet: Sheet, title: str, of_memory: str, rows: list[Row]) -> None:
    """Two panels side by side: seconds and, if it was measured, memory over tokens."""
    panels = []
    for what, unit, value in (
        (f"Seconds of {title}", "s", lambda row: row.seconds),
        (f"Peak memory {of_memory}", "GB", lambda row: (row.above_torch or row.memory) / 1e9),
    ):
        curves: Curves = {}
        for row in rows:
            if value(row) > 0:
                curves.setdefault(curve_of(row), []).append((row.tokens, value(row)))
        curves = {name: curve for name, curve in curves.items() if len({x for x, _ in curve}) > 1}
        if curves:
            panels.append((what, unit, curves))
    if not panels:
        return
    sheet.heading(f"Growth of {title} with its tokens", "logarithmic axes; slope 1 is linear, 2 quadratic")
    sheet.y += 10
    width = (WIDTH - 2 * MARGIN - 24) / 2
    heights = [panel(sheet, MARGIN + i * (width + 24), width, *given) for i, given in enumerate(panels)]
    sheet.y += max(heights) + 10


def curve_of(row: Row) -> str:
    """The contender, after the model if the case names one."""
    model, colon, _ = row.case.rpartition(": ")
    return model + colon + row.contender


def slope(curve: list[tuple[int, float]]) -> float:
    """The exponent p of the power law c · tokensᵖ that fits best, by least squares of the logarithms."""
    return statistics.linear_regression([math.log(x) for x, _ in curve], [math.log(y) for _, y in curve]).slope


def panel(sheet: Sheet, left: float, width: float, title: str, unit: str, curves: Curves) -> float:
    """One panel with its legend below; returns its height."""
    height, inset = 210, 52
    top, floor = sheet.y + 14, sheet.y + 14 + height
    sheet.text(left, sheet.y + 2, f"{title}, {unit}", "s")
    xs = sorted({x for curve in curves.values() for x, _ in curve})
    values = [value for curve in curves.values() for _, value in curve]
    low, high = ticks_around(min(values), max(values))
    a, b = left + inset, left + width - 14

    def place(x: float, value: float) -> tuple[float, float]:
        right = math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
        return a + right * (b - a), floor - math.log(value / low) / math.log(high / low) * height

    for tick in ticks(low, high):
        y = place(xs[0], tick)[1]
        sheet.line(a, y, b, y, "g")
        sheet.text(a - 8, y + 4, number(tick), "t", "end")
    previous = -math.inf
    for x in xs:
        px = place(x, low)[0]
        sheet.line(px, top, px, floor, "g")
        if px - previous > 34:
            sheet.text(px, floor + 16, f"{x:,}", "t", "middle")
            previous = px
    sheet.text(b, floor + 31, "tokens", "t", "end")
    y = floor + 50.0
    for (name, curve), color in zip(curves.items(), itertools.cycle(COLORS), strict=False):
        points = [place(x, value) for x, value in curve]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        sheet.parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2.2"/>')
        sheet.parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" fill="{color}"/>' for px, py in points]
        sheet.bar(a, y - 9, 14, 4, color)
        sheet.text(a + 22, y - 3, f"{name}: slope {slope(curve):.2f}")
        y += 18
    return y - sheet.y


def ticks_around(low: float, high: float) -> tuple[float, float]:
    """The nearest of 1, 2, 5 · 10ⁿ below and above."""
    below = max(x for x in candidates(low) if x <= low * 1.0001)
    above = min(x for x in candidates(high) if x >= high * 0.9999)
    return below, above if above > below else 2 * below


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade in between; only the powers of ten if those are many."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**e for e in exponents for m in (1, 2, 5) if 0.999 * low <= m * 10.0**e <= 1.001 * high]
    return found if len(found) <= 8 else [x for x in found if abs(math.log10(x) - round(math.log10(x))) < 1e-6]


def candidates(x: float) -> list[float]:
    exponent = math.floor(math.log10(x))
    return [m * 10.0**e for e in range(exponent - 1, exponent + 3) for m in (1, 2, 5)]
