"""Answers about patches from another trace: all of them predicted, and one measured."""

from typing import TypedDict

from .common import Picture
from .questions import WhatIfMove


class PatchKind(TypedDict):
    """An activation that can be patched, without its block."""

    of: str
    label: str


class PatchCell(TypedDict):
    block: int
    head: int | None
    position: int
    predicted: float
    label: str


class Patches(TypedDict):
    """The predicted change of the objective by every patch: a row for each token, a column for each block or head."""

    of: str
    kinds: list[PatchKind]
    places: list[tuple[int, int | None]]
    values: list[list[float]]
    picture: Picture
    largest: list[PatchCell]
    caption: str
    python: str


class Patched(TypedDict):
    """One patch."""

    label: str
    predicted: float
    measured: float
    value: float
    moves: list[WhatIfMove]
    caption: str
    python: str
