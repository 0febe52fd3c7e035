"""Matrices made small enough to draw: cells of neighbouring entries, each shown by its largest, in 255 steps of colour."""

import base64
import math
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS = 128, 256  # cells of a picture at most


def picture(
    x: Tensor,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    limit: int = COLUMNS,
    whole_range: bool = False,
) -> dict[str, Any]:
    """What the page needs to draw a part of a matrix. A cell stands for `pool` entries and has the value of the one that
    is furthest from 0. Colour saturates at `scale`, which a few far outliers do not set unless `whole_range` says so."""
    x = x[None] if x.ndim == 1 else x
    r0, r1 = rows or (0, x.shape[0])
    c0, c1 = columns or (0, x.shape[1])
    part = x[r0:r1, c0:c1]
    high, pool_rows = _furthest(part, ROWS)
    cells, pool_columns = _furthest(high.t(), limit)
    cells = cells.t().double()
    largest = cells.abs().max().item()
    usual = torch.quantile(cells.abs().flatten()[: 1 << 20], 0.995).item()
    scale = largest if whole_range else max(usual, largest / 30)
    quantised = (cells * (127 / scale if scale else 0)).round().clamp(-127, 127).to(torch.int8)
    return {
        "shape": list(x.shape), "rows": [r0, r1], "columns": [c0, c1], "cells": list(cells.shape),
        "pool": [pool_rows, pool_columns], "scale": scale, "largest": largest,
        "q": base64.b64encode(quantised.contiguous().numpy().tobytes()).decode(),
    }  # fmt: skip


def _furthest(x: Tensor, limit: int) -> tuple[Tensor, int]:
    """At most `limit` rows, each the entries furthest from 0 of some neighbouring rows; and how many those are."""
    size = math.ceil(len(x) / limit)
    if size <= 1:
        return x, 1
    pieces = []
    for piece in torch.split(x, size):
        low, high = torch.aminmax(piece, dim=0)
        pieces.append(torch.where(high >= -low, high, low))
    return torch.stack(pieces), size


def statistics(x: Tensor) -> dict[str, float]:
    """Of all entries. Sums in float64."""
    wide = x.double()
    return {
        "norm": wide.norm().item(), "mean": wide.mean().item(), "spread": wide.std(correction=0).item(),
        "least": wide.min().item(), "most": wide.max().item(),
    }  # fmt: skip
