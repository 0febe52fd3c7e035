"""The hypotheses of `diagnose`: what known mistakes would have made of the right tensor.

Each is within the error allowed, or is not given at all: a sign, a factor, a transpose, a term that is missing, a sum that
is missing, another order.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..formatting import number

MAX_SLICES = 2048  # an axis with more slices is not searched for a permutation
TIGHT = 1e-4  # relative bound below which equal entries in another order are no coincidence
CLOSE = 0.1  # factors closer to 1 are given in percent
ENOUGH = 4  # numbers of a slice that resembles another by no coincidence
Fits = Callable[[Tensor], float | None]


class Found(NamedTuple):
    """A hypothesis that explains the tensor, and by how much it misses."""

    kind: str
    sentence: str
    residual: float
    factor: float | None = None
    detail: str = ""
    free: bool = False  # has a number fitted to the tensor, so it fits at least as well as one without
    loose: bool = False  # has many such numbers: it counts only if nothing else fits


def hypotheses(
    computed: Tensor,
    expected: Tensor,
    bound: float,
    terms: Mapping[str, Tensor],
    mistakes: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],  # without and with a number that was fitted
    scales: Mapping[str, float],
    unsummed: Tensor | None,
) -> Iterator[Found]:
    """Every hypothesis within the allowed error."""
    size = norm(expected)
    relative = bound / size if size else math.inf

    def fits(guess: Tensor) -> float | None:
        """The residual, if it is within what rounding of a tensor of the guess's size explains."""
        residual = norm(computed - guess)
        scaled = bound if not size else bound * norm(guess) / size
        return residual if residual <= scaled or residual == 0 else None

    yield from _scaled(computed, expected, fits, relative, scales)
    yield from _transposed(expected, fits)
    for name, guess, free in ((name, guess, i > 0) for i, made in enumerate(mistakes) for name, guess in made.items()):
        # a mistake that changes nothing explains nothing
        if guess.shape != expected.shape or norm(guess - expected) <= bound:
            continue
        if (residual := fits(guess.double())) is not None:
            yield Found("known mistake", f"is what it would be if {name}", residual, detail=name, free=free)
    yield from _terms(computed, expected, bound, terms, scales)
    if unsummed is not None:
        yield from _unsummed(unsummed.double(), expected, fits)
    yield from _empty(computed, expected, fits)
    yield from _permuted(computed, expected, fits, relative)
    yield from _per_slice(computed, expected, fits)


def _scaled(
    computed: Tensor, expected: Tensor, fits: Fits, relative: float, scales: Mapping[str, float]
) -> Iterator[Found]:
    """computed = factor · expected"""
    square = float((expected * expected).sum())
    if not square:
        return
    factor = float((computed * expected).sum()) / square
    residual = fits(factor * expected) if factor else None
    if residual is None:
        return
    margin = max(3 * relative, 1e-9)
    if abs(factor + 1) <= margin:
        yield Found("sign", "has the wrong sign", residual, -1.0)
        return
    size, sign = abs(factor), "has the wrong sign and " if factor < 0 else ""
    near = _named(size, scales, margin)
    whole = _whole(size, margin)
    text = f"{sign}is {_factor_text(size, whole)}"
    if near:
        text += f" ({' or '.join(near)})"
    if expected.numel() > 1 or near or whole:  # every number is a multiple of another
        yield Found(
            "factor",
            text,
            residual,
            factor,
            " or ".join(near) or f"{size:.6g}",
            loose=expected.numel() == 1 and not near,
        )


def _named(size: float, scales: Mapping[str, float], margin: float) -> list[str]:
    """The named numbers that a factor of this size may be."""
    named = {name: x for name, x in scales.items() if x > 0 and x != 1}
    known = [(f"multiplied by {name}", x) for name, x in named.items()]
    known += [(f"divided by {name}", 1 / x) for name, x in named.items()]
    close = sorted((abs(size / x - 1), how) for how, x in known if abs(size / x - 1) <= margin)
    return [how for distance, how in close if distance <= 2 * close[0][0] + 1e-9]


def _whole(size: float, margin: float) -> int:
    """2 for a factor of 2 or of 1/2; 0 if it is no such number"""
    ratio = max(size, 1 / size)
    return round(ratio) if ratio > 1.5 and abs(ratio / round(ratio) - 1) <= min(margin, 0.1) else 0


def _factor_text(size: float, whole: int) -> str:
    """2 times too large; half of the right one; 0.13 of the right one; 0.1 % too large"""
    if whole and size > 1:
        return f"{whole} times too large"
    if whole:
        return ("half" if whole == 2 else f"1/{whole}") + " of the right one"
    if abs(size - 1) < CLOSE:
        return f"{number(100 * abs(size - 1))} % too {'large' if size > 1 else 'small'}"
    return f"{number(size)} times too large" if size > 1 else f"{number(size)} of the right one"


def _transposed(expected: Tensor, fits: Fits) -> Iterator[Found]:
    for i in range(expected.ndim):
        for j in range(i + 1, expected.ndim):
            if expected.shape[i] == expected.shape[j] > 1:
                residual = fits(expected.transpose(i, j))
                if residual is not None:
                    axes = "" if expected.ndim == 2 else f" in axes {i} and {j}"
                    yield Found("transpose", f"is transposed{axes}", residual, detail=f"{i},{j}")
    if expected.ndim == 2 and 1 not in expected.shape and (r := fits(expected.t().reshape(expected.shape))) is not None:
        yield Found("transpose", "is transposed in memory: reshaped where it should be transposed", r)


def _terms(
    computed: Tensor, expected: Tensor, bound: float, terms: Mapping[str, Tensor], scales: Mapping[str, float]
) -> Iterator[Found]:
    """computed = expected + β · term: missing for β = −1"""
    difference = computed - expected
    for name, term in terms.items():
        if term.shape != expected.shape:
            continue
        term = term.double()
        square = float((term * term).sum())
        if math.sqrt(square) <= bound:
            continue
        beta = float((difference * term).sum()) / square
        allowed = bound * max(1.0, abs(beta) * math.sqrt(square) / (norm(expected) or 1.0))
        exact = {-1.0: f"lacks {name}", 1.0: f"has {name} twice", -2.0: f"has the wrong sign in {name}"}
        for known, text in exact.items():
            if (residual := norm(difference - known * term)) <= allowed:
                yield Found("missing term", text, residual, 1 + known, name)
        if (residual := norm(difference - beta * term)) <= allowed:
            near = _named(1 + beta, scales, max(3 * bound / math.sqrt(square), 1e-9))
            text = f"has {name}, {' or '.join(near) or f'multiplied by {number(1 + beta)}'}"
            yield Found("missing term", text, residual, 1 + beta, name, free=True)


def _unsummed(unsummed: Tensor, expected: Tensor, fits: Fits) -> Iterator[Found]:
    """Only one slice of what should have been summed."""
    for axes in axes_to_sum(unsummed, expected):
        flat = unsummed.movedim(axes, tuple(range(len(axes)))).flatten(0, len(axes) - 1)
        named = " and ".join(map(str, axes))
        for which, index in (("first", 0), ("last", -1)):
            residual = fits(flat[index].reshape(expected.shape))
            if residual is not None:
                text = f"lacks the sum over axis {named}: it is the {which} of {len(flat)} contributions"
                yield Found("missing sum", text, residual, detail=named)


def _empty(computed: Tensor, expected: Tensor, fits: Fits) -> Iterator[Found]:
    """Some slices were never written."""
    for axis, n in enumerate(expected.shape):
        filled, wanted = ((x != 0).movedim(axis, 0).reshape(n, -1).any(1) for x in (computed, expected))
        zero = (wanted & ~filled).nonzero().flatten().tolist()
        if n < 2 or not 0 < len(zero) < n:
            continue
        residual = fits(expected * filled.view([n if i == axis else 1 for i in range(expected.ndim)]))
        if residual is not None:
            text = f"is zero in {len(zero)} of the {n} slices of axis {axis} ({ranges(zero)}), and right in the others"
            yield Found("zero", text, residual, detail=f"axis {axis}")


def _permuted(computed: Tensor, expected: Tensor, fits: Fits, relative: float) -> Iterator[Found]:
    """The right slices in another order."""
    generator = torch.Generator().manual_seed(0)
    for axis, n in enumerate(expected.shape):
        if not 2 <= n <= MAX_SLICES or (expected.ndim > 1 and expected.numel() == n):
            continue
        ours, right = (x.movedim(axis, 0).reshape(n, -1).cpu() for x in (computed, expected))
        if right.shape[1] > 16:  # distances survive a random projection
            turn = torch.randn(right.shape[1], 16, generator=generator, dtype=torch.float64)
            ours, right = ours @ turn, right @ turn
        order = torch.cdist(ours, right).argmin(1)
        if torch.equal(order, torch.arange(n)):
            continue
        if len(set(order.tolist())) < n:
            yield from _taken(computed, expected, fits, axis, order)
            continue
        residual = fits(expected.index_select(axis, order.to(expected.device)))
        if residual is not None:
            how = _order_name(order.tolist())
            yield Found("permuted", f"has its slices of axis {axis} in another order: {how}", residual, detail=how)
    if relative <= TIGHT and expected.numel() > 1:
        values, where = computed.flatten().sort()
        guess = torch.empty_like(values)
        guess[where] = expected.flatten().sort().values
        if (residual := fits(guess.view_as(expected))) is not None:
            yield Found("permuted", "has the right entries in another order", residual, detail="entries", loose=True)


def _taken(computed: Tensor, expected: Tensor, fits: Fits, axis: int, order: Tensor) -> Iterator[Found]:
    """Slices that belong elsewhere, some of them twice; others may be zero."""
    n = len(order)
    ours = computed.movedim(axis, 0).reshape(n, -1).cpu()
    if ours.shape[1] < ENOUGH:
        return
    filled = (ours != 0).any(1)
    guess = expected.movedim(axis, 0)[order.to(expected.device)].clone()
    guess[~filled.to(expected.device)] = 0.0
    residual = fits(guess.movedim(0, axis))
    moved = [(i, j) for i, j in enumerate(order.tolist()) if i != j and filled[i]]
    if residual is None or not moved:
        return
    how = "; ".join(f"slice {i} holds what belongs in slice {j}" for i, j in moved[:2]) + (" …" if moved[2:] else "")
    steps = {i - j for i, j in moved}
    if len(steps) == 1 and len(moved) >= n - 2 > 1:
        how = f"shifted by {steps.pop()}"
    yield Found(
        "permuted", f"has slices of axis {axis} in the place of others: {how}", residual, detail=how, loose=True
    )


def ranges(indices: list[int]) -> str:
    """0–3, 7, 9–10"""
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    shown = [str(a) if a == b else f"{a}–{b}" for a, b in runs[:6]]
    return ", ".join(shown) + (" …" if len(runs) > 6 else "")


def _order_name(order: list[int]) -> str:
    n = len(order)
    if order == list(range(n))[::-1]:
        return "reversed"
    if all(j == (i + order[0]) % n for i, j in enumerate(order)):
        shift = order[0] if order[0] <= n // 2 else order[0] - n
        return "halves exchanged" if 2 * order[0] == n else f"shifted by {-shift}"
    if n % 2 == 0:
        halves = [i // 2 + (i % 2) * (n // 2) for i in range(n)]
        if order in (halves, [halves.index(i) for i in range(n)]):
            return "interleaved in the place of halves, or the reverse"
    moved = [i for i, j in enumerate(order) if i != j]
    return f"{moved[0]} and {moved[1]} exchanged" if len(moved) == 2 else f"{len(moved)} of {n} moved"


def _per_slice(computed: Tensor, expected: Tensor, fits: Fits) -> Iterator[Found]:
    """Another factor for each slice of an axis: a gain that is missing or applied twice."""
    for axis, n in enumerate(expected.shape):
        if n < 2 or expected.numel() < 4 * n:
            continue
        others = [i for i in range(expected.ndim) if i != axis]
        square = (expected * expected).sum(others, keepdim=True)
        factors = (computed * expected).sum(others, keepdim=True) / square.clamp_min(1e-300)
        residual = fits(factors * expected)
        if residual is not None:
            low, high = factors.min().item(), factors.max().item()
            text = f"is multiplied by a different factor in each slice of axis {axis}, from {number(low)} to {number(high)}"
            yield Found("factor per slice", text, residual, detail=str(axis), loose=True)


def axes_to_sum(computed: Tensor, expected: Tensor) -> Iterator[tuple[int, ...]]:
    """The axes of `computed` that a sum would have to remove, if broadcasting could have made them."""
    extra = computed.ndim - expected.ndim
    if extra >= 0:
        aligned = [1] * extra + list(expected.shape)
        axes = tuple(i for i, (n, m) in enumerate(zip(computed.shape, aligned, strict=True)) if m == 1 and n != 1)
        if axes and all(n == m or m == 1 for n, m in zip(computed.shape, aligned, strict=True)):
            yield axes
    for axis in range(computed.ndim) if extra == 1 else ():
        if computed.shape[axis] != 1 and computed.shape[:axis] + computed.shape[axis + 1 :] == expected.shape:
            yield (axis,)


def norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x).item())
