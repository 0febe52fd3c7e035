"""A trace as HTML for notebooks: the loss, a heat map of ‖Δ‖ by depth and token, and a folded table of all tensors."""

import math
from collections.abc import Mapping
from html import escape

from torch import Tensor

LIGHT, DARK = (233, 242, 252), (16, 66, 132)  # backward is blue
DECADES = 4  # range of the color scale


def trace_html(values: Mapping[str, Tensor], loss: float) -> str:
    stations = {name: x for name, x in values.items() if _station(name) and x.ndim == 2}
    rows = sorted(stations, key=depth)
    lengths = {name: stations[name].double().norm(dim=1).tolist() for name in rows}
    most = max((x for row in lengths.values() for x in row), default=0.0)
    ids = values["a_0"].tolist() if "a_0" in values else []
    head = "".join(f'<th style="font-weight:400;font-size:70%">{id}</th>' for id in ids)
    body = "".join(
        f'<tr><th style="text-align:right;font-weight:400;white-space:nowrap">{escape(name)}</th>'
        f"{''.join(_cell(x, most) for x in lengths[name])}</tr>"
        for name in rows
    )
    numbers = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(tuple(x.shape)))}</td><td>{x.double().norm():.4g}</td></tr>"
        for name, x in values.items()
    )
    return (
        f"<p><b>Trace</b>: loss {loss:.6f}, {len(values)} tensors. ‖Δ‖ of every token (columns, by id) at every depth, on"
        f" a logarithmic scale; the largest is {most:.3g}.</p>"
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse;font-size:80%">'
        f"<tr><th></th>{head}</tr>{body}</table></div>"
        f"<details><summary>every tensor</summary><table><tr><th>name</th><th>shape</th><th>‖·‖</th></tr>{numbers}"
        f"</table></details>"
    )


def _station(name: str) -> bool:
    """Whether a name is one of Δ_1 … Δ_12 (not Δ_raw)."""
    kind, _, index = name.rpartition(".")[2].partition("_")
    return kind == "delta" and index.isdigit()


def depth(name: str) -> tuple[int, int]:
    """Sort key of an error signal: its block (layers after the last block come last) and its number."""
    block = int(name.split(".")[1]) if name.startswith("blocks.") else 1 << 30
    last = name.rpartition("_")[2]
    return block, int(last) if last.isdigit() else 0


def _cell(x: float, most: float) -> str:
    share = 0.0 if x <= 0 or most <= 0 else max(0.0, 1 + math.log10(x / most) / DECADES)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(LIGHT, DARK, strict=True))
    color = "transparent" if x == 0 else f"rgb({red},{green},{blue})"
    return f'<td title="{x:.6g}" style="background:{color};padding:0;min-width:12px;height:12px"></td>'
