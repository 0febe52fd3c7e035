"""The engine: sequences of uneven length that join and leave a running batch at any step.

    engine = Engine(model)
    sequence = engine.add([1, 2, 3], Options(max_new_tokens=20, sampling=Sampling(temperature=0.8, seed=1)))
    while engine.busy:
        for event in engine.step():     # one new token of every running sequence
            event.sequence, event.id, event.finish
    engine.cancel(sequence)             # at any time between two steps

A step is one pass through the network's blocks, the same that training runs. It has about 1,024 tokens at most: one of each
running sequence, then prompts, of which a long one takes several steps. A prompt that begins like one in the cache copies
that part, and waits for it if it is being computed.

The engine works on ids and is not thread-safe: call it from one thread.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..adapters.named import check_named, groups
from ..errors import HandgradError
from ..model.gpt import GPT
from ..model.passes import Pass
from ..model.readout import row_groups
from ..ops import attention
from .kv_cache import Cache, Slot, copy
from .sampling import Sampling, choose

TOKENS_AT_ONCE = 1024  # of one pass: matrix products reach their full rate here
SHORTEST_SHARED = 16  # tokens: a shorter common beginning is computed again

GREEDY = Sampling()
Finish = Literal["stop", "length", "context", "cancelled"]


class TokenLogprob(NamedTuple):
    """The log-probability that the model gives a token, before temperature and filters, and the most probable tokens."""

    id: int
    logprob: float
    top: list[tuple[int, float]]  # (id, log-probability), most probable first


@dataclass(frozen=True)
class Options:
    """What to generate.

    max_new_tokens    number of tokens to generate; 0 only computes the prompt's log-probabilities
    sampling          how each token is chosen
    stop_ids          ids that end the sequence: its end-of-sequence ids
    logprobs          None, or the number of most probable tokens to return with the log-probability of each token
    prompt_logprobs   also of the prompt's tokens
    context_full      "stop" ends the sequence when the context is full; "slide" continues from its second half
    adapter           name of one of several adapters (`adapters.named`); None: the model as it is
    """

    max_new_tokens: int = 50
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    context_full: Literal["stop", "slide"] = "stop"
    adapter: str | None = None


@dataclass(eq=False)
class Sequence:
    """A prompt and what has been generated after it. `finish` says why it ended: None while it runs."""

    prompt: list[int]
    options: Options
    generator: torch.Generator
    slot: Slot
    new: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on
    finish: Finish | None = None
    window: list[int] = field(default_factory=list)  # the ids that the model sees
    joined: bool = False  # whether any of it has been computed

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.new

    @property
    def pending(self) -> int:
        """Number of tokens that are not in the cache yet."""
        return len(self.window) - self.slot.length


class Event(NamedTuple):
    """A new token of a sequence. `finish` is None unless it is the last. A sequence that ends without one has id None."""

    sequence: Sequence
    id: int | None
    logprob: TokenLogprob | None
    finish: Finish | None


class Engine:
    """Generates tokens of many sequences at once with one model.

    cache            False computes all tokens again at every step: the reference that the cache must equal
    tokens_at_once   tokens of one pass
    max_running      most sequences that run at once; others wait
    keep             number of finished sequences whose keys and values stay for prompts that begin with them
    """

    def __init__(
        self,
        model: GPT,
        *,
        cache: bool = True,
        tokens_at_once: int = TOKENS_AT_ONCE,
        max_running: int = 64,
        keep: int = 0,
    ):
        if not model.config.causal:
            raise HandgradError("generation needs a causal model (causal=True)")
        self.model, self.tokens_at_once, self.max_running, self.keep = model, tokens_at_once, max_running, keep
        self.cache = Cache(model)
        self.cached = cache
        self.sequences: list[Sequence] = []  # running and waiting, in the order of arrival
        self.kept: list[Sequence] = []  # finished, oldest first

    @property
    def busy(self) -> bool:
        """Whether a sequence is running or waiting."""
        return bool(self.sequences)

    def add(self, prompt: SequenceOf[int] | Tensor, options: Options | None = None) -> Sequence:
        """Let a sequence join; its first token comes with one of the next steps. Raises if the input is invalid."""
        options = options or Options()
        ids = check_prompt(self.model, prompt, options)
        sequence = Sequence(ids, options, options.sampling.generator(), self.cache.add())
        sequence.window = ids[-self.model.config.n_context :]
        self.sequences.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence, finish: Finish = "cancelled") -> None:
        """End a sequence now; without effect if it has ended."""
        if sequence.finish is None:
            sequence.finish = finish
            self.sequences.remove(sequence)
            self._leave(sequence)

    def close(self) -> None:
        """End all sequences and free the cache."""
        for sequence in list(self.sequences):
            self.cancel(sequence)
        while self.kept:
            self.cache.free(self.kept.pop().slot)

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Compute the next tokens: one for every sequence whose prompt is complete."""
        work = self._work()
        if self.kept:
            self._evict()
        if not work:
            return []
        if self.cached:
            a, last = self._forward(work)
        else:
            a, last = self._forward_uncached(work)
        model = self.model
        with model.unpacked(model.head, generating=True):
            self._prompt_logprobs(work, a)
            ready = [i for i, (sequence, _) in enumerate(work) if sequence.pending == 0]
            wanted = [work[i][0] for i in ready if work[i][0].options.max_new_tokens]
            rows = [last[i] for i in ready if work[i][0].options.max_new_tokens]
            logits = None
            if rows:
                some = a if len(rows) == len(a) else a[rows]
                run = Pass(adapters=groups([(x.options.adapter, 1) for x in wanted]))
                logits = model.check_finite(model.head.forward(model.final_norm.forward(some)[0], run))
        events = [self._end(work[i][0], None, None, "length") for i in ready if not work[i][0].options.max_new_tokens]
        if logits is None:
            return events
        samplings = [sequence.options.sampling for sequence in wanted]
        seen = [
            sequence.ids if s.repetition_penalty != 1 else [] for sequence, s in zip(wanted, samplings, strict=True)
        ]
        chosen = choose(logits, samplings, [sequence.generator for sequence in wanted], seen)
        logprobs = self._logprobs(wanted, logits, chosen)
        return events + [self._append(*found) for found in zip(wanted, chosen, logprobs, strict=True)]

    # ── which tokens ────────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next pass with the number of their tokens: single ones first, then prompts."""
        if not self.cached:
            for sequence in self.sequences:
                sequence.slot.length = 0
            return [(sequence, len(sequence.window)) for sequence in self.sequences[: self.max_running]]
        running = self.sequences[: self.max_running]
        singles = [x for x in running if x.joined and x.pending == 1]
        order = self.cache.order([x.slot for x in singles])
        work = [(singles[i], 1) for i in order]
        room = max(1, self.tokens_at_once - len(work))
        prompts: list[Sequence] = []  # that begin in this pass
        for sequence in running:
            if room < 1:
                break
            if sequence.joined and sequence.pending == 1:
                continue
            if not sequence.joined and not self._share(sequence, prompts):
                continue
            prompts.append(sequence)
            count = min(room, sequence.pending)
            work.append((sequence, count))
            room -= count
        return sorted(work, key=lambda item: (item[0].slot.length == 0, item[1] > 1))

    def _share(self, sequence: Sequence, prompts: list[Sequence]) -> bool:
        """Copy the longest beginning of the prompt that is cached. False if the sequence should wait, because more of it
        is computed in this pass."""
        if sequence.options.prompt_logprobs:  # needs every row
            sequence.joined = True
            return True
        window = sequence.window
        shared = [(common(window, x.window[: x.slot.length]), i) for i, x in enumerate(self._candidates(sequence))]
        best, where = max(shared, default=(0, -1))
        best = min(best, len(window) - 1)  # the last token's row is needed
        begun = [x for x in prompts if x.options.adapter == sequence.options.adapter]
        soon = max((min(common(window, x.window), len(window) - 1) for x in begun), default=0)
        if soon >= max(best + 1, SHORTEST_SHARED):
            return False
        sequence.joined = True
        if best >= SHORTEST_SHARED:
            self.cache.reserve(sequence.slot, best)
            copy(self._candidates(sequence)[where].slot, sequence.slot, best)
            sequence.slot.length = best
        return True

    def _candidates(self, sequence: Sequence) -> list[Sequence]:
        """The sequences of the same adapter that are in the cache, other than this one."""
        cached = [x for x in [*self.sequences, *self.kept] if x is not sequence and x.slot.length]
        return [x for x in cached if x.options.adapter == sequence.options.adapter]

    # ── one pass ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _forward(self, work: list[tuple[Sequence, int]]) -> tuple[Tensor, list[int]]:
        """The last block's output for the pass's tokens, and the last row of each sequence."""
        model = self.model
        step = self.cache.step([(sequence.slot, count) for sequence, count in work])
        ids = [i for x, count in work for i in x.window[x.slot.length : x.slot.length + count]]
        positions = step.positions
        rotation = model.rotation(positions)
        a = model.embeddings(torch.tensor(ids, device=model.device), positions)
        run = Pass(rotation=rotation, adapters=groups([(x.options.adapter, count) for x, count in work]))
        for i, block in enumerate(model.blocks):
            with model.unpacked(block, generating=True):
                a, _ = block.forward(a, run._replace(cache=step.block(i)))
        step.finish()
        return a, _last_rows([count for _, count in work])

    def _forward_uncached(self, work: list[tuple[Sequence, int]]) -> tuple[Tensor, list[int]]:
        """The same without a cache: complete sequences, as in training."""
        model = self.model
        lengths = [count for _, count in work]
        batch = model.pack(torch.tensor([i for sequence, _ in work for i in sequence.window]), lengths)
        a = model.embeddings(batch.ids, batch.positions)
        run = Pass(
            attention.spans_of(batch.lengths), rotation=model.rotation(batch.positions),
            adapters=groups([(x.options.adapter, count) for x, count in work]),
        )  # fmt: skip
        for block in model.blocks:
            with model.unpacked(block, generating=True):
                a, _ = block.forward(a, run)
        for sequence, count in work:
            sequence.slot.length = count
        return a, _last_rows(lengths)

    def _prompt_logprobs(self, work: list[tuple[Sequence, int]], a: Tensor) -> None:
        """Add the log-probabilities of the prompt's tokens that this pass has computed."""
        model, start = self.model, 0
        for sequence, count in work:
            known = len(sequence.prompt_logprobs)
            first = sequence.slot.length - count  # position of the first row
            if sequence.options.prompt_logprobs and not sequence.new and known < len(sequence.prompt) - 1:
                targets = sequence.prompt[first + 1 : first + count + 1]
                rows = a[start : start + len(targets)]
                for part in row_groups(len(rows), model.head) if len(rows) else ():
                    run = Pass(adapters=groups([(sequence.options.adapter, len(rows[part]))]))
                    logits = model.check_finite(model.head.forward(model.final_norm.forward(rows[part])[0], run))
                    sequence.prompt_logprobs += logprobs_of(logits, targets[part], sequence.options.logprobs or 0)
            start += count

    # ── new tokens ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _logprobs(self, wanted: list[Sequence], logits: Tensor, chosen: list[int]) -> list[TokenLogprob | None]:
        found: list[TokenLogprob | None] = [None] * len(wanted)
        for i, sequence in enumerate(wanted):
            if sequence.options.logprobs is not None:
                (found[i],) = logprobs_of(logits[i : i + 1], chosen[i : i + 1], sequence.options.logprobs)
        return found

    def _append(self, sequence: Sequence, i: int, logprob: TokenLogprob | None) -> Event:
        """Add a token to its sequence, which may end it or move its window."""
        sequence.new.append(i)
        sequence.window.append(i)
        if logprob is not None:
            sequence.logprobs.append(logprob)
        if i in sequence.options.stop_ids:
            return self._end(sequence, i, logprob, "stop")
        if len(sequence.new) == sequence.options.max_new_tokens:
            return self._end(sequence, i, logprob, "length")
        n_context = self.model.config.n_context
        if len(sequence.window) > n_context:
            if sequence.options.context_full == "stop":
                return self._end(sequence, i, logprob, "context")
            sequence.window = sequence.window[-max(1, n_context // 2) :]
            self.cache.free(sequence.slot)
        return Event(sequence, i, logprob, None)

    def _end(self, sequence: Sequence, i: int | None, logprob: TokenLogprob | None, finish: Finish) -> Event:
        sequence.finish = finish
        self.sequences.remove(sequence)
        self._leave(sequence)
        return Event(sequence, i, logprob, finish)

    def _leave(self, sequence: Sequence) -> None:
        """Free the slot, or keep it: the newest `keep`, and those that waiting prompts begin with."""
        if self.cached and sequence.slot.length:
            self.kept.append(sequence)
            self._evict()
        else:
            self.cache.free(sequence.slot)

    def _evict(self) -> None:
        waiting = {tuple(x.window[:SHORTEST_SHARED]) for x in self.sequences if not x.joined}
        spare = [x for x in self.kept if tuple(x.window[:SHORTEST_SHARED]) not in waiting]
        for sequence in spare[: len(spare) - self.keep] if len(spare) > self.keep else ():
            self.kept.remove(sequence)
            self.cache.free(sequence.slot)


def check_prompt(model: GPT, prompt: SequenceOf[int] | Tensor, options: Options) -> list[int]:
    """The prompt's ids. Raises if they, or the options, do not suit the model."""
    c = model.config
    ids = torch.as_tensor(prompt)
    if ids.numel() == 0:
        raise HandgradError("the prompt is empty: give at least one token")
    if ids.ndim != 1:
        raise HandgradError(f"a prompt is a list of ids, not of shape {tuple(ids.shape)}")
    if options.context_full not in ("stop", "slide"):
        raise HandgradError(f"context_full must be 'stop' or 'slide', not {options.context_full!r}")
    if len(ids) > c.n_context and options.context_full == "stop":
        raise HandgradError(
            f"the prompt has {len(ids):,} tokens, and the context {c.n_context:,}: shorten it, or give context_full="
            '"slide" (--context-full slide) to use its end'
        )
    model.pack(ids[-c.n_context :])
    check_named(model, options.adapter)
    least = 0 if options.prompt_logprobs else 1
    if type(options.max_new_tokens) is not int or options.max_new_tokens < least:
        raise HandgradError(f"max_new_tokens must be at least {least}, not {options.max_new_tokens}")
    for i in options.stop_ids:
        if type(i) is not int or not 0 <= i < c.n_vocab:
            raise HandgradError(f"stop id {i!r} is outside the vocabulary: ids go from 0 to {c.n_vocab - 1}")
    n_top = options.logprobs
    if n_top is not None and (type(n_top) is not int or not 0 <= n_top <= c.n_vocab):
        raise HandgradError(f"logprobs must be a number of tokens from 0 to {c.n_vocab}, not {n_top!r}")
    if options.prompt_logprobs and len(ids) > c.n_context:
        raise HandgradError("log-probabilities of a prompt need all of it in the context: shorten it")
    return [int(i) for i in ids.tolist()]


def logprobs_of(logits: Tensor, ids: list[int], n_top: int) -> list[TokenLogprob]:
    """(m, V) logits and (m) ids → their log-probabilities, and those of the `n_top` most probable tokens"""
    wide = torch.log_softmax(logits, 1, dtype=torch.promote_types(logits.dtype, torch.float32))
    own = wide.gather(1, torch.tensor(ids, device=wide.device)[:, None]).squeeze(1).tolist()
    values, top = (x.tolist() for x in torch.topk(wide, n_top))
    return [
        TokenLogprob(i, logprob, list(zip(best, values_of_best, strict=True)))
        for i, logprob, best, values_of_best in zip(ids, own, top, values, strict=True)
    ]


def common(a: list[int], b: list[int]) -> int:
    """The length of the beginning that two lists share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def _last_rows(lengths: list[int]) -> list[int]:
    last, end = [], 0
    for length in lengths:
        end += length
        last.append(end - 1)
    return last
