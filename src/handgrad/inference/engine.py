"""The engine: sequences of uneven length that join and leave a running batch at any step.

    engine = Engine(model)
    sequence = engine.add([1, 2, 3], Options(max_new_tokens=20, sampling=Sampling(temperature=0.8, seed=1)))
    while engine.busy:
        for event in engine.step():     # one new token of every running sequence
            event.sequence, event.id, event.finish
    engine.cancel(sequence)             # at any time between two steps

A step is one pass through the network's blocks: those that training runs, or for single tokens a kernel that computes the
same (`token_block.py`). It has about 1,024 tokens at most: one of each running sequence, then prompts, of which a long one
takes several steps. A prompt that begins like one in the cache copies that part, and waits for it if it is being computed.
If its log-probabilities are wanted, it copies from prompts whose are. If a weight has changed since, by an optimizer's step
or an adapter, nothing in the cache is used: all is computed again.

The engine works on ids and is not thread-safe: call it from one thread.
"""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from ..errors import HandgradError
from ..lora.named import check_finite_adapter, groups, weights_of
from ..model.gpt import GPT
from ..model.passes.arguments import Pass
from ..model.passes.readout import row_groups
from ..model.storage import weights as storage
from ..ops import attention
from ..ops.linear import FEW_ROWS
from .kv_cache import Cache
from .processors import changes_logits, process
from .sampling import Sampling, choose
from .sequences import Event, Finish, Options, Sequence, TokenLogprob, check_prompt, logprobs_of
from .token_block import TokenBlocks, describe

__all__ = ["Engine", "Event", "Finish", "Options", "Sampling", "Sequence", "TokenLogprob"]

TOKENS_AT_ONCE = 1024  # of one pass: matrix products reach their full rate here
SHORTEST_SHARED = 16  # tokens: a shorter common beginning is computed again


class Weights:
    """All weights of a model and of its named adapters. `state` has the place and the version of each, which change with it;
    a write into `p.data` changes neither."""

    def __init__(self, model: GPT):
        self.model, self.adapter, self.tensors = model, model.adapter, weights_of(model)
        self.state = self._read()

    def _read(self) -> list[tuple[int, int]]:
        return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in self.tensors]

    def changed(self) -> bool:
        return self.model.adapter is not self.adapter or self._read() != self.state


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
        self.weights = Weights(model)
        self.cached = cache
        self.sequences: list[Sequence] = []  # running and waiting, in the order of arrival
        self.kept: list[Sequence] = []  # finished, oldest first
        self._blocks: TokenBlocks | None = None  # in one call, for steps of a few single tokens

    @property
    def busy(self) -> bool:
        """Whether a sequence is running or waiting."""
        return bool(self.sequences)

    @property
    def _waiting(self) -> list[Sequence]:
        return [x for x in self.sequences if not x.joined]

    def add(self, prompt: SequenceOf[int] | Tensor, options: Options | None = None) -> Sequence:
        """Let a sequence join; its first token comes with one of the next steps. Raises if the input is invalid."""
        options = options or Options()
        if not self.sequences:
            self.model.check_parameters()
        ids = check_prompt(self.model, prompt, options)
        if (now := Weights(self.model)).state != self.weights.state:
            self._renew(now)
        sequence = Sequence(ids, options, options.sampling.generator(), self.cache.add())
        sequence.matcher = None if options.grammar is None else options.grammar.matcher()
        sequence.window = ids[-self.model.config.n_context :]
        if not self.sequences:
            self._blocks = describe(self.model)
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
        if self.weights.changed():
            self._renew(Weights(self.model))
        waiting = self._waiting
        work = self._work()
        if len(self._waiting) < len(waiting):
            self._evict()
        if not work:
            return []
        if self.cached:
            a, last = self._forward(work)
        else:
            a, last = self._forward_uncached(work)
        model = self.model
        with model.weights(model.head, generating=True) as weights:
            events = self._prompt_logprobs(work, a, weights)
            ready = [i for i, (x, _) in enumerate(work) if x.finish is None and x.pending == 0]
            wanted = [work[i][0] for i in ready if work[i][0].options.max_new_tokens]
            rows = [last[i] for i in ready if work[i][0].options.max_new_tokens]
            logits = None
            if rows:
                some = a if len(rows) == len(a) else a[rows]
                run = Pass(adapters=groups([(x.options.adapter, 1) for x in wanted]), weights=weights)
                normed = model.final_norm.forward(some, self._operand(len(some)))[0]
                logits = model.logit_map.forward(model.head.forward(normed, run))
        events += [self._end(work[i][0], None, None, "length") for i in ready if not work[i][0].options.max_new_tokens]
        return events if logits is None else events + self._choose(wanted, logits)

    def _renew(self, weights: Weights) -> None:
        """Discard the keys and values of other weights; running sequences compute theirs again."""
        self.cache, self.weights = Cache(self.model), weights
        self.kept.clear()
        self._blocks = describe(self.model)
        for sequence in self.sequences:
            sequence.slot = self.cache.add()
            if not sequence.new:
                sequence.prompt_logprobs.clear()

    # ── which tokens ────────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next pass with the number of their tokens: single ones first, then prompts."""
        if not self.cached:
            for sequence in self.sequences:
                sequence.slot.length = 0
            return [(sequence, len(sequence.window)) for sequence in self.sequences[: self.max_running]]
        running = self.sequences[: self.max_running]
        for sequence in running:
            if sequence.slot.length and sequence.long != self._long(sequence):
                self.cache.free(sequence.slot)  # all keys are rotated otherwise now
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

    def _long(self, sequence: Sequence) -> bool:
        """Whether the sequence has to be rotated by the frequencies of long ones (longrope)."""
        scaling = self.model.config.rope_scaling
        limit = scaling.original_max_position_embeddings if scaling.rope_type == "longrope" else None
        return limit is not None and len(sequence.window) > limit

    def _share(self, sequence: Sequence, prompts: list[Sequence]) -> bool:
        """Copy the longest beginning of the prompt that is cached. False if the sequence should wait, because more of it
        is computed in this pass."""
        best, source = self._source(sequence)
        begun = [x for x in prompts if x.may_give_to(sequence) and self._long(x) == self._long(sequence)]
        soon = max((self._shared(x, sequence, len(x.window)) for x in begun), default=0)
        if soon >= max(best + 1, SHORTEST_SHARED):
            return False
        sequence.joined = True
        if source is not None:
            self.cache.share(source.slot, sequence.slot, best)
            if sequence.options.prompt_logprobs:
                sequence.prompt_logprobs = source.prompt_logprobs[:best]
        return True

    def _source(self, sequence: Sequence) -> tuple[int, Sequence | None]:
        """The sequence in the cache with the longest beginning of this one's prompt, if that is long enough; a running one
        if it has as much as one that is kept."""
        cached = [x for x in [*self.sequences, *self.kept] if x is not sequence and x.may_give_to(sequence)]
        cached = [x for x in cached if x.long == self._long(sequence)]
        shared = [self._shared(x, sequence, x.slot.length) for x in cached]
        best = max(shared, default=0)
        return (best, cached[shared.index(best)]) if best >= SHORTEST_SHARED else (0, None)

    def _shared(self, source: Sequence, other: Sequence, n: int) -> int:
        """The number of tokens that the other can copy of the first n of a sequence, where the cache can cut them."""
        return self.cache.shared(source.shared_with(other, n), n)

    # ── one pass ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _forward(self, work: list[tuple[Sequence, int]]) -> tuple[Tensor, list[int]]:
        """The last block's output for the pass's tokens, and the last row of each sequence."""
        model = self.model
        for sequence, _ in work:
            sequence.long = self._long(sequence)
        step = self.cache.step([(sequence.slot, count) for sequence, count in work])
        ids = [i for x, count in work for i in x.window[x.slot.length : x.slot.length + count]]
        positions = step.positions
        lengths, counts = [len(x.window) for x, _ in work], [count for _, count in work]
        rotations = model.rotations(positions, lengths, counts=counts)
        a = model.embeddings(torch.tensor(ids, device=model.device), positions)
        run = Pass(
            rotations=rotations, adapters=groups([(x.options.adapter, count) for x, count in work]),
            operand=self._operand(len(ids)),
        )  # fmt: skip
        if self._blocks is not None and not self._blocks.current:
            self._blocks = describe(model)
        if self._blocks is not None and step.places is not None and len(ids) <= FEW_ROWS and not run.adapters:
            self._blocks.forward(a, step.places, rotations[0] if rotations else None)
        else:
            for i, block in enumerate(model.blocks):
                with model.weights(block, generating=True) as weights:
                    a, _ = block.forward(a, run._replace(cache=step.block(i), weights=weights))
        step.finish()
        return a, _last_rows(counts)

    def _operand(self, rows: int) -> torch.dtype | None:
        """What products read. Those of a few rows wait for the weights, whatever they compute with: nothing is rounded. A
        model that rounds activations to 8 bits reads float32."""
        return self.model.operand if rows > FEW_ROWS and not self.model.rounds_activations else None

    def _forward_uncached(self, work: list[tuple[Sequence, int]]) -> tuple[Tensor, list[int]]:
        """The same without a cache: complete sequences, as in training."""
        model = self.model
        lengths = [count for _, count in work]
        batch = model.pack(torch.tensor([i for sequence, _ in work for i in sequence.window]), lengths)
        a = model.embeddings(batch.ids, batch.positions)
        run = Pass(
            attention.spans_of(batch.lengths), rotations=model.rotations(batch.positions, lengths),
            adapters=groups([(x.options.adapter, count) for x, count in work]), operand=self._operand(len(batch.ids)),
        )  # fmt: skip
        for block in model.blocks:
            with model.weights(block, generating=True) as weights:
                a, _ = block.forward(a, run._replace(weights=weights))
        for sequence, count in work:
            sequence.slot.length = count
        return a, _last_rows(lengths)

    def _prompt_logprobs(self, work: list[tuple[Sequence, int]], a: Tensor, weights: storage.Weights) -> list[Event]:
        """Add the log-probabilities of the prompt's tokens that this pass has computed; events of sequences that fail."""
        model, start, failed = self.model, 0, list[Event]()
        for sequence, count in work:
            known = len(sequence.prompt_logprobs)
            first = sequence.slot.length - count  # position of the first row
            if sequence.options.prompt_logprobs and not sequence.new and known < len(sequence.prompt) - 1:
                targets = sequence.prompt[first + 1 : first + count + 1]
                rows = a[start : start + len(targets)]
                for part in row_groups(len(rows), model.head) if len(rows) else ():
                    run = Pass(adapters=groups([(sequence.options.adapter, len(rows[part]))]), weights=weights)
                    normed = model.final_norm.forward(rows[part], self._operand(len(rows[part])))[0]
                    logits = model.logit_map.forward(model.head.forward(normed, run))
                    if not torch.isfinite(logits.sum()):
                        failed.append(self._fail(sequence, self._non_finite(sequence, logits)))
                        break
                    sequence.prompt_logprobs += logprobs_of(logits, targets[part], sequence.options.logprobs or 0)
            start += count
        return failed

    # ── new tokens ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _choose(self, wanted: list[Sequence], logits: Tensor) -> list[Event]:
        """Choose the next token of every sequence. One whose logits are not finite, or whose grammar leaves no token, fails,
        and no other does."""
        own = logits.clone() if any(changes_logits(x) for x in wanted) else logits
        finite = torch.isfinite(logits.sum(1)).tolist()
        failed: dict[int, HandgradError] = {}
        for i, sequence in enumerate(wanted):
            try:
                if not finite[i]:
                    raise self._non_finite(sequence, logits[i])
                process(own[i], sequence)
            except HandgradError as reason:
                failed[i] = reason
        events = [self._fail(wanted[i], reason) for i, reason in failed.items()]
        if failed:
            sound = [i for i in range(len(wanted)) if i not in failed]
            wanted, logits, own = [wanted[i] for i in sound], logits[sound], own[sound]
        chosen = choose(own, [x.options.sampling for x in wanted], [x.generator for x in wanted])
        logprobs = self._logprobs(wanted, logits, chosen)
        return events + [self._append(*found) for found in zip(wanted, chosen, logprobs, strict=True)]

    def _non_finite(self, sequence: Sequence, logits: Tensor) -> HandgradError:
        """Why a sequence's logits are not finite."""
        try:
            check_finite_adapter(self.model, sequence.options.adapter)
            self.model.check_finite(logits)
        except HandgradError as reason:
            return reason
        return HandgradError("the logits are not finite")

    def _fail(self, sequence: Sequence, reason: HandgradError) -> Event:
        """End a sequence alone; nothing of it is kept for others."""
        sequence.error, sequence.finish = reason, "error"
        self.sequences.remove(sequence)
        self.cache.free(sequence.slot)
        self._evict()
        return Event(sequence, None, None, "error")

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
        if sequence.matcher is not None:
            sequence.matcher.add(i)
        if i in sequence.options.stop_ids or (sequence.matcher is not None and sequence.matcher.finished):
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
        """Free the slot, or keep it: the newest `keep`, and those that waiting prompts will copy from."""
        if self.cached and sequence.slot.length:
            self.kept.append(sequence)
        else:
            self.cache.free(sequence.slot)
        self._evict()

    def _evict(self) -> None:
        if not self.kept:
            return
        wanted = [self._source(x)[1] for x in self._waiting]
        spare = [x for x in self.kept if x not in wanted]
        for sequence in spare[: len(spare) - self.keep] if len(spare) > self.keep else ():
            self.kept.remove(sequence)
            self.cache.free(sequence.slot)


def _last_rows(lengths: list[int]) -> list[int]:
    last, end = [], 0
    for length in lengths:
        end += length
        last.append(end - 1)
    return last
