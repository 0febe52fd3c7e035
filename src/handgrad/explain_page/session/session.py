"""A model with its traced sentences and the versions of its weights, both cached within a memory limit.

A traced sentence is one sentence run on one version of the weights and differentiated for one objective. It has an id by
which a client refers to it, and is traced again if the cache has dropped it. A step adds a version, which is on disk, and
leaves all others unchanged, so clients are independent of each other. In memory are the weights as loaded, those of one
other version, and the gradients of one layer.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ... import lora
from ...errors import HandgradError
from ...files.scratch import TensorFile
from ...kernels import library
from ...machine import trim_heap
from ...model.gpt import GPT
from ...model.inspect.layer_gradients import layer_gradients, layer_of
from ...model.passes.objective import TEXT_LOSS, Objective
from ...text.token_text import TokenText
from ...text.tokenizer import Tokenizer
from ..json_types.common import Token
from ..json_types.model import Better
from ..stations.network import Network
from ..stations.table import Station, stations_of
from .progress import Progress
from .sentence_trace import SentenceTrace, trace_sentence

MAX_TEXT_BYTES = 4000
LARGE = 5_000_000  # parameters; above, finite differences are taken only for the station being viewed
MAX_TOKENS = 256
TRACE_CACHE_BYTES = 400_000_000  # the newest trace is always kept
VERSION_CACHE_BYTES, MAX_VERSIONS = 4_000_000_000, 200  # on disk; the newest version is always kept
MODEL_IN_PYTHON = "# model: the one that was given to hg.explain"
BASE = -1  # the version of the weights without adapters
MAX_IDS = 10_000  # ids of sentences that can be traced again


class ExpiredError(HandgradError):
    """The requested data is no longer cached and cannot be computed again."""


@dataclass(frozen=True)
class TracedSentence:
    """One sentence run forward and backward on one version of the weights, for one objective."""

    id: str
    text: str
    version: int
    ids: list[int]
    targets: Tensor  # (1, n), −100 at the last position
    trace: SentenceTrace
    objective: Objective = TEXT_LOSS

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([self.ids])

    @cached_property
    def bytes(self) -> int:
        return self.trace.bytes


@dataclass
class Version:
    """The trainable parameters after some steps, and the optimizer's state. Version 0 is the model as loaded."""

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    optimizer_state: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # by parameter, part, kind: "wte.weight 0 exp_avg"
    optimizer: str = ""
    steps: int = 0

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(x.bytes for x in (self.weights, self.optimizer_state) if isinstance(x, TensorFile))


class Session:
    """A model, its tokenizer, and everything the page has asked for. Safe to use from several threads."""

    def logits(self, sentence: TracedSentence) -> Tensor:
        """What the softmax reads, (n, V): a_12, scaled or capped if the model does that."""
        a_12, how = sentence.trace["a_12"], self.model.logit_map
        return a_12 if how.identity else how.forward(a_12.clone())

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        name: str,
        note: str,
        text: str,
        python: str = MODEL_IN_PYTHON,
        command: str = "",
    ):
        self.model, self.tokenizer, self.name, self.note, self.text = model.eval(), tokenizer, name, note, text
        self.python = python  # lines that define `model`
        self.command = command  # that serves the page of this model; "" if no command does
        self.better: list[Better] = []  # models that know more
        self.download: Callable[[], None] = _nothing_to_download  # starts what `better` offers
        self.network = Network(model)
        self.stations: list[Station] = stations_of(model, self.network)
        self.by_id = {station.id: station for station in self.stations}
        self.size = sum(p.numel() for p in model.parameters())
        self.progress = Progress(model.config.n_blocks)
        self.max_tokens = min(MAX_TOKENS, model.config.n_context)
        self.lock = threading.RLock()  # held while the model computes
        self.waiting_clients = 0  # requests being answered
        self.last_response_at = 0.0  # time.monotonic() of the last response
        self._original_weights = {name: p.data for name, p in model.named_parameters()}
        self._compiled = False  # whether the kernels are known to be there
        self._active_version = 0
        self._loaded: tuple[int, Mapping[str, Tensor]] = (0, {})  # the version whose weights are in memory besides 0
        self._gradients: tuple[str, str, dict[str, Tensor]] = ("", "", {})  # of a layer: sentence, layer, by name
        self._versions: OrderedDict[int, Version] = OrderedDict()
        self._next_version = 1
        self._sentences: OrderedDict[str, TracedSentence] = OrderedDict()
        self._requests: OrderedDict[str, tuple[str, int, Objective]] = OrderedDict()
        self._token_texts: dict[int, str] = {}
        self._texts = TokenText(tokenizer)

    @property
    def large(self) -> bool:
        return self.size > LARGE

    def station(self, id: str) -> Station:
        if id not in self.by_id:
            raise HandgradError(f"there is no station {id!r}: valid ids are a_0, a_1, blocks.0.a_2 … a_12, loss")
        return self.by_id[id]

    def idle_for(self, seconds: float) -> bool:
        """Return whether no request has been open for that long."""
        return self.waiting_clients == 0 and time.monotonic() > self.last_response_at + seconds

    # ── sentences ───────────────────────────────────────────────────────────────────────────────────────────────────

    def sentence(self, text: str, version: int = 0, objective: Objective = TEXT_LOSS) -> TracedSentence:
        """Return the sentence traced on that version of the weights for that objective, from the cache if possible."""
        ids = self.encode(text)
        id = hashlib.sha256(f"{version}\n{objective}\n{text}".encode()).hexdigest()[:16]
        with self.lock:
            found = self._sentences.get(id)
            if found is None:
                self._make_room(len(ids))
                targets = torch.tensor([[*ids[1:], -100]])
                made = self._trace(id, ids, targets, version, objective)
                found = TracedSentence(id, text, version, ids, targets, made, objective)
                self._sentences[id] = found
                self._requests[id] = (text, version, objective)
                while len(self._requests) > MAX_IDS:
                    self._requests.popitem(last=False)
                _shrink(self._sentences, TRACE_CACHE_BYTES)
            self._sentences.move_to_end(id)
            return found

    def _make_room(self, n_tokens: int) -> None:
        """Drop old traces, so that the next one fits; its size is estimated by that of the newest one."""
        if self._sentences:
            newest = next(reversed(self._sentences.values()))
            needed = newest.bytes * n_tokens // len(newest.ids)
            _shrink(self._sentences, TRACE_CACHE_BYTES - needed, least=0)

    def _trace(self, id: str, ids: list[int], targets: Tensor, version: int, objective: Objective) -> SentenceTrace:
        gradient = partial(self._gradient, id, version, targets)
        self.progress.begin()
        try:
            self._compile()
            with self.model_at(version) as model:
                tokens = torch.tensor([ids])
                return trace_sentence(model, tokens, targets, objective, gradient, self.progress.record)
        finally:
            self.progress.end()

    def _compile(self) -> None:
        """Compile the kernels if this machine has none yet, so that the page can say so."""
        if not self._compiled and not library.prepared(self.model.dtype):
            self.progress.compiling = True
            library.load(self.model.dtype)
            self.progress.compiling = False
        self._compiled = True

    def find(self, id: str) -> TracedSentence:
        """Return a traced sentence by its id; trace it again if the cache has dropped it."""
        with self.lock:
            if id not in self._requests:
                raise ExpiredError("this sentence id is not known to the server: reload the page")
            return self.sentence(*self._requests[id])

    def encode(self, text: str) -> list[int]:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise HandgradError("the sentence contains half a character (a lone surrogate): type it again") from None
        if size > MAX_TEXT_BYTES:
            raise HandgradError(f"the sentence has {size:,} bytes; at most {MAX_TEXT_BYTES:,} are allowed: shorten it")
        ids = self.tokenizer.encode(text)
        if len(ids) < 2:
            raise HandgradError("a sentence needs at least two tokens: one to read and one to predict")
        if len(ids) > self.max_tokens:
            raise HandgradError(
                f"the sentence has {len(ids)} tokens; this page shows at most {self.max_tokens} for this model: shorten it"
            )
        if max(ids) >= self.model.config.n_vocab:
            raise HandgradError(f"token id {max(ids)} is outside the model's vocabulary of {self.model.config.n_vocab}")
        return ids

    def token_text(self, id: int) -> str:
        """Return the text of a token; its bytes, ‹E2-80›, if it is a part of a character; ‹id› if it has no text."""
        if id not in self._token_texts:
            raw = self._texts.raw(id) if id < self.tokenizer.n_vocab else b""
            try:
                self._token_texts[id] = raw.decode() or f"‹{id}›"
            except UnicodeDecodeError:
                self._token_texts[id] = f"‹{raw.hex('-').upper()}›"
        return self._token_texts[id]

    def labels(self, sentence: TracedSentence) -> list[str]:
        return [self.token_text(id) for id in sentence.ids]

    def tokens(self, ids: list[int]) -> list[Token]:
        return [{"id": id, "label": self.token_text(id)} for id in ids]

    # ── versions of the weights ─────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def model_at(self, version: int) -> Iterator[GPT]:
        """Provide the model with the weights of that version, and hold the lock meanwhile."""
        with self.lock:
            if version != self._active_version:
                if version not in (0, self._loaded[0]):
                    stored = self.version(version).weights
                    self._set_weights(0, {})
                    self._loaded = (0, {})  # frees the weights of the other version before these are read
                    self._loaded = (version, {name: stored[name] for name in stored})
                self._set_weights(version, self._loaded[1] if version else {})
            yield self.model

    def _set_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            p.data = weights.get(name, self._original_weights[name])
        self._active_version = version

    def _gradient(self, id: str, version: int, targets: Tensor, trace: SentenceTrace, name: str) -> Tensor:
        """A gradient of a traced sentence. Those of its layer stay in memory until another layer is asked for."""
        layer = layer_of(name)
        with self.model_at(version) as model:
            if self._gradients[:2] != (id, layer):
                self._gradients = ("", "", {})
                self._gradients = (id, layer, layer_gradients(model, trace, targets, layer))
            return self._gradients[2][name]

    def version(self, number: int) -> Version:
        if number == 0:
            return Version()
        if number == BASE:
            return Version(self._base_weights())
        with self.lock:
            if number not in self._versions:
                raise ExpiredError(
                    "the weights after these steps were deleted to save space: press reset and take the steps again"
                )
            self._versions.move_to_end(number)
            return self._versions[number]

    def _base_weights(self) -> dict[str, Tensor]:
        """The parameters with which every adapter adds nothing: u is 0, and a magnitude the norms of w's columns."""
        found: dict[str, Tensor] = {}
        for name, layer in lora.adapters_of(self.model).items():
            found[f"{name}.up"] = torch.zeros_like(layer.up.data)
            if layer.magnitude is not None:
                w = layer.plain().effective_weight().detach()
                found[f"{name}.magnitude"] = torch.linalg.vector_norm(w, dim=0)
        if not found:
            raise HandgradError("the model has no adapters, so there is no base to compare with")
        return found

    def add_version(self, version: Version) -> int:
        with self.lock:
            number, self._next_version = self._next_version, self._next_version + 1
            self._versions[number] = version
            _shrink(self._versions, VERSION_CACHE_BYTES, MAX_VERSIONS)
            return number

    def free_gradients(self) -> None:
        """Free the gradients of the layer that was shown last, and return free memory to the system."""
        with self.lock:
            self._gradients = ("", "", {})
            trim_heap()

    def drop_version(self, number: int) -> None:
        """Forget a version, and go back to the weights as loaded if it is in use."""
        with self.lock:
            if self._active_version == number:
                self._set_weights(0, {})
            if self._loaded[0] == number:
                self._loaded = (0, {})
            del self._versions[number]


def _nothing_to_download() -> None:
    raise HandgradError("this page has no model to download")


def _shrink(cache: "OrderedDict[Any, Any]", budget: int, most: int = MAX_IDS, least: int = 1) -> None:
    """Drop the oldest entries until the rest fits the budget and the number of entries; keep at least the given number."""
    sizes = {key: value.bytes for key, value in cache.items()}
    before = len(cache)
    while len(cache) > least and (sum(sizes.values()) > budget or len(cache) > most):
        oldest, _ = cache.popitem(last=False)
        del sizes[oldest]
    if len(cache) < before:
        trim_heap()


def add_adapters(model: GPT, rank: int) -> None:
    """Add a LoRA adapter to every matrix of the blocks and freeze everything else."""
    if not 1 <= rank <= model.config.d_model:
        raise HandgradError(f"the adapter rank must be between 1 and {model.config.d_model}, not {rank}")
    lora.inject(model, rank)
