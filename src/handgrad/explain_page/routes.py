"""The requests of the page, in a table: the name of each and the function that answers it. The server makes a URL of every
route; an exported file contains answers of the same functions.

    GET /api/station?id=…&station=blocks.0.a_6      at_station(session, sentence, station) -> StationView

A function's parameters are those of the request, by its annotations: the session, the prover and the judge are the server's
own, a sentence or a station is given by its id, a range as 0:16, numbers as 3,5,8. Keyword-only parameters are not part of a
request. The return type is declared in json_types/.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import Field

from ..errors import HandgradError
from . import course
from .course import Judge
from .follow.follow import follow
from .json_types.common import Word
from .json_types.course import Proof, ProofSummary
from .json_types.model import Overview, Progress
from .json_types.questions import Stepped
from .proofs.prover import Prover
from .session.objectives import Wanted, objective_of, token_id
from .session.session import Session, TracedSentence
from .stations.table import Station
from .views import attention, attribution, compare, lens, neurons, overview, patching, station, swaps, values, what_if
from .views.predictions import predict
from .views.step import take_step
from .views.values import Indices, Range

PROOF_WAIT = 1.5  # seconds that a request for a proof waits for new results
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Served(NamedTuple):
    """What the server has; a function gets what its annotations name."""

    session: Session
    prover: Prover
    judge: Judge


@dataclass(frozen=True)
class Route:
    """One request.

    post    changes something; its parameters are in the body
    beside  answered at once or after waiting, beside what the model computes
    trims   frees memory that only the system can give back
    """

    name: str
    function: Callable[..., Any]
    post: bool = False
    beside: bool = False
    trims: bool = False

    @cached_property
    def types(self) -> dict[str, Any]:
        """The annotations of the parameters, by the names that they have in a request; as "return" the answer's type."""
        hints = get_type_hints(self.function, include_extras=True)
        hidden = [p.name for p in self._signature.parameters.values() if p.kind == p.KEYWORD_ONLY]
        return {"id" if name == "sentence" else name: hint for name, hint in hints.items() if name not in hidden}

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    def parameters(self) -> list[inspect.Parameter]:
        """The parameters of a request. What may be None may be left out."""
        found = []
        for name, hint in self.types.items():
            if name == "return" or hint in GIVEN:
                continue
            plain, optional = _optional(hint)
            sent = hint if plain not in READERS else str | None if optional else str
            given = self._signature.parameters["sentence" if name == "id" else name].default
            default = None if optional and given is inspect.Parameter.empty else given
            found.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=sent))
        return found

    def answer(self, served: Served, given: Mapping[str, Any], **options: Any) -> Any:
        """Answer a request; `options` are keyword-only parameters of the function."""
        found: dict[str, Any] = {}
        for name, hint in self.types.items():
            argument = "sentence" if name == "id" else name
            if hint in GIVEN:
                found[argument] = GIVEN[hint](served)
            elif name in given:
                read = READERS.get(_optional(hint)[0])
                value = given[name]
                found[argument] = read(served.session, value) if read and isinstance(value, str) else value
        return self.function(**found, **options)

    def key(self, **given: object) -> str:
        """The name of an answer in an exported file, as assets/api.js asks for it."""
        return "?".join(filter(None, [self.name, "&".join(f"{name}={value}" for name, value in given.items())]))


def _optional(hint: Any) -> tuple[Any, bool]:
    """X | None → X, True"""
    rest = [x for x in get_args(hint) if x is not type(None)]
    if get_origin(hint) is UnionType and len(rest) < len(get_args(hint)):
        return (rest[0] if len(rest) == 1 else hint), True
    return hint, False


def _pair(session: Session, text: str) -> Range:
    try:
        low, high = (int(x) for x in text.split(":"))
    except ValueError:
        raise HandgradError(f"invalid range {text[:40]!r}: write from:to, for example 0:16") from None
    return low, high


def _numbers(session: Session, text: str) -> Indices:
    try:
        return [int(x) for x in text.split(",")]
    except ValueError:
        raise HandgradError(f"invalid list {text[:40]!r}: write 3,5,8") from None


GIVEN: dict[Any, Callable[[Served], Any]] = {
    Session: lambda served: served.session,
    Prover: lambda served: served.prover,
    Judge: lambda served: served.judge,
}
READERS: dict[Any, Callable[[Session, str], Any]] = {
    TracedSentence: Session.find,
    Station: Session.station,
    Range: _pair,
    Indices: _numbers,
}


# ── answers that no view has ────────────────────────────────────────────────────────────────────────────────────────


def _progress(session: Session) -> Progress:
    return session.progress.report(session.better)


def _download(session: Session) -> Progress:
    session.download()
    return _progress(session)


def _token(session: Session, text: str) -> Word:
    id = token_id(session, text)
    return {"id": id, "word": session.token_text(id)}


def _sentence(session: Session, text: str, version: int = 0, objective: Wanted | None = None) -> Overview:
    traced = session.sentence(text, version, objective_of(session, text, version, objective or {}))
    return overview.overview(session, traced)


def _proof(prover: Prover, sentence: TracedSentence, station: Station) -> Proof:
    return prover.request(sentence, station, PROOF_WAIT)


def _proofs(prover: Prover, sentence: TracedSentence) -> dict[str, ProofSummary]:
    return prover.request_all(sentence, PROOF_WAIT)


def _step(session: Session, prover: Prover, sentence: TracedSentence, lr: Finite, optimizer: str = "SGD") -> Stepped:
    prover.release()
    return take_step(session, sentence, lr, optimizer)


ROUTES = {
    route.name: route
    for route in (
        Route("table", overview.table, beside=True),
        Route("progress", _progress, beside=True),
        Route("download", _download, post=True, beside=True),
        Route("token", _token, beside=True),
        Route("sentence", _sentence, post=True),
        Route("predict", predict, post=True),
        Route("overview", overview.overview),
        Route("flow", overview.flow),
        Route("station", station.at_station),
        Route("swaps", swaps.swaps_at),
        Route("head", attention.at_head),
        Route("heads", attention.all_heads),
        Route("lens", lens.lens),
        Route("neurons", neurons.neurons),
        Route("follow", follow),
        Route("slice", values.slice_of),
        Route("value", values.value_of),
        Route("matrix", values.entries_of),
        Route("attribution", attribution.attribution),
        Route("effects", what_if.effects),
        Route("what-if", what_if.what_if_at),
        Route("compare", compare.compare_at),
        Route("patch-map", patching.patch_map_at),
        Route("patch", patching.patch_at),
        Route("step", _step, post=True, trims=True),
        Route("proof", _proof, beside=True),
        Route("proofs", _proofs, beside=True),
        Route("learn", course.course, beside=True),
        Route("learn/grade", course.grade_answer, post=True, beside=True),
        Route("learn/shown", course.shown, post=True, beside=True),
    )
}
