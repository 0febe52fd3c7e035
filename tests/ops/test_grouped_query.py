"""ops.attention with grouped queries and with windows, against paper.grouped_query and dense softmax in float64."""

import math

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.llama.modeling_llama import repeat_kv

from conftest import ATTENTION_ROUNDING, ROUNDING, rounded
from handgrad.ops import _tiles
from handgrad.ops import attention as fast
from handgrad.paper import grouped_query as plain
from handgrad.proof.oracles import differentiate, relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE

GROUPS = [(9, 3), (9, 1), (4, 2), (6, 6), (5, 1)]  # query heads, key heads


def dense(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], causal: bool, window: int | None) -> Tensor:
    """Attention of all heads with the complete matrix of scores; query head i reads key head i // (h/h_kv)."""
    repeat = q.shape[1] // k.shape[1]
    heads = [i // repeat for i in range(q.shape[1])]
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    i, j = torch.arange(len(q))[:, None], torch.arange(len(q))[None, :]
    visible = sequence[:, None] == sequence[None, :]
    if causal:
        visible &= j <= i
    if window is not None:
        visible &= j > i - window
    scores = torch.einsum("ihr,jhr->hij", q, k[:, heads]) / math.sqrt(q.shape[2])
    rho = torch.softmax(scores.masked_fill(~visible, -math.inf), 2)
    return torch.einsum("hij,jhw->ihw", rho, v[:, heads])


def signals(
    q: Tensor, k: Tensor, v: Tensor, delta: Tensor, spans: fast.Spans, causal: bool = True, window: int | None = None
) -> list[Tensor]:
    """The output and the error signals of q, k and v."""
    a, saved = fast.forward(q, k, v, spans, fast.Scores(causal, window))
    grads = tuple(torch.full_like(x, math.nan) for x in (q, k, v))
    fast.backward(delta, saved, spans, grads, fast.Scores(causal, window))
    return [a, *grads]


def inputs(n: int, heads: tuple[int, int], d_rho: int, d_h: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h, h_kv = heads
    return tuple(torch.randn(n, *x).double() for x in ((h, d_rho), (h_kv, d_rho), (h_kv, d_h), (h, d_h)))  # type: ignore[return-value]


def by_autograd(
    q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lengths: tuple[int, ...], causal: bool, window: int | None
) -> list[Tensor]:
    out = dense(q, k, v, lengths, causal, window)
    return [out, *differentiate(lambda q, k, v: dense(q, k, v, lengths, causal, window), q, k, v, upstream=delta)]


@pytest.mark.parametrize("window", [None, 1, 3, 70])
@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.some_cases(3)
def test_equal_to_the_paper(heads: tuple[int, int], window: int | None) -> None:
    n, d_rho, d_h = 67, 3, 5
    q, k, v, delta = inputs(n, heads, d_rho, d_h)
    f = plain.forward(q.unbind(1), k.unbind(1), v.unbind(1), window)
    raw = plain.delta_raw(delta.unbind(1), v.unbind(1), f, d_rho)
    expected = [
        [head.a for head in f],
        plain.delta_q(raw, k.unbind(1)),
        plain.delta_k(raw, q.unbind(1), heads[1]),
        plain.delta_v(delta.unbind(1), f, heads[1]),
    ]
    for x, y in zip(signals(q, k, v, delta, fast.spans_of((n,)), True, window), expected, strict=True):
        assert relative_error(x, torch.stack(y, 1), floor=1.0) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("widths", [(4, 4), (3, 5)])
@pytest.mark.parametrize("heads", GROUPS)
@pytest.mark.parametrize("lengths", [(1,), (5, 5, 5), (2, 1, 9, 9, 4), (66, 131)])
@pytest.mark.some_cases(3)
def test_groups(lengths: tuple[int, ...], heads: tuple[int, int], widths: tuple[int, int], causal: bool) -> None:
    q, k, v, delta = inputs(sum(lengths), heads, *widths)
    found = signals(q, k, v, delta, fast.spans_of(lengths), causal)
    for x, y in zip(found, by_autograd(q, k, v, delta, lengths, causal, None), strict=True):
        assert x.shape == y.shape and relative_error(x, y, floor=1.0) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize("window", [1, 2, 7, 63, 64, 65, 128, 200, 10_000])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.parametrize("lengths", [(9,), (4, 4, 1), (140, 300, 3)])
@pytest.mark.some_cases(5)
def test_windows(lengths: tuple[int, ...], heads: tuple[int, int], window: int) -> None:
    q, k, v, delta = inputs(sum(lengths), heads, 4, 4)
    found = signals(q, k, v, delta, fast.spans_of(lengths), True, window)
    for x, y in zip(found, by_autograd(q, k, v, delta, lengths, True, window), strict=True):
        assert relative_error(x, y, floor=1.0) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize("window", [None, 1, 20, 130])
@pytest.mark.parametrize("share", [0.02, 0.5])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.some_cases(3)
def test_queries_in_some_rows_only(heads: tuple[int, int], share: float, window: int | None) -> None:
    """Outputs equal those with queries in all rows; error signals equal those with Δ = 0 on the other rows."""
    lengths = (9, 140, 1, 300)
    n = sum(lengths)
    q, k, v, delta = inputs(n, heads, 4, 5)
    rows = torch.cat([torch.nonzero(torch.rand(n - 1) < share).squeeze(1), torch.tensor([n - 1])])
    padded = torch.zeros_like(delta)
    padded[rows] = delta[rows]
    a, grad_q, grad_k, grad_v = by_autograd(q, k, v, padded, lengths, True, window)
    some = signals(q[rows], k, v, delta[rows], fast.spans_of(lengths, rows), True, window)
    for x, y in zip(some, (a[rows], grad_q[rows], grad_k, grad_v), strict=True):
        assert relative_error(x, y, floor=1.0) <= IDENTITY_TOLERANCE


def test_several_sequences_with_queries_at_the_same_positions() -> None:
    """The last two tokens of each of three cached sequences, as in generation."""
    q, k, v, _ = inputs(3 * 7, (6, 2), 4, 4)
    rows = torch.tensor([s * 7 + t for s in range(3) for t in (5, 6)])
    span = fast.Span(slice(0, 21), slice(0, 6), 3, [5, 6])
    for window in (None, 3):
        a = fast.forward(q[rows], k, v, (span,), fast.Scores(window=window))[0]
        assert relative_error(a, dense(q, k, v, (7, 7, 7), True, window)[rows]) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("kind", ["all rows", "some rows", "d_ρ ≠ d_h", "window", "window, some rows"])
@pytest.mark.some_cases(5)
def test_every_dtype_and_scale(kind: str, scale: float, dtype: torch.dtype) -> None:
    """From uniform to saturated softmax. Scores beyond float32 are recomputed in float64."""
    lengths = (33, 100, 150)
    n, d_h = sum(lengths), 16 if kind != "d_ρ ≠ d_h" else 12
    rows = torch.arange(0, n, 3) if "some rows" in kind else None
    window = 40 if "window" in kind else None
    q, k = (rounded(n, heads, 16, dtype=dtype, scale=scale) for heads in (6, 2))
    v, delta = rounded(n, 2, d_h, dtype=dtype), rounded(n, 6, d_h, dtype=dtype, scale=1e-3)
    wide = [q, k, v, delta] if rows is None else [q[rows], k, v, delta[rows]]
    spans = fast.spans_of(lengths, rows)
    expected = signals(*wide, spans, True, window)
    found = signals(*(x.to(dtype) for x in wide), spans, True, window)
    limit = (ROUNDING if dtype == torch.float32 and scale <= 1 else ATTENTION_ROUNDING)[dtype]
    product = 1e-3 * scale * torch.finfo(dtype if dtype != torch.bfloat16 else torch.float32).eps
    for x, y, floor in zip(found, expected, (0.0, product, product, 0.0), strict=True):
        assert x.dtype == dtype and relative_error(x, y, floor) <= limit


@pytest.mark.parametrize("window", [None, 1, 4, 70])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_maps(heads: tuple[int, int], window: int | None) -> None:
    """ρ v is the output, Δ_causal k/√d_ρ is the error signal of q, and ρ is 0 outside the window and the sequence."""
    lengths = (3, 80, 5)
    n, repeat = sum(lengths), heads[0] // heads[1]
    q, k, v, delta = inputs(n, heads, 3, 5)
    spans = fast.spans_of(lengths)
    a, saved = fast.forward(q, k, v, spans, fast.Scores(window=window))
    _, grad_q, _, _ = signals(q, k, v, delta, spans, True, window)
    rho, signal, _ = fast.maps(delta, saved, lengths, fast.Scores(window=window))
    assert rho.shape == signal.shape == (heads[0], n, n)
    wide_k, wide_v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    assert relative_error(torch.einsum("hij,jhw->ihw", rho, wide_v), a) <= IDENTITY_TOLERANCE
    from_maps = torch.einsum("hij,jhw->ihw", signal, wide_k) / math.sqrt(3)
    assert relative_error(from_maps, grad_q, floor=1.0) <= IDENTITY_TOLERANCE  # a window of 1 gives exactly 0
    seen = torch.cat([torch.arange(length) + 1 for length in lengths]).clamp(max=window or n)
    assert torch.equal((rho > 0).sum(2), seen.expand(heads[0], n))


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.parametrize("spaced", [1, 3])
def test_work_is_linear_in_the_tokens_with_a_window(heads: tuple[int, int], spaced: int) -> None:
    """Entries of all tiles, forward and backward: at most 128 more than the window for each query."""
    h, h_kv = heads
    window, entries = 50, {}
    for n in (512, 1024, 2048):
        positions = None if spaced == 1 else list(range(0, n, spaced))
        m = n if positions is None else len(positions)
        q, k = torch.empty(1, m * h // h_kv, 1), torch.empty(1, n, 1)
        tiles = [*_tiles.of_queries(q, k, positions, True, window), *_tiles.of_keys(q, k, positions, True, window)]
        entries[n] = sum((x.stop - x.start) * (y.stop - y.start) for x, y, _ in tiles)
        assert entries[n] <= 2 * len(q[0]) * (window + 128 * spaced)
    assert entries[2048] - entries[1024] == pytest.approx(2 * (entries[1024] - entries[512]), rel=0.02)


@pytest.mark.parametrize(
    ("heads", "causal", "window", "said"),
    [
        ((4, 3, 3), True, None, "4 query heads on 3 key heads"),
        ((4, 2, 4), True, None, "2 key heads and 4 value heads"),
        ((2, 2, 2), True, 0, "window=0"),
        ((2, 2, 2), False, 5, "only for causal"),
    ],
)
def test_bad_input_is_named(heads: tuple[int, int, int], causal: bool, window: int | None, said: str) -> None:
    q, k, v = (torch.zeros(3, h, 2) for h in heads)
    with pytest.raises(ValueError, match=said):
        fast.forward(q, k, v, fast.spans_of((3,)), fast.Scores(causal, window))


def test_the_conventions_are_those_of_transformers() -> None:
    """Which keys a window shows, and which key head a query head reads."""
    n, window = 9, 4
    q, k, v, delta = inputs(n, (6, 2), 3, 3)
    _, saved = fast.forward(q, k, v, fast.spans_of((n,)), fast.Scores(window=window))
    rho, _, _ = fast.maps(delta, saved, (n,), fast.Scores(window=window))
    t = torch.arange(n)
    visible = sliding_window_causal_mask_function(window)(0, 0, t[:, None], t[None, :])
    assert torch.equal(rho > 0, visible.expand(6, n, n))
    wide_k, wide_v = (repeat_kv(x.transpose(0, 1)[None], 3)[0].transpose(0, 1) for x in (k, v))
    assert torch.equal(dense(q, k, v, (n,), True, None), dense(q, wide_k, wide_v, (n,), True, None))
