"""A model and the sentences somebody looks at: traces and versions of the weights, as many as the memory allowed them.

A look is one sentence on one version of the weights. It has an id, and is computed again if it was let go meanwhile, so
any number of people can look at different things; a step makes a new version and changes nobody else's.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import adapters
from ..errors import HandgradError
from ..machine import trim_heap
from ..model.gpt import GPT
from ..model.trace import Trace, trace
from ..text.tokenizer import Tokenizer
from .stations import Station, stations_of

MOST_BYTES = 4000  # of a sentence
MOST_TOKENS = 256
KEPT_TRACES = KEPT_VERSIONS = 1_200_000_000  # bytes; the newest is kept whatever its size
REMEMBERED = 10_000  # ids of looks, so that they can be computed again


class Forgotten(HandgradError):
    """What was asked for is no longer there, and cannot be made again."""


@dataclass(frozen=True)
class Look:
    id: str
    text: str
    version: int
    ids: list[int]
    targets: Tensor  # (1, n), −100 at the last place
    trace: Trace

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([self.ids])

    @property
    def bytes(self) -> int:
        found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.trace.values()}
        return sum(found.values())


@dataclass
class Version:
    """The trainable parameters after some steps, and what the optimizer remembers."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    memory: dict[str, Any] | None = None
    optimizer: str = ""
    steps: int = 0

    @property
    def bytes(self) -> int:
        state = (self.memory or {}).get("state", {}).values()
        tensors = [*self.weights.values(), *(x for s in state for x in s.values() if isinstance(x, Tensor))]
        return sum(x.numel() * x.element_size() for x in tensors)


class Session:
    def __init__(self, model: GPT, tokenizer: Tokenizer, name: str, note: str, text: str):
        self.model, self.tokenizer, self.name, self.note, self.text = model.eval(), tokenizer, name, note, text
        self.stations: list[Station] = stations_of(model)
        self.by_id = {station.id: station for station in self.stations}
        self.size = sum(p.numel() for p in model.parameters())
        self.most_tokens = min(MOST_TOKENS, model.config.n_context)
        self.lock = threading.RLock()  # whoever computes with the model holds it
        self.readers = 0  # who wait for an answer
        self.read_at = 0.0  # when the last one got it, on the monotonic clock
        self._base = {name: p.data for name, p in model.named_parameters()}
        self._installed = 0
        self._versions: OrderedDict[int, Version] = OrderedDict()
        self._next_version = 1
        self._looks: OrderedDict[str, Look] = OrderedDict()
        self._recipes: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._words: dict[int, str] = {}

    def quiet(self, seconds: float) -> bool:
        """Nobody waits for an answer, and has not for a while."""
        return self.readers == 0 and time.monotonic() > self.read_at + seconds

    # ── sentences ───────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, text: str, version: int = 0) -> Look:
        """The sentence on that version of the weights, traced now or before."""
        ids = self.encode(text)
        id = hashlib.sha256(f"{version}\n{text}".encode()).hexdigest()[:16]
        with self.lock:
            found = self._looks.get(id)
            if found is None:
                targets = torch.tensor([[*ids[1:], -100]])
                with self.at(version) as model:
                    made = trace(model, torch.tensor([ids]), targets)
                found = self._looks[id] = Look(id, text, version, ids, targets, made)
                self._recipes[id] = (text, version)
                while len(self._recipes) > REMEMBERED:
                    self._recipes.popitem(last=False)
                _keep_within(self._looks, KEPT_TRACES)
            self._looks.move_to_end(id)
            return found

    def find(self, id: str) -> Look:
        """A look by its id."""
        with self.lock:
            if id not in self._recipes:
                raise Forgotten("this sentence is not known here: load the page again")
            return self.look(*self._recipes[id])

    def encode(self, text: str) -> list[int]:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise HandgradError("the sentence holds half a character (a lone surrogate): type it again") from None
        if size > MOST_BYTES:
            raise HandgradError(f"the sentence has {size:,} bytes; at most {MOST_BYTES:,} can be looked at: shorten it")
        ids = self.tokenizer.encode(text)
        if len(ids) < 2:
            raise HandgradError("a sentence needs at least two tokens: the first has to have a next one to predict")
        if len(ids) > self.most_tokens:
            raise HandgradError(
                f"the sentence has {len(ids)} tokens; this model is shown at most {self.most_tokens}: shorten it"
            )
        if max(ids) >= self.model.config.n_vocab:
            raise HandgradError(f"token id {max(ids)} is outside the model's vocabulary of {self.model.config.n_vocab}")
        return ids

    def word(self, id: int) -> str:
        """What a token looks like by itself; a piece of a character, or an id nobody has named, by its number."""
        if id not in self._words:
            text = self.tokenizer.decode([id]) if id < self.tokenizer.n_vocab else ""
            self._words[id] = f"‹{id}›" if not text or "\ufffd" in text else text
        return self._words[id]

    # ── versions of the weights ─────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def at(self, version: int) -> Iterator[GPT]:
        """The model with the weights of that version, for as long as the lock is held."""
        with self.lock:
            if version != self._installed:
                weights = {} if version == 0 else self.version(version).weights
                for name, p in self.model.named_parameters():
                    p.data = weights.get(name, self._base[name])
                self._installed = version
            yield self.model

    def version(self, number: int) -> Version:
        if number == 0:
            return Version()
        with self.lock:
            if number not in self._versions:
                raise Forgotten("the weights after these steps were let go to save memory: reset, and step again")
            self._versions.move_to_end(number)
            return self._versions[number]

    def add_version(self, version: Version) -> int:
        with self.lock:
            number, self._next_version = self._next_version, self._next_version + 1
            self._versions[number] = version
            _keep_within(self._versions, KEPT_VERSIONS)
            return number


def _keep_within(kept: "OrderedDict[Any, Any]", budget: int) -> None:
    """Let go of the oldest until the rest fits."""
    sizes = {key: value.bytes for key, value in kept.items()}
    before = len(kept)
    while len(kept) > 1 and sum(sizes.values()) > budget:
        oldest, _ = kept.popitem(last=False)
        del sizes[oldest]
    if len(kept) < before:
        trim_heap()


def add_adapters(model: GPT, rank: int) -> None:
    """A low-rank branch beside every matrix of the blocks; only these train."""
    if not 1 <= rank <= model.config.d_model:
        raise HandgradError(f"the rank of an adapter must be between 1 and {model.config.d_model}, not {rank}")
    adapters.inject(model, rank)
