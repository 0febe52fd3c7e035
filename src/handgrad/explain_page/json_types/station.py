"""Answers about one station: station, swaps, head, heads, lens, neurons, follow, slice, value, matrix."""

from typing import Literal, NotRequired, TypedDict

from .common import LossPosition, Picture, Prediction, Statistics, Vocabulary


class Matrix(TypedDict):
    shape: list[int]
    picture: Picture
    vocabulary: Vocabulary | None
    statistics: Statistics
    lengths: list[float]


class Map(Matrix):
    kind: Literal["a", "delta"]
    name: str
    symbol: str
    caption: str
    python: str


Way = Literal["forward", "backward", "gradient"]
Place = int | str | list[int] | None


class HandPart(TypedDict):
    """Terms of the same kind; of each: its place, then value, row and column of every factor (without a name the value)."""

    names: list[str | None]  # of the tensors that the factors are entries of
    heads: list[int | None]
    tensors: list[str | None]  # their symbols
    shapes: list[list[int] | None]
    symbols: list[str]
    scale: str
    terms: list[list[Place]]


class HandTerms(TypedDict):
    """The answer of `follow` in little space, numbers with all their digits."""

    symbol: str
    block: int | None
    row_label: str | None
    column_label: str | None
    formula: str
    count: int
    parts: list[HandPart]
    rest: str
    sum: str
    value: str


class HandCell(TypedDict):
    row: int
    column: int
    head: int | None
    terms: HandTerms | None  # None: `follow` has them


class HandResult(TypedDict):
    """Something that a station computes, with entries to compute by hand."""

    way: Way
    name: str
    symbol: str
    shape: list[int]
    heads: int | None
    cells: list[HandCell]


class FrozenParameter(TypedDict):
    symbol: str
    shape: list[int]
    norm: float


class Parameter(FrozenParameter):
    name: str
    grad_norm: float | None
    picture: Picture | None
    vocabulary: Vocabulary | None
    python: str


class Swap(TypedDict):
    id: int
    word: str
    change: float
    measured: float | None


class TokenSwaps(TypedDict):
    id: int
    swaps: list[Swap]


class StationView(TypedDict):
    id: str
    maps: list[Map]
    parameters: list[Parameter]
    frozen: list[FrozenParameter]
    parameters_caption: str
    by_hand: list[HandResult]
    positions: NotRequired[list[LossPosition]]  # at the loss
    loss_caption: NotRequired[str]
    swaps: NotRequired[list[TokenSwaps]]  # at the tokens
    swaps_caption: NotRequired[str]


class Swaps(TypedDict):
    position: int
    swaps: list[Swap]
    caption: str


class HeadMap(TypedDict):
    picture: Picture
    name: str
    python: str


class HeadMaps(TypedDict):
    rho: HeadMap
    delta_raw: HeadMap
    sent: HeadMap


class HeadVectors(TypedDict):
    picture: Picture
    name: str
    head: int


class Vectors(TypedDict):
    q: HeadVectors
    k: HeadVectors
    v: HeadVectors


class HeadBranches(TypedDict):
    value: float
    query: float
    key: float


class HeadSummary(TypedDict):
    length: float  # of its output
    incoming: float
    own: float
    first: float


class Head(TypedDict):
    block: int
    head: int
    branches: HeadBranches
    incoming: float
    joined: float
    all_heads: float
    heads: list[HeadSummary]
    maps: HeadMaps
    vectors: Vectors
    group: list[int]
    sent_caption: str
    caption: str
    branches_caption: str
    branches_python: str


class SmallHead(TypedDict):
    rho: Picture
    sent: Picture
    incoming: float
    sent_largest: float


class HeadsPython(TypedDict):
    rho: str
    sent: str


class Heads(TypedDict):
    blocks: list[list[SmallHead]]
    caption: str
    python: HeadsPython


class Pushed(TypedDict):
    word: str
    change: float


class LensRow(TypedDict):
    predictions: list[Prediction]
    target: str | None
    share: float | None
    towards: list[Pushed]
    away: list[Pushed]
    caption: str


class Lens(TypedDict):
    station: str
    rows: list[LensRow]
    python: str


class NeuronWord(TypedDict):
    word: str
    logit: float


class NeuronWords(TypedDict):
    more: list[NeuronWord]
    less: list[NeuronWord]


class NeuronInput(TypedDict):
    values: list[float]
    push: list[float]


class Neuron(TypedDict):
    neuron: int
    blame: float
    by_token: list[float]
    values: list[float]
    inputs: dict[str, NeuronInput]  # by letter: 7, or gate and up
    writes: NeuronWords
    would_write: NeuronWords
    cosine: float


class Neurons(TypedDict):
    block: int
    position: int | None
    tokens: list[str]
    neurons: list[Neuron]
    count: int
    share: float
    caption: str
    python: str


class CellName(TypedDict):
    name: str
    symbol: str
    block: int | None
    head: int | None
    row: int
    column: int
    row_label: str | None
    column_label: str | None
    python: str | None


class Factor(TypedDict):
    value: float
    symbol: str
    cell: CellName | None


class TermPlace(TypedDict):
    token: str | None
    position: int | None
    feature: int | None


class Term(TermPlace):
    value: float
    factors: list[Factor]
    scale: float


class Rest(TypedDict):
    count: int
    value: float


class Followed(CellName):
    value: float
    formula: str
    count: int
    terms: list[Term]
    rest: Rest
    sum: float
    leaf: bool
    caption: str


class Value(TypedDict):
    value: float
    row: int
    column: int


class Entries(TypedDict):
    values: list[list[float]]
