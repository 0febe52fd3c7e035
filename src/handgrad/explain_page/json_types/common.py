"""Parts of several answers."""

from typing import TypedDict


class Picture(TypedDict):
    """A matrix reduced to a size that can be drawn."""

    shape: list[int]  # of the matrix
    rows: list[int]  # the part of it that is shown: first and after the last
    columns: list[int]
    cells: list[int]  # rows and columns of cells
    pool: list[int]  # rows and columns of entries that a cell covers
    scale: float  # the value of the strongest color
    largest: float
    q: str  # the cells, −127 … 127, in base64


class Statistics(TypedDict):
    norm: float
    mean: float
    spread: float
    least: float
    most: float


class Vocabulary(TypedDict):
    """The tokens whose columns (axis 1) or rows (axis 0) are shown of a matrix over the vocabulary."""

    ids: list[int]
    words: list[str]
    axis: int


class Token(TypedDict):
    id: int
    label: str


class Word(TypedDict):
    id: int
    word: str


class Prediction(TypedDict):
    id: int
    word: str
    p: float


class Target(TypedDict):
    """What the model gave to the next token of a position; the last position has none."""

    target: str | None
    target_id: int | None
    probability: float | None
    loss: float | None
    rank: int | None
    ties: int  # other tokens with the same rank


class Push(TypedDict):
    word: str
    delta: float
    target: bool


class Position(Target):
    token: str
    top: list[Prediction]


class LossPosition(Position):
    push: list[Push]  # the largest entries of Δ_12
    caption: str
