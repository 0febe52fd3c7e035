"""`diagnose`: is a computed tensor the right one, and if not, what is wrong with it?

Every known mistake is a hypothesis: a tensor that the mistake would have given, made from the right one. The simplest
hypothesis that explains what was computed, up to the rounding error allowed, is the diagnosis.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formatting import number, plural
from .hypotheses import MAX_SLICES, Found, axes_to_sum, hypotheses, norm, ranges

Part = tuple[int, int, int]  # axis, first index, number of indices

# What a diagnosis can be, simplest first: of two that explain a tensor equally well, the first is taken.
KINDS = (
    "right", "not trained", "unexpected", "shape", "not finite", "zero", "sign", "transpose", "known mistake",
    "missing term", "missing sum", "permuted", "factor", "factor per slice", "other",
)  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a tensor: one of KINDS, and a sentence about it whose subject is the tensor."""

    kind: str
    sentence: str
    error: float = 0.0  # ‖computed − expected‖
    bound: float = 0.0  # what rounding explains
    factor: float | None = None  # computed = factor · expected
    detail: str = ""  # name of the factor, term, mistake, axis or order
    part: str = ""  # the part of the tensor that is wrong, if only one is

    @property
    def right(self) -> bool:
        return self.kind == "right"

    def __str__(self) -> str:
        return self.sentence


def diagnose(
    computed: Tensor | None,
    expected: Tensor | None,
    bound: float,
    *,
    terms: Mapping[str, Tensor] | None = None,
    mistakes: Mapping[str, Tensor] | None = None,
    scales: Mapping[str, float] | None = None,
    parts: Mapping[str, Part] | None = None,
    fitted: Mapping[str, Tensor] | None = None,
    unsummed: Tensor | None = None,
) -> Diagnosis:
    """Compare a computed tensor with the right one; if they differ by more than rounding, say how.

    computed   None: it was never computed
    expected   None: there should be none, of a frozen weight
    bound      the largest ‖computed − expected‖ that rounding explains
    terms      named tensors that `expected` is the sum of, all or some: a missing or doubled one is named
    mistakes   tensors that known mistakes would have given, each named by a condition: "the keys were rotated twice"
    scales     named numbers that may be a factor too many or too few: {"√d_head": 8.0}
    parts      named slices, each (axis, first, count): if only some are wrong, the first wrong one is diagnosed
    fitted     like `mistakes`, each with a number chosen to fit `computed`: counts if no other mistake fits as well
    unsummed   `expected` before its sum over one or more axes
    """
    if expected is None:
        return _judge_unexpected(computed)
    expected = expected.detach().double()
    size = norm(expected)
    if computed is None:
        if size <= bound:
            return Diagnosis("right", "is 0, and was not computed", 0.0, bound)
        return Diagnosis("not trained", "was never computed: nothing of it reached the loss", size, bound)
    computed = computed.detach().to(expected.device).double()
    if computed.shape != expected.shape:
        return _judge_shape(computed, expected, bound)
    broken = ~torch.isfinite(computed)
    if broken.any():
        return _judge_broken(computed, expected, bound, broken)
    error = norm(computed - expected)
    if error <= bound:
        return Diagnosis("right", "is right", error, bound)
    if not computed.any():
        return Diagnosis("zero", "is zero", error, bound, 0.0)
    inner, some_right = _judge_parts(computed, expected, bound, parts or {}, scales or {})
    if inner is not None and some_right and inner.kind not in ("factor per slice", "other"):
        return inner
    known = (mistakes or {}, fitted or {})
    found = list(hypotheses(computed, expected, bound, terms or {}, known, scales or {}, unsummed))
    if some_right and inner is not None:  # of the whole tensor, only a known mistake says more than the wrong parts do
        found = [h for h in found if h.kind == "known mistake"]
    if found:
        best = _simplest(found)
        return Diagnosis(best.kind, best.sentence, error, bound, best.factor, best.detail)
    if inner is not None:
        return inner
    if norm(computed) <= bound:
        return Diagnosis("zero", "is zero up to rounding", error, bound, 0.0)
    return Diagnosis("other", _describe(computed, expected, bound), error, bound)


def _simplest(found: list[Found]) -> Found:
    found = [h for h in found if not h.loose] or found
    best = min(hypothesis.residual for hypothesis in found)
    fitting = [h for h in found if h.residual <= 2 * best + 1e-300]
    return min(fitting, key=lambda h: (h.free, KINDS.index(h.kind), h.residual))


# ── cases without a comparison ──────────────────────────────────────────────────────────────────────────────────────


def _judge_unexpected(computed: Tensor | None) -> Diagnosis:
    if computed is None:
        return Diagnosis("right", "has no gradient, as it should")
    size = norm(computed.detach().double())
    return Diagnosis("unexpected", "is there, and should not be: an optimizer would apply it", size)


def _judge_shape(computed: Tensor, expected: Tensor, bound: float) -> Diagnosis:
    """Shapes differ: a sum over an axis may be missing, or the tensor transposed."""
    given, wanted = "×".join(map(str, computed.shape)) or "scalar", "×".join(map(str, expected.shape)) or "scalar"
    for axes in axes_to_sum(computed, expected):
        if norm(computed.sum(axes).reshape(expected.shape) - expected) <= bound:
            named = " and ".join(map(str, axes))
            text = f"lacks the sum over axis {named}: it is {given}, and its sum, {wanted}, is right"
            return Diagnosis("missing sum", text, math.inf, bound, detail=named)
    if computed.ndim == 2 and computed.t().shape == expected.shape and norm(computed.t() - expected) <= bound:
        return Diagnosis("transpose", f"is transposed: {given} instead of {wanted}", math.inf, bound)
    text = f"has the shape {given} instead of {wanted}"
    if computed.numel() == expected.numel() and norm(computed.reshape(expected.shape) - expected) <= bound:
        text += ", with the right entries in the right order"
    return Diagnosis("shape", text, math.inf, bound)


def _judge_broken(computed: Tensor, expected: Tensor, bound: float, broken: Tensor) -> Diagnosis:
    count, nan = int(broken.sum()), bool(torch.isnan(computed).any())
    what = "NaN or infinite" if nan else "infinite"
    text = f"is {what} in {count:,} of {plural(computed.numel(), 'entry', 'entries')}"
    if count < computed.numel():
        rest = norm((computed - expected)[~broken])
        text += ", and right in the others" if rest <= bound else ", and wrong in the others"
    return Diagnosis("not finite", text, math.inf, bound)


def _judge_parts(
    computed: Tensor, expected: Tensor, bound: float, parts: Mapping[str, Part], scales: Mapping[str, float]
) -> tuple[Diagnosis | None, bool]:
    """The diagnosis of the parts that are wrong, and whether others are right."""
    judged = {
        name: diagnose(computed.narrow(*part), expected.narrow(*part), bound, scales=scales)
        for name, part in parts.items()
    }
    wrong = {name: d for name, d in judged.items() if not d.right}
    if not wrong:
        return None, True
    name, first = next(iter(wrong.items()))
    if {(d.kind, d.detail) for d in wrong.values()} == {(first.kind, first.detail)}:
        text = f"in {' and '.join(wrong)} {first.sentence}"
    else:
        text = "; ".join(f"in {name} {d.sentence}" for name, d in wrong.items())
    some_right = len(wrong) < len(parts)
    return Diagnosis(first.kind, text, first.error, bound, first.factor, first.detail, name), some_right


# ── a description when nothing explains it ──────────────────────────────────────────────────────────────────────────


def _describe(computed: Tensor, expected: Tensor, bound: float) -> str:
    """Where the error is, how large the tensor is, and how far its direction is off."""
    error, size = computed - expected, norm(expected)
    if not size:
        return f"should be zero, and has the norm {number(norm(computed))}"
    if expected.numel() == 1:
        return f"is {number(computed.item())} instead of {number(expected.item())}"
    angle = float((computed * expected).sum()) / (norm(computed) * size)
    text = f"is wrong by {number(norm(error) / size)} of its norm (cosine {number(angle)})"
    for axis, n in enumerate(expected.shape):
        if not 2 <= n <= MAX_SLICES:
            continue
        errors = error.movedim(axis, 0).reshape(n, -1).norm(dim=1)
        wrong = (errors > 3 * bound / math.sqrt(n)).nonzero().flatten().tolist()
        if 0 < len(wrong) <= n / 2:
            return f"{text}, in {len(wrong)} of the {n} slices of axis {axis}: {ranges(wrong)}"
    return text
