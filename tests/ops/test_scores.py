"""ops.attention with another scale, capped scores and sinks: against paper.scores, autograd and finite differences."""

import math

import pytest
import torch
from torch import Tensor

from conftest import ATTENTION_ROUNDING, rounded
from handgrad.errors import HandgradError
from handgrad.kernels import calls
from handgrad.ops import attention as fast
from handgrad.ops.attention import Scores
from handgrad.paper import scores as plain
from handgrad.proof.oracles import differentiate, relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE, TOLERANCE

CASES = [
    Scores(scale=0.3), Scores(cap=2.0), Scores(scale=2.0, cap=0.5), Scores(causal=False, cap=1.0), Scores(window=3, cap=5.0),
    Scores(window=70, scale=1.0, cap=0.05), Scores(),
]  # fmt: skip
SHAPES = [
    ((1,), 1, 1, 3, 3),
    ((5, 5, 130, 67), 4, 2, 8, 8),
    ((7, 140), 3, 3, 4, 6),
]  # lengths, heads, key heads, d_ρ, d_h


def dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: tuple[int, ...], of: Scores) -> Tensor:
    """All heads by matrices, one sequence at a time. (n, h, d_h)"""
    found, repeat = [], q.shape[1] // k.shape[1]
    for x, y, z in zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True):
        keys, values = (w.repeat_interleave(repeat, 1) for w in (y, z))
        s = torch.einsum("ihr,jhr->hij", x, keys) * (q.shape[2] ** -0.5 if of.scale is None else of.scale)
        if of.cap is not None:
            s = of.cap * torch.tanh(s / of.cap)
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if of.causal:
            hidden = (distance < 0) | (distance >= (of.window or len(x)))
        s = s.masked_fill(hidden, -math.inf)
        if sinks is not None:
            s = torch.cat([s, sinks[:, None, None].expand(-1, len(x), 1)], 2)
        found.append(torch.einsum("hij,jhw->ihw", torch.softmax(s, 2)[..., : len(x)], values))
    return torch.cat(found)


def computed(
    given: list[Tensor], delta: Tensor, spans: fast.Spans, of: Scores, sinks: Tensor | None
) -> tuple[list[Tensor], fast.Saved]:
    """The output, the error signals of q, k and v, and the gradient of the sinks."""
    a, saved = fast.forward(*given, spans, of, sinks)  # type: ignore[misc]
    grads = tuple(torch.full_like(x, math.nan) for x in given)
    fast.backward(delta, saved, spans, grads, of)  # type: ignore[arg-type]
    return [a, *grads, *([] if sinks is None else [fast.sink_signals(delta, saved, spans).sum(0)])], saved


def drawn(lengths: tuple[int, ...], h: int, h_kv: int, d_rho: int, d_h: int, scale: float = 2.0) -> list[Tensor]:
    n = sum(lengths)
    sizes = (h, d_rho, scale), (h_kv, d_rho, scale), (h_kv, d_h, 1.0), (h, d_h, 1.0)
    return [rounded(n, heads, w, dtype=torch.float32, scale=s) for heads, w, s in sizes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sink", [None, -1e4, 0.0, 3.0])
@pytest.mark.parametrize("of", CASES)
@pytest.mark.parametrize(("lengths", "h", "h_kv", "d_rho", "d_h"), SHAPES)
@pytest.mark.some_cases(5)
def test_equal_to_autograd(
    lengths: tuple[int, ...],
    h: int,
    h_kv: int,
    d_rho: int,
    d_h: int,
    of: Scores,
    sink: float | None,
    dtype: torch.dtype,
) -> None:
    *given, delta = drawn(lengths, h, h_kv, d_rho, d_h)
    sinks = None if sink is None else rounded(h, dtype=torch.float32) + sink
    leaves = [*given, *([] if sinks is None else [sinks])]
    before = [x.clone() for x in leaves]

    def function(*x: Tensor) -> Tensor:
        return dense(*x[:3], x[3] if sinks is not None else None, lengths, of)  # type: ignore[misc]

    expected = [function(*leaves), *differentiate(function, *leaves, upstream=delta)]
    spans, narrow = fast.spans_of(lengths), [x.to(dtype) for x in given]
    found, _ = computed(narrow, delta.to(dtype), spans, of, None if sinks is None else sinks.to(dtype))
    for x, y in zip(found, expected, strict=True):
        assert (
            x.dtype == dtype and relative_error(x, y, floor=0.1) <= (TOLERANCE if of.cap else ATTENTION_ROUNDING)[dtype]
        )
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True))


def test_equal_to_the_paper() -> None:
    (q, k, v, delta), b = drawn((9,), 1, 1, 4, 5), torch.tensor(0.7).double()
    saved = plain.forward(q[:, 0], k[:, 0], v[:, 0], 0.6, 1.5, b)
    back = plain.backward(delta[:, 0], q[:, 0], k[:, 0], v[:, 0], saved, (0.6, 1.5))
    of = Scores(scale=0.6, cap=1.5)
    found, kept = computed([q, k, v], delta, fast.spans_of((9,)), of, b[None])
    maps = fast.maps(delta, kept, (9,), of)
    expected = [
        saved.a,
        back.delta_q,
        back.delta_k,
        back.delta_v,
        back.grad_b,
        saved.rho,
        back.delta_causal,
        back.delta_raw,
    ]
    for x, y in zip([*(x[:, 0] for x in found[:4]), found[4][0], *(x[0] for x in maps)], expected, strict=True):
        assert relative_error(x, y) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize("of", [Scores(cap=1.5), Scores(scale=0.7, window=4), Scores(cap=1.0, window=70)])
def test_rows_without_a_query_are_0(of: Scores) -> None:
    """Outputs and signals of some rows are those with Δ = 0 elsewhere; padding, of which Δ is no number, stays 0."""
    lengths, sinks = (5, 140, 1), rounded(4, dtype=torch.float64)
    *given, delta = drawn(lengths, 4, 2, 8, 8)
    rows = torch.tensor([1, 2, 40, 100, 144, 145])
    padded = torch.zeros_like(delta)
    padded[rows] = delta[rows]
    whole, _ = computed(given, padded, fast.spans_of(lengths), of, sinks)
    some, _ = computed([given[0][rows], *given[1:]], delta[rows], fast.spans_of(lengths, rows), of, sinks)
    for x, y in zip(some, [whole[0][rows], whole[1][rows], *whole[2:]], strict=True):
        assert relative_error(x, y) <= IDENTITY_TOLERANCE
    spans = (fast.Span(slice(5, 145), slice(5, 145), 1, None),)
    padded[:5] = math.nan
    for sink in (sinks, 1e6 + sinks):
        found, saved = computed(given, padded, spans, of, sink)
        assert (
            all(torch.isfinite(x).all() for x in found) and saved.a[:5].abs().max() == 0 == found[1][145:].abs().max()
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e2, 1e6, 1e15, 1e30])
def test_capped_scores_of_any_size(scale: float, dtype: torch.dtype) -> None:
    """What is capped to ±c is as in float64, however large the score was; a score that overflowed is no number."""
    *given, delta = drawn((70, 3), 2, 1, 4, 4, scale)
    of, sinks = Scores(cap=3.0), torch.tensor([0.5, -2.0]).double()
    leaves = [*(x.to(dtype).double() for x in given), sinks.to(dtype).double()]
    narrow = delta.to(dtype)
    expected = dense(*leaves, (70, 3), of)  # type: ignore[misc]
    found, _ = computed([x.to(dtype) for x in given], narrow, fast.spans_of((70, 3)), of, sinks.to(dtype))
    if scale > 1e19 and dtype != torch.float64:
        assert found[0].isnan().any(2).all()
    else:
        assert all(torch.isfinite(x).all() for x in found)
        assert relative_error(found[0], expected) <= ATTENTION_ROUNDING[dtype]


def test_small_scores_keep_their_digits() -> None:
    """c tanh(s/c) of s ≪ c: the gradient of q is linear in them, and would show a relative error of the tanh."""
    q, k, v, delta = drawn((40,), 1, 1, 8, 8, 1e-4)
    exact = dense(q, k, v, None, (40,), Scores(cap=50.0))
    uniform = dense(0 * q, k, v, None, (40,), Scores())
    found = computed([x.float() for x in (q, k, v)], delta.float(), fast.spans_of((40,)), Scores(cap=50.0), None)[0][0]
    assert relative_error(found, exact) <= 1e-6 and relative_error(exact, uniform) < 1e-6
    x = torch.logspace(-12, 1, 4000).float()[:, None, None]
    one = torch.ones_like(x)
    lse = fast.forward(x, one, one, fast.spans_of((1,) * len(x)), Scores(scale=1.0, cap=1.0))[1].lse  # tanh x itself
    assert ((lse.double().view(-1) / torch.tanh(x.double().view(-1))) - 1).abs().max() <= 5e-7


def test_a_huge_sink_takes_everything() -> None:
    *given, delta = drawn((30,), 2, 2, 4, 4)
    found, saved = computed(given, delta, fast.spans_of((30,)), Scores(), torch.tensor([1e5, -math.inf]).double())
    assert found[0][:, 0].abs().max() == 0 and found[4][0].abs() <= 1e-300 and found[4][1] == 0
    without = computed([x[:, 1:] for x in given], delta[:, 1:], fast.spans_of((30,)), Scores(), None)[0]
    for x, y in zip(found, without, strict=False):
        assert relative_error(x[:, 1:], y) <= IDENTITY_TOLERANCE
    assert torch.equal(saved.lse[:, 0], torch.full((30,), 1e5).double())


@pytest.mark.parametrize(
    "of", [Scores(scale=0.0), Scores(scale=-1.0), Scores(cap=0.0), Scores(cap=math.inf), Scores(scale=math.nan)]
)
def test_nonsense_is_refused(of: Scores) -> None:
    q = torch.randn(3, 1, 4)
    with pytest.raises(HandgradError, match="both must be numbers above 0"):
        fast.forward(q, q, q, fast.spans_of((3,)), of)
    with pytest.raises(HandgradError, match="both must be numbers above 0"):
        calls.Scores(scale=of.scale, cap=of.cap).numbers(4)
