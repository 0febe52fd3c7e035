"""Heat maps for notebooks: one self-contained HTML page that makes no requests, drawn by heat_maps.js."""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...files.framed import Framed

CELLS = 60_000  # of all maps together; larger ones are reduced, so that the page stays below a megabyte
COLUMNS = 256  # most columns of a map
STYLE = """
:root{color-scheme:light dark;--ink:#1c1917;--soft:#57534e;--line:#d6d3d1;--page:#fdfcfa}
@media(prefers-color-scheme:dark){:root{--ink:#f0eeea;--soft:#b6b0a8;--line:#454240;--page:#1a1918}}
body{margin:0;padding:10px 12px;font:14px/1.4 system-ui,sans-serif;color:var(--ink);background:var(--page)}
h1{font-size:1rem;margin:0 0 2px}p{margin:0 0 8px;color:var(--soft)}
output{display:block;min-height:1.4em;font-variant-numeric:tabular-nums;margin:0 0 8px}
.maps{display:flex;flex-wrap:wrap;gap:12px 18px;align-items:flex-start}
figure{margin:0}figcaption{font-size:.85rem;color:var(--soft);margin:0 0 2px}
canvas{display:block;cursor:crosshair;max-width:100%}
canvas:focus-visible{outline:2px solid #2a68b0;outline-offset:1px}
"""


class Grid(NamedTuple):
    """One map. Without labels, rows and columns are called by their numbers."""

    title: str
    values: Tensor  # (rows, columns)
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()


def heat_maps(title: str, grids: Sequence[Grid], kind: str) -> Framed:
    """The page with these maps on one scale. kind: "a" in orange and green, "delta" in red and blue."""
    budget = CELLS // max(1, len(grids))
    shapes = {tuple(grid.values.shape) for grid in grids}
    largest = max((finite(grid.values).abs().max().item() for grid in grids if grid.values.numel()), default=0.0)
    data = {"kind": kind, "scale": largest, "maps": [_map(grid, budget) for grid in grids]}
    what = " and ".join(" × ".join(map(str, shape)) for shape in sorted(shapes))
    about = f"{len(grids)} maps of {what}" if len(grids) > 1 else what
    code = script()
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    html = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>{about}; colors from −{largest:.4g} to {largest:.4g}. Point at a cell, or use the arrow"
        ' keys.</p><output aria-live="polite"></output><div class="maps"></div>'
        f'<script type="application/json">{_json(data)}</script><script>{code}</script></body></html>\n'
    )
    return Framed(html, min(720, 150 + 190 * math.ceil(len(grids) / 4) + (160 if any(g.columns for g in grids) else 0)))


def numbered(words: Sequence[str]) -> list[str]:
    """Labels of tokens: their positions and texts, with spaces and line ends visible."""
    signs = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})
    return [f"{t} {word.translate(signs)}" for t, word in enumerate(words)]


@cache
def script() -> str:
    """The program of the page."""
    return files(__package__).joinpath("heat_maps.js").read_text(encoding="utf-8")


def finite(x: Tensor) -> Tensor:
    """x in float64, with 0 where it is not finite: cells that were not measured."""
    return x.double().nan_to_num(0.0, 0.0, 0.0)


def _map(grid: Grid, budget: int) -> dict[str, Any]:
    """A map as JSON: the values row by row; of a large one, the entry furthest from 0 of every group of neighbors."""
    x = grid.values.double()
    rows, columns = x.shape
    wide = math.ceil(columns / COLUMNS)
    high = math.ceil(rows * math.ceil(columns / wide) / budget)
    x = _reduced(_reduced(x, high).t(), wide).t()
    values = [[None if math.isnan(v) else float(f"{v:.5g}") for v in row] for row in x.tolist()]
    return {
        "title": grid.title, "values": values, "rows": [*grid.rows], "columns": [*grid.columns], "shape": [rows, columns],
        "pool": [high, wide],
    }  # fmt: skip


def _reduced(x: Tensor, size: int) -> Tensor:
    """Of every group of neighboring rows, the entry furthest from 0."""
    if size == 1:
        return x
    groups = [x[i : i + size] for i in range(0, len(x), size)]
    return torch.stack([group.gather(0, group.abs().argmax(0, keepdim=True))[0] for group in groups])


def _json(data: dict[str, Any]) -> str:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
