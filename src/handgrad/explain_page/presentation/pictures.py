"""Reduce matrices to a size that can be drawn: each cell shows the largest of neighboring entries, in 255 color steps."""

import base64
import math

import torch
from torch import Tensor

from ..json_types.common import Picture, Statistics

ROWS, COLUMNS = 128, 256  # most cells of a picture


def picture(
    x: Tensor,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    limit: int = COLUMNS,
    rows_limit: int = ROWS,
    full_range: bool = False,
    scale: float | None = None,
) -> Picture:
    """Return what the page needs to draw a part of a matrix. A cell covers `pool` entries and has the value of the one
    furthest from 0. Colors saturate at `scale`: the largest value with `full_range`, a
    given one, else a limit that ignores a few outliers."""
    x = x[None] if x.ndim == 1 else x
    r0, r1 = rows or (0, x.shape[0])
    c0, c1 = columns or (0, x.shape[1])
    part = x[r0:r1, c0:c1]
    pooled, pool_rows = _pool(part, rows_limit)
    cells, pool_columns = _pool(pooled.t(), limit)
    cells = cells.t().double()
    largest = cells.abs().max().item()
    usual = torch.quantile(cells.abs().flatten()[: 1 << 20], 0.995).item()
    if scale is None:
        scale = largest if full_range else max(usual, largest / 30)
    quantized = (cells * (127 / scale if scale else 0)).round().clamp(-127, 127).to(torch.int8)
    return {
        "shape": list(x.shape), "rows": [r0, r1], "columns": [c0, c1], "cells": list(cells.shape),
        "pool": [pool_rows, pool_columns], "scale": scale, "largest": largest,
        "q": base64.b64encode(quantized.contiguous().numpy().tobytes()).decode(),
    }  # fmt: skip


def _pool(x: Tensor, limit: int) -> tuple[Tensor, int]:
    """Reduce x to at most `limit` rows by taking, over groups of neighboring rows, the entry furthest from 0. Returns the
    rows and the size of a group."""
    size = math.ceil(len(x) / limit)
    if size <= 1:
        return x, 1
    whole = len(x) // size * size
    groups = [x[:whole].reshape(-1, size, *x.shape[1:]), *([x[None, whole:]] if whole < len(x) else [])]
    ends = [torch.aminmax(group, dim=1) for group in groups]
    return torch.cat([torch.where(high >= -low, high, low) for low, high in ends]), size


def length(x: Tensor) -> float:
    """‖x‖, also where the squares of the entries would be rounded to 0: those are of x divided by its largest entry."""
    size: float = x.norm().item()
    if size > 1e-12 or not x.any():
        return size
    largest = x.abs().max().item()
    size = largest * (x.double() / largest).norm().item()
    return size


def statistics(x: Tensor) -> Statistics:
    """Return norm, mean, spread, minimum and maximum of all entries, computed in float64."""
    wide = x.double()
    return {
        "norm": wide.norm().item(), "mean": wide.mean().item(), "spread": wide.std(correction=0).item(),
        "least": wide.min().item(), "most": wide.max().item(),
    }  # fmt: skip
