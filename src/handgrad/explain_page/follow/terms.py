"""Sums of products, as the page follows them: which cells are multiplied, and what they add up to."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .tensors import Cell, Tensors


@dataclass(frozen=True)
class Factor:
    """One factor of each term of a sum, (m), and the cell it comes from, if it is one."""

    values: Tensor
    cell: Callable[[int], Cell | None]
    symbol: str = ""  # instead of the cell's: g'(a_7)

    def only(self, terms: range) -> "Factor":
        return Factor(self.values[terms.start : terms.stop], lambda k: self.cell(terms.start + k), self.symbol)


@dataclass(frozen=True)
class Sum:
    """Terms of a sum: products of factors, m of them."""

    factors: tuple[Factor, ...]
    scale: float = 1.0

    def only(self, terms: range) -> "Sum":
        """These terms of it."""
        return Sum(tuple(factor.only(terms) for factor in self.factors), self.scale)

    def values(self) -> Tensor:
        total = torch.tensor(self.scale, dtype=torch.float64)
        for factor in self.factors:
            total = total * factor.values
        return total


def row(t: Tensors, name: str, i: int, head: int | None = None) -> Factor:
    """The cells of a row."""
    x = t[name] if head is None else t[name][head]
    return Factor(x[i].double(), lambda k: Cell(name, i, k, head))


def column(t: Tensors, name: str, j: int, head: int | None = None) -> Factor:
    """The cells of a column."""
    x = t[name] if head is None else t[name][head]
    return Factor(x[:, j].double(), lambda k: Cell(name, k, j, head))


def one(t: Tensors, name: str, i: int, j: int, head: int | None = None) -> Factor:
    """A single cell."""
    x = t[name] if head is None else t[name][head]
    return Factor(x[i, j][None].double(), lambda k: Cell(name, i, j, head))


def taps(t: Tensors, here: str, name: str, i: int, j: int, ahead: bool = False) -> Sum:
    """Row k of w_conv times the row k before token i, or k ahead of it, in column j"""
    w, x = t[f"{here}w_conv"], t[name]
    rows = list(range(i, len(x)) if ahead else range(i, -1, -1))[: len(w)]
    weights = Factor(w[: len(rows), j].double(), lambda k: Cell(f"{here}w_conv", k, j))
    return Sum((weights, Factor(x[rows, j].double(), lambda k: Cell(name, rows[k], j))))


def number(values: Tensor | float, symbol: str, cell: Callable[[int], Cell | None] = lambda k: None) -> Factor:
    """Numbers that no tensor holds, with the symbol they are shown by; `cell` is what they were computed from."""
    wide = values.double() if isinstance(values, Tensor) else torch.tensor([values], dtype=torch.float64)
    return Factor(wide.reshape(-1), cell, symbol)
