"""What a page needs to compute every answer itself: the model, and all that does not depend on the sentence. assets/live/
computes the rest in the browser.
"""

from typing import TypedDict

from .course import course_view
from .engine_data import EngineData, engine_data
from .json_types.course import Course
from .json_types.model import Table
from .session.session import Session
from .stations.network import NetworkStep
from .stations.table import Station
from .views import overview


class LiveParameter(TypedDict):
    symbol: str
    name: str
    gradient: str
    shared: bool


class LiveStep(TypedDict):
    """A step of the network, as NetworkStep."""

    block: int | None
    name: str
    kind: str
    inputs: list[str]
    outputs: list[str]
    layers: list[str]  # the numbers of its parameters


class LiveStation(TypedDict):
    """A station, by what its answers need."""

    id: str
    kind: str
    block: int | None
    inputs: list[str]
    a: list[str]
    incoming: list[str]
    outgoing: list[str]
    parameters: list[LiveParameter]


class LiveData(TypedDict):
    engine: EngineData
    table: Table
    course: Course
    max_tokens: int
    steps: list[LiveStep]
    stations: list[LiveStation]


def live_data(session: Session) -> LiveData:
    """Raises if the browser's engine does not compute such a model."""
    model = engine_data(session.model, session.tokenizer)
    table: Table = {**overview.table(session), "better": [], "torch": False}
    return {
        "engine": model, "table": table, "course": course_view(session, {}, grading=False),
        "max_tokens": session.max_tokens, "steps": [_step(step) for step in session.network.steps],
        "stations": [_station(station) for station in session.stations],
    }  # fmt: skip


def _step(step: NetworkStep) -> LiveStep:
    return {
        "block": step.block, "name": step.name, "kind": step.kind, "inputs": list(step.inputs),
        "outputs": list(step.outputs), "layers": list(step.layers),
    }  # fmt: skip


def _station(station: Station) -> LiveStation:
    return {
        "id": station.id, "kind": station.kind, "block": station.block, "inputs": list(station.inputs),
        "a": list(station.a), "incoming": list(station.incoming), "outgoing": list(station.outgoing),
        "parameters": [
            {"symbol": p.symbol, "name": p.name, "gradient": p.gradient, "shared": p.shared} for p in station.parameters
        ],
    }  # fmt: skip
