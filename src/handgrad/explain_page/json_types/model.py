"""Answers about the model and about a traced sentence: table, progress, token, overview, predict."""

from typing import Literal, TypedDict

from .common import Position, Token, Word


class FormulaLine(TypedDict):
    math: list[str]  # MathML
    equation: str


class Explained(TypedDict):
    summary: str
    forward: list[FormulaLine]
    backward: list[FormulaLine]


More = Literal["head", "lens", "neurons", "swaps"]  # routes with more about a station


class StationEntry(Explained):
    id: str
    kind: str  # of its step: "norm", "attention" …
    block: int | None
    title: str
    errata: list[str]
    sources: list[tuple[str, str]]  # "forward" or "backward", and a key of `code`
    more: list[More]
    reads: list[str | None]  # the stations that computed its inputs; null is what comes into its block
    symbol: str
    delta_symbol: str
    outgoing: str
    derived_in: list[str]
    exercises: list[str]
    by_objective: dict[str, Explained]  # of the loss


class SymbolEntry(TypedDict):
    """What a symbol of the formulas means."""

    keys: list[str]  # how assets/symbols.js reads it from a formula
    shown: str
    name: str
    meaning: str
    shape: str
    introduced: str


class Better(TypedDict):
    """A model that knows more than that of the page, and can be opened beside it."""

    text: str
    url: str | None  # null while it is being prepared, "" if it is not
    download: bool  # whether a button asks for it


class Table(TypedDict):
    name: str
    note: str
    python: str
    better: list[Better]
    text: str
    parameters: int
    trains: int  # parameters that are trained
    blocks: int
    heads: int
    d: int
    unit: str
    hidden: int
    optimizers: dict[str, str]
    lora: bool
    large: bool
    torch: bool  # whether it is there: its gradients are compared with ours
    errata: dict[str, str]
    code: dict[str, str]
    stations: list[StationEntry]
    symbols: list[SymbolEntry]


class Progress(TypedDict):
    busy: bool
    compiling: bool  # the kernels, before the first pass on a machine
    share: float
    backward: bool
    block: int
    blocks: int
    better: list[Better]


class Objective(TypedDict):
    kind: Literal["sentence", "position", "difference"]
    position: int | None
    token: Word | None
    against: Word | None
    value: float
    label: str
    python: str


class StationFlow(TypedDict):
    id: str
    a: list[float] | None
    delta: list[float] | None


class FlowRow(TypedDict):
    station: str
    inside: int | None  # the block, unless the row ends it
    label: str
    a_label: str
    name: str
    a: list[float]
    delta: list[float]
    share: list[float]
    python: str


class FlowPython(TypedDict):
    share: str
    delta: str
    product: str
    a: str


class Flow(TypedDict):
    rows: list[FlowRow]
    python: FlowPython


class Group(TypedDict):
    layer: str
    where: str
    station: str
    symbol: str
    norm: float


class Overview(TypedDict):
    id: str
    text: str
    version: int
    steps: int
    tokens: list[Token]
    loss: float
    losses: list[float]
    objective: Objective
    flows: list[StationFlow]
    groups: list[Group]
    groups_caption: str


class Predictions(TypedDict):
    text: str
    tokens: list[Token]
    losses: list[float]
    positions: list[Position]
