"""Choose the next token from its logits.

    logits → penalties, bias, grammar (`processors.py`) → temperature → top-k → top-p → min-p → probabilities → the next id

This is the order of `transformers`; each filter sees the probabilities that the ones before it left. At temperature 0 the
most probable token after the penalties is taken.

A sequence draws one number per token from its own generator. It gives every id i a time e_i, exponentially distributed,
and the id with the largest p_i / e_i is chosen, which is i with probability p_i: of arrivals at the rates p_i, the first.
A choice depends on seed and probabilities only. Batches of different sizes round probabilities differently, and that
changes a choice about as rarely as the probabilities differ. (One number compared with the cumulative sum over the
vocabulary would change it more often: rounding moves the limits of all ids, of which thousands are narrower than that.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_integer, is_number
from ..errors import HandgradError, option

COLDEST = 1e-6  # a lower temperature would overflow, and gives the same choices
_GOLDEN, _MIX_1, _MIX_2 = (
    -0x61C8864680B583EB,
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)  # of splitmix64, as signed numbers
GROUP = 1024  # ids among which one is chosen at once
FIRST_CANDIDATES = 1024  # most probable tokens that top-p sorts first; all of them only if these do not suffice


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature          0 takes the most probable token; 1 samples from the model's probabilities, lower values sharpen them
    top_k                sample among the k most probable tokens only
    top_p                sample among the fewest tokens that have this probability together
    min_p                sample among the tokens that have at least this share of the highest probability
    repetition_penalty   divide positive logits of tokens that already occur by this number, and multiply negative ones
    seed                 the same seed gives the same tokens; None: a random seed
    frequency_penalty    subtract this from the logit of a token for every time it occurs in the new text
    presence_penalty     subtract this from the logits of tokens that occur in the new text
    logit_bias           (id, number to add to its logit), …
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or self.temperature < 0:
            raise HandgradError(
                f"{option('temperature')} must be a finite number of at least 0, not {self.temperature}"
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise HandgradError(f"{option('top_k')} must be an integer of at least 1, not {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 <= value <= 1):
                raise HandgradError(f"{option(name)} must be a number from 0 to 1, not {value}")
        if not is_number(self.repetition_penalty) or self.repetition_penalty <= 0:
            raise HandgradError(
                f"{option('repetition_penalty')} must be a number above 0, not {self.repetition_penalty}"
            )
        for name in ("frequency_penalty", "presence_penalty"):
            if not is_number(getattr(self, name)):
                raise HandgradError(f"{name} must be a finite number, not {getattr(self, name)}")
        for i, bias in self.logit_bias:
            if type(i) is not int or not is_number(bias):
                raise HandgradError(f"logit_bias has {i!r}: {bias!r}; give finite numbers by token id")
        if self.seed is not None:
            check_integer("seed", self.seed)

    def generator(self) -> torch.Generator:
        """The random numbers of one sequence."""
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def choose(
    logits: Tensor,
    samplings: Sequence[Sampling],
    generators: Sequence[torch.Generator],
) -> list[int]:
    """(B, V) logits, penalties included → the next id of every row. Rows of equal settings are computed together."""
    groups: dict[Sampling, list[int]] = {}
    for row, s in enumerate(samplings):
        groups.setdefault(Sampling(s.temperature, s.top_k, s.top_p, s.min_p), []).append(row)
    chosen = [0] * len(logits)
    for sampling, rows in groups.items():
        some = logits if len(rows) == len(logits) else logits[rows]
        candidates, p = candidates_of(some, sampling)
        if sampling.greedy and candidates is not None:
            picked = candidates[:, 0]
        else:
            keys = [torch.empty((), dtype=torch.int64).random_(generator=generators[row]) for row in rows]
            picked = _pick(candidates, p, torch.stack(keys).to(p.device))
        for row, i in zip(rows, picked.tolist(), strict=True):
            chosen[row] = i
    return chosen


def _pick(candidates: Tensor | None, p: Tensor, keys: Tensor) -> Tensor:
    """The ids that can be chosen (B, k), or None for all, their probabilities, and (B) random integers → (B) ids"""
    if candidates is not None:
        return candidates.gather(1, _first(p, keys, candidates)).squeeze(1)
    groups = F.pad(p, (0, -p.shape[1] % GROUP)).view(len(p), -1, GROUP)  # first a group of ids, then one of them
    numbers = torch.arange(groups.shape[1], device=p.device).expand(len(p), -1)
    group = _first(groups.sum(2), keys, -1 - numbers)
    ids = group * GROUP + torch.arange(GROUP, device=p.device)
    inside = groups.gather(1, group[:, :, None].expand(-1, 1, GROUP)).squeeze(1)
    return ids.gather(1, _first(inside, keys, ids)).squeeze(1)


def _first(p: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """(B, 1) columns of the first arrivals"""
    return (p / -uniform(keys[:, None], ids).log_()).argmax(1, keepdim=True)


def uniform(keys: Tensor, ids: Tensor) -> Tensor:
    """Numbers between 0 and 1, in float64, that depend on key and id only: splitmix64's number `id` from `key` on"""
    x = (ids + 1) * _GOLDEN + keys
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    x = x ^ _shifted(x, 31)
    return (_shifted(x, 11).double() + 0.5) * 2.0**-53


def _shifted(x: Tensor, n: int) -> Tensor:
    """x >> n, of 64 bits without a sign"""
    return (x >> n) & ((1 << 64 - n) - 1)


def candidates_of(logits: Tensor, sampling: Sampling) -> tuple[Tensor | None, Tensor]:
    """The ids that can be chosen, (B, k), or None for all, and their probabilities in float64."""
    if sampling.greedy:
        best = logits.argmax(1, keepdim=True)
        return best, torch.ones(best.shape, dtype=torch.float64, device=logits.device)
    n_vocab = logits.shape[1]
    ids: Tensor | None = None
    if sampling.top_k is not None and sampling.top_k < n_vocab:
        logits, ids = _largest(logits, sampling.top_k)
    p = torch.softmax(logits.double() / max(sampling.temperature, COLDEST), 1)
    if sampling.top_p is not None and sampling.top_p < 1:
        p, ids = _nucleus(p, ids, sampling.top_p)
    if sampling.min_p:
        p = p.masked_fill(p < sampling.min_p * p.amax(1, keepdim=True), 0)
        p = p / p.sum(1, keepdim=True)
    return ids, p


def _largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of every row and their ids, and those equal to the smallest of them."""
    n_vocab = logits.shape[1]
    values, ids = torch.topk(logits, min(k + 1, n_vocab))
    while k < values.shape[1] < n_vocab and bool((values[:, k - 1] == values[:, -1]).any()):
        values, ids = torch.topk(logits, min(2 * values.shape[1], n_vocab))
    return values.masked_fill(values < values[:, k - 1 : k], -math.inf), ids


def _nucleus(p: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest tokens with the probability top_p together: each whose more probable tokens have less than that."""
    n = min(FIRST_CANDIDATES, p.shape[1])
    while True:
        largest, columns = torch.topk(p, n)
        before = largest.cumsum(1) - largest
        if n == p.shape[1] or bool((before[:, -1] >= top_p).all()):
            break
        n = p.shape[1]
    kept = before < top_p
    kept[:, 0] = True  # top_p = 0 takes the most probable
    largest = largest.masked_fill(~kept, 0)
    largest = largest / largest.sum(1, keepdim=True)
    return largest, columns if ids is None else ids.gather(1, columns)
