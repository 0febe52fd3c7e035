"""The plot, as SVG: for each case its speed and memory relative to the reference, and how both grow with the number of
tokens."""

from collections.abc import Callable
from html import escape

from handgrad.formatting import number

from .machine import Machine
from .row import Row

WIDTH, LABEL, BAR, GAP = 1000, 500, 16, 8
COLOURS = ("#d9822b", "#2b6cb0", "#6b7280", "#7a4fa3")


def draw(rows: list[Row], machine: Machine) -> str:
    """Bars of speed and memory ratios with a line at 1, the reference; curves of time and memory over tokens; the load of
    the machine."""
    ours = {(r.scenario, r.case): r for r in reversed(rows)}  # the first contender of each case
    speed = [
        (f"{r.case} · vs {_reference(rows, r)}", r.ratio) for r in rows if r is ours[r.scenario, r.case] and r.ratio > 0
    ]
    memory = [
        (f"{r.case} · {r.contender} vs {_reference(rows, r)}", r.memory_ratio)
        for r in rows
        if r.memory and r.memory_ratio < 1
    ]
    parts: list[str] = []
    y = _bars(parts, 30, "speed: times as fast as the reference (longer is better)", speed, "#d9822b")
    y = _bars(parts, y + 30, "peak memory: share of the reference's (shorter is better)", memory, "#2b6cb0")
    for scenario, title, memory_title in (
        ("train", "a training step of {}", "memory of a training step above weights and optimizer state"),
        (
            "context",
            "a LoRA step on one example",
            "memory of fine-tuning on one example, above an interpreter with torch",
        ),
    ):
        steps = sorted((r for r in rows if r.scenario == scenario and r.tokens), key=lambda r: r.tokens)
        if scenario == "train":
            steps = [r for r in steps if "GPT-2" in r.case]
            title = title.format(steps[0].case.split(",")[0] if steps else "")
        y = _curves(parts, y, f"seconds of {title}", "s", steps, lambda r: r.seconds)
        y = _curves(parts, y, f"peak {memory_title}", "GB", steps, lambda r: (r.above_torch or r.memory) / 1e9)
    y += 24
    parts.append(f'<text x="10" y="{y}">{escape(machine.state)}</text>')
    if machine.busy:
        y += 18
        parts.append(f'<text class="h" x="10" y="{y}" style="fill:#c00">busy machine: do not publish</text>')
    style = "text{font:12px system-ui,sans-serif;fill:#222}.h{font-weight:600;font-size:13px}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10}" width="{WIDTH}" role="img">'
    return f'{head}<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'


def _reference(rows: list[Row], row: Row) -> str:
    same = [r for r in rows if (r.scenario, r.case) == (row.scenario, row.case)]
    return same[1].contender


def _bars(parts: list[str], y: int, title: str, bars: list[tuple[str, float]], colour: str) -> int:
    if not bars:
        return y
    parts.append(f'<text class="h" x="10" y="{y}">{escape(title)}</text>')
    y += 12
    top = y
    unit = (WIDTH - LABEL - 80) / max(1.0, *(value for _, value in bars))
    for name, value in bars:
        parts.append(f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{value * unit:.1f}" height="{BAR}" fill="{colour}" rx="2"/>')
        parts.append(f'<text x="{LABEL + value * unit + 6:.1f}" y="{y + 13}">{value:.2f}</text>')
        y += BAR + GAP
    x = LABEL + unit
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{y - 4}" stroke="#888" stroke-dasharray="3 3"/>')
    return y


def _curves(parts: list[str], y: int, title: str, unit: str, rows: list[Row], value: Callable[[Row], float]) -> int:
    """A curve for every contender with several numbers of tokens."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for r in rows:
        if value(r):
            curves.setdefault(r.contender, []).append((r.tokens, value(r)))
    if any(len(curve) > 1 for curve in curves.values()):
        return _growth(parts, y + 30, title, unit, curves)
    return y


def _growth(parts: list[str], y: int, title: str, unit: str, curves: dict[str, list[tuple[int, float]]]) -> int:
    """Curves over the number of tokens; both axes start at zero."""
    height, right = 190, WIDTH - 230
    most = max(x for curve in curves.values() for x, _ in curve)
    top = max(value for curve in curves.values() for _, value in curve)
    parts.append(f'<text class="h" x="10" y="{y}">{escape(title)}</text>')
    y += 16
    floor = y + height
    parts.append(f'<path d="M60 {y}V{floor}H{right}" fill="none" stroke="#888"/>')
    parts.append(f'<text x="54" y="{y + 10}" text-anchor="end">{number(top)}</text>')
    parts.append(f'<text x="54" y="{floor}" text-anchor="end">0 {unit}</text>')
    ends = []
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
        points = [(60 + x / most * (right - 60), floor - value / top * height) for x, value in curve]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
        ends.append((points[-1][1], points[-1][0], name, colour))
    lowest = -100.0
    for py, px, name, colour in sorted(ends):
        lowest = max(py, lowest + 15)  # labels must not overlap
        parts.append(f'<text x="{px + 8:.1f}" y="{lowest + 4:.1f}" style="fill:{colour}">{escape(name)}</text>')
    for x in sorted({x for curve in curves.values() for x, _ in curve}):
        px = 60 + x / most * (right - 60)
        parts.append(f'<text x="{px:.1f}" y="{floor + 16}" text-anchor="middle">{x}</text>')
    parts.append(f'<text x="{right + 24}" y="{floor + 16}">tokens</text>')
    return floor + 30
