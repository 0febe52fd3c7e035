"""Answers to questions about a sentence: attribution, effects, what-if, compare, step."""

from typing import Literal, TypedDict

from .common import Picture, Statistics, Vocabulary, Word


class AttributionRow(TypedDict):
    id: int
    label: str
    score: float
    integrated: float
    removed: float | None


class Attribution(TypedDict):
    position: int
    word: Word
    against: Word | None
    value: float
    after: str
    steps: int
    gap: float
    total: float
    rows: list[AttributionRow]
    caption: str
    python: str


class Edge(TypedDict):
    """A skip connection of every block."""

    edge: str
    past: str


class NeuronEffect(TypedDict):
    neuron: int
    predicted: float


class EffectsPython(TypedDict):
    heads: str
    skips: str
    neurons: str


class Effects(TypedDict):
    """The predicted change of the objective by block."""

    heads: list[list[float]]
    skips: list[list[float]]
    edges: list[Edge]
    neurons: list[list[NeuronEffect]]
    python: EffectsPython


class WhatIfMove(TypedDict):
    token: str
    target: str | None
    before: float | None
    after: float | None
    first_before: str
    first_after: str


class WhatIf(TypedDict):
    label: str
    name: str
    value: float
    predicted: float
    measured: float
    moves: list[WhatIfMove]
    caption: str
    python: str


class MovedGradient(TypedDict):
    station: str
    block: int | None
    symbol: str
    name: str
    before: float
    after: float
    change: float


class MovedSignal(TypedDict):
    station: str
    symbol: str
    before: float
    change: float


class WhatIfError(TypedDict):
    label: str
    name: str
    gradients: list[MovedGradient]
    count: int
    signals: list[MovedSignal]
    caption: str
    python: str


class Side(TypedDict):
    id: str
    text: str
    version: int
    loss: float
    steps: int
    tokens: list[str]


class StationDifference(TypedDict):
    station: str
    a: float
    delta: float


class Comparison(TypedDict):
    one: Side
    other: Side
    rows: int
    stations: list[StationDifference]
    caption: str


class ComparedMap(TypedDict):
    kind: Literal["a", "delta"]
    name: str
    symbol: str
    one: Picture
    other: Picture
    difference: Picture
    vocabulary: Vocabulary | None
    width: int
    lengths: list[float]
    statistics: Statistics
    relative: float
    caption: str
    python: str
    python_one: str
    python_other: str


class ComparedStation(TypedDict):
    station: str
    rows: int
    one: Side
    other: Side
    maps: list[ComparedMap]


class Move(TypedDict):
    token: str
    target: str
    before: float
    after: float


class Stepped(TypedDict):
    id: str
    version: int
    steps: int
    loss: float
    predicted: float
    measured: float
    moves: list[Move]
    rounding: float


class Error(TypedDict):
    error: str
