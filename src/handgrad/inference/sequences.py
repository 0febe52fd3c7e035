"""A sequence of the engine: what to generate, what has been generated, and the checks of both."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError, option
from ..lora.named import check_named
from ..model.gpt import GPT
from ..model.passes.batch import check_ids
from .grammar import Grammar, Matcher
from .sampling import Sampling
from .slots import Slot

GREEDY = Sampling()
Finish = Literal["stop", "length", "context", "cancelled", "error"]


class TokenLogprob(NamedTuple):
    """The log-probability that the model gives a token, before penalties, bias, grammar, temperature and filters, and the
    most probable tokens."""

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
    adapter           name of one of several adapters (`lora.named`); None: the model as it is
    grammar           what the text may be (`grammar.py`); when nothing can follow, the sequence ends
    """

    max_new_tokens: int = 50
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    context_full: Literal["stop", "slide"] = "stop"
    adapter: str | None = None
    grammar: Grammar | None = None


@dataclass(eq=False)
class Sequence:
    """A prompt and what has been generated after it. `finish` says why it ended, None while it runs, and `error` why it
    failed."""

    prompt: list[int]
    options: Options
    generator: torch.Generator
    slot: Slot
    new: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on
    finish: Finish | None = None
    error: HandgradError | None = None
    matcher: Matcher | None = None  # where it is in its grammar
    window: list[int] = field(default_factory=list)  # the ids that the model sees
    joined: bool = False  # whether any of it has been computed
    long: bool = False  # whether its keys are rotated as those of a sequence beyond the original context

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.new

    @property
    def pending(self) -> int:
        """Number of tokens that are not in the cache yet."""
        return len(self.window) - self.slot.length

    def may_give_to(self, other: "Sequence") -> bool:
        """Whether the other can copy keys and values from this one, and log-probabilities of its prompt if it needs them.
        Those are unknown here if this one's were not wanted, or are of a text that has moved out of the window."""
        if self.options.adapter != other.options.adapter:
            return False
        scored = self.options.prompt_logprobs and len(self.window) == len(self.ids)
        return not other.options.prompt_logprobs or (scored and self.options.logprobs == other.options.logprobs)

    def shared_with(self, other: "Sequence", n: int) -> int:
        """The number of tokens that the other can copy of the first n here. It computes at least its last token's row, and
        the one before its first new token, if it needs that token's log-probability."""
        same = common(other.window, self.window[:n])
        if other.options.prompt_logprobs:
            same = min(same - 1, len(self.prompt) - 1)
        return max(0, min(same, len(other.window) - 1))


def common(a: list[int], b: list[int]) -> int:
    """The length of the beginning that two lists share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


class Event(NamedTuple):
    """A new token of a sequence. `finish` is None unless it is the last. A sequence that ends without one has id None."""

    sequence: Sequence
    id: int | None
    logprob: TokenLogprob | None
    finish: Finish | None


def check_prompt(model: GPT, prompt: SequenceOf[int] | Tensor, options: Options) -> list[int]:
    """The prompt's ids. Raises if they, or the options, do not suit the model."""
    c = model.config
    ids = torch.as_tensor(prompt)
    if ids.numel():
        check_ids("the prompt", ids)
    if ids.numel() == 0:
        raise HandgradError("the prompt is empty: give at least one token")
    if ids.ndim != 1:
        raise HandgradError(f"a prompt is a list of ids, not of shape {tuple(ids.shape)}")
    if options.context_full not in ("stop", "slide"):
        raise HandgradError(f"context_full must be 'stop' or 'slide', not {options.context_full!r}")
    if len(ids) > c.n_context and options.context_full == "stop":
        raise HandgradError(
            f"the prompt has {len(ids):,} tokens, and the context {c.n_context:,}: shorten it, or give"
            f" {option('context_full', 'slide')} to use its end"
        )
    model.pack(ids[-c.n_context :])
    check_named(model, options.adapter)
    least = 0 if options.prompt_logprobs else 1
    if type(options.max_new_tokens) is not int or options.max_new_tokens < least:
        raise HandgradError(f"max_new_tokens must be at least {least}, not {options.max_new_tokens}")
    for what, ids_of in (
        ("stop id", options.stop_ids),
        ("logit_bias: id", [i for i, _ in options.sampling.logit_bias]),
    ):
        for i in ids_of:
            if type(i) is not int or not 0 <= i < c.n_vocab:
                raise HandgradError(f"{what} {i!r} is outside the vocabulary: ids go from 0 to {c.n_vocab - 1}")
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
