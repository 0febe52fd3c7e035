"""The plot: for each case, how much faster than the reference and how much of its memory; written as SVG by hand."""

from html import escape

from .scenarios import Row

WIDTH, LABEL, BAR, GAP = 860, 300, 16, 8


def draw(rows: list[Row]) -> str:
    """Bars of speed ratios, and below them bars of memory ratios, with a line at 1, the reference."""
    speed = [(f"{r.case} · vs {_reference(rows, r)}", r.ratio) for r in rows if r.contender == "handgrad"]
    memory = [
        (f"{r.case} · {r.contender} vs {_reference(rows, r)}", r.memory_ratio)
        for r in rows
        if r.memory and r.memory_ratio < 1
    ]
    parts: list[str] = []
    y = _bars(parts, 30, "speed: times as fast as the reference (longer is better)", speed, "#d9822b")
    y = _bars(parts, y + 30, "peak memory: share of the reference's (shorter is better)", memory, "#2b6cb0")
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
