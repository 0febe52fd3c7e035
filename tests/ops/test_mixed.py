"""Mixed precision, op by op: what is rounded is rounded once, to nearest even, and everything else is float32.

A product is compared with the float64 product of its rounded operands, so that only float32 sums may differ; an element-wise
op with its own float32 result, rounded. The network is the subject of `hg.verify(precision="mixed")`.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from handgrad.kernels import library
from handgrad.ops import activation, attention, gated, layernorm, linear, lora, rmsnorm, rotary

BF16, FLOAT = torch.bfloat16, torch.float32
SUMS = 2e-7  # float32 sums, relative to the sum of absolute products, which bounds them
SHAPES = [(1, 1, 1), (2, 3, 5), (8, 32, 32), (9, 33, 31), (17, 1025, 65), (100, 2050, 40), (65, 16, 130), (300, 70, 16)]


def stored(rows: int, columns: int, by_rows: bool, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, columns) if by_rows else torch.randn(columns, rows).t()
    return x.to(dtype) if by_rows else x.t().to(dtype).t()


def excess(found: Tensor, x: Tensor, y: Tensor, added: Tensor | float = 0.0) -> float:
    """The largest error, relative to what rounding float32 sums may cause."""
    x, y = (z.to(BF16).double() for z in (x, y))
    bound = x.abs() @ y.abs() + abs(added)
    return ((found.double() - (x @ y + added)).abs() / bound).max().item()


@pytest.mark.parametrize(("m", "n", "w"), SHAPES)
@pytest.mark.parametrize("by_rows", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FLOAT), (FLOAT, BF16), (FLOAT, FLOAT)])
@pytest.mark.some_cases(5)
def test_products(m: int, n: int, w: int, by_rows: tuple[bool, bool], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, y = stored(m, n, by_rows[0], dtypes[0]), stored(n, w, by_rows[1], dtypes[1])
    bias, before = torch.randn(w), torch.randn(m, w)
    limit = SUMS * math.sqrt(n) + 2e-7
    found = linear.product(x, y, dtype=FLOAT, rounded=True)
    assert found.dtype == FLOAT and excess(found, x, y) <= limit
    assert excess(linear.product(x, y, dtype=FLOAT, bias=bias, rounded=True), x, y, bias.double()) <= limit
    out = before.clone()
    assert linear.product(x, y, out, add=True, rounded=True) is out and excess(out, x, y, before.double()) <= limit
    narrow = linear.product(x, y, dtype=BF16, rounded=True)
    assert narrow.dtype == BF16  # rounded once: no further from the exact result than the float32 one, and half a step
    exact = x.to(BF16).double() @ y.to(BF16).double()
    step = exact.abs() * 2.0**-8 * 1.001 + limit * (x.double().abs() @ y.double().abs()) + 1e-38
    assert ((narrow.double() - exact).abs() <= step).all()
    wide = torch.zeros(m, w + 3)
    linear.product(x, y, wide[:, 1 : w + 1], rounded=True)  # a part of a larger matrix, and nothing beside it
    assert torch.equal(wide[:, 1 : w + 1], found) and not wide[:, 0].any() and not wide[:, w + 1 :].any()


@pytest.mark.parametrize(("m", "n", "w"), [(3, 0, 4), (0, 3, 4), (3, 4, 0)])
def test_empty_products(m: int, n: int, w: int) -> None:
    """A sum of nothing is 0, not what the memory held."""
    x, y, before = torch.randn(m, n), torch.randn(n, w), torch.randn(m, w)
    assert torch.equal(linear.product(x, y, rounded=True), torch.zeros(m, w))
    assert torch.equal(linear.product(x, y, before.clone(), add=True, rounded=True), before)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e15])
def test_scales_of_products(scale: float) -> None:
    x, y = torch.randn(20, 40) * scale, torch.randn(40, 30)
    assert excess(linear.product(x, y, rounded=True), x, y) <= 1e-6


def test_values_that_are_no_numbers() -> None:
    x, y = torch.randn(10, 20), torch.randn(20, 40)
    x[1, 3], x[2, 4], x[3, 5] = math.nan, math.inf, -math.inf
    found = linear.product(x, y, rounded=True)
    assert found[1].isnan().all() and found[2].isinf().all() and found[3].isinf().all()
    assert torch.equal(found[2] > 0, y[4] > 0) and found[[0, *range(4, 10)]].isfinite().all()
    y[7, 2] = math.nan
    assert linear.product(x, y, rounded=True)[:, 2].isnan().all()
    largest = torch.full((1, 1), torch.finfo(FLOAT).max)
    assert linear.product(largest, torch.ones(1, 1), rounded=True).isinf().all()  # bfloat16 rounds it up to infinity


def test_results_do_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    x, y = torch.randn(200, 1500), torch.randn(1500, 70)
    q, k, v = (torch.randn(150, 3, 32).to(BF16) for _ in range(3))
    spans, found = attention.spans_of((100, 50)), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append((linear.product(x, y, rounded=True), attention.forward(q, k, v, spans)[0]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("m", "n", "w", "r"), [(1, 2, 3, 1), (9, 33, 31, 3), (50, 40, 30, 4), (65, 2050, 40, 17), (300, 64, 16, 40)]
)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FLOAT), (FLOAT, BF16), (FLOAT, FLOAT)])
@pytest.mark.some_cases(3)
def test_products_with_a_branch(m: int, n: int, w: int, r: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """a w + h v is one sum, of operands that lie by rows or by columns."""
    bias, before = torch.randn(w), torch.randn(m, w)
    for by_rows in (True, False):
        x, y = stored(m, n, True, dtypes[0]), stored(n, w, by_rows, dtypes[1])
        h, v = stored(m, r, by_rows, dtypes[0]), stored(r, w, by_rows, dtypes[1])
        left, right, limit = torch.cat([x, h], 1), torch.cat([y, v]), SUMS * math.sqrt(n + r) + 2e-7
        found = linear.product(x, y, dtype=FLOAT, bias=bias, rounded=True, branch=(h, v))
        assert excess(found, left, right, bias.double()) <= limit
        out = before.clone()
        linear.product(x, y, out, add=True, rounded=True, branch=(h, v))
        assert excess(out, left, right, before.double()) <= limit


def test_low_rank() -> None:
    """h and g are operands of further products, so they are rounded; gradients are not."""
    a, d, u = torch.randn(50, 40).to(BF16), torch.randn(40, 4), torch.randn(4, 30)
    delta = torch.randn(50, 30).to(BF16)
    out = torch.zeros(50, 30)
    h = lora.forward(a, d, u, 0.5, out)
    assert h.dtype == BF16 and excess(h.double(), a, 0.5 * d) <= 2.0**-8
    assert excess(out, h, u) <= 1e-6
    g = lora.upstream(delta, u, 0.5)
    assert g.dtype == BF16 and excess(g.double(), delta, 0.5 * u.t()) <= 2.0**-8
    assert excess(lora.grad_d(g, a, None, FLOAT), a.t(), g) <= 1e-6
    found, before = lora.grad_u(delta, h, None, FLOAT), torch.randn(4, 30)
    assert found.dtype == FLOAT and excess(found, h.t(), delta) <= 1e-6
    assert torch.equal(lora.grad_u(delta, h, before.clone(), FLOAT), before + found)


@pytest.mark.parametrize("scale", [1e-15, 1e-5, 1e10])
def test_scales_of_low_rank(scale: float) -> None:
    a, d, u = (torch.randn(50, 40) * scale).to(BF16), torch.randn(40, 4), torch.randn(4, 30) / scale
    delta = (torch.randn(50, 30) * scale).to(BF16)
    h, g = lora.project(a, d, 1.0), lora.upstream(delta, u, 0.5)
    assert excess(h.double(), a, d) <= 2.0**-8 and excess(g.double(), delta, 0.5 * u.t()) <= 2.0**-8
    assert excess(lora.grad_d(g, a, None, FLOAT), a.t(), g) <= 1e-6
    assert excess(lora.grad_u(delta, h, None, FLOAT), h.t(), delta) <= 1e-6
    w = torch.randn(40, 30) * scale
    found = linear.forward(a, w, None, dtype=FLOAT, branch=lora.branch(a, d, u * scale, 1.0))
    assert excess(found, torch.cat([a, h], 1), torch.cat([w, scale * u])) <= 1e-6
    a[7, 3] = math.nan
    h = lora.project(a, d, 1.0)
    assert h[7].isnan().all() and h[[*range(7), *range(8, 50)]].isfinite().all()
    grad = lora.grad_d(g, a, None, FLOAT)
    assert grad[3].isnan().all() and grad[[*range(3), *range(4, 40)]].isfinite().all()


# ── element-wise ────────────────────────────────────────────────────────────────────────────────────────────────────

SCALES = [1e-20, 1e-3, 1.0, 30.0, 1e10]


@pytest.mark.parametrize("scale", SCALES)
def test_norms_round_their_output(scale: float) -> None:
    a, w, b = torch.randn(33, 50) * scale, torch.randn(50), torch.randn(50)
    for exact, found in (
        (layernorm.forward(a, w, b, 1e-5), layernorm.forward(a, w, b, 1e-5, BF16)),
        (rmsnorm.forward(a, w, 1e-5), rmsnorm.forward(a, w, 1e-5, BF16)),
    ):
        assert all(torch.equal(x, y) for x, y in zip(exact[1], found[1], strict=True))
        assert close_to_rounded(found[0], exact[0])
    saved = layernorm.forward(a, w, b, 1e-5)[1]
    for exact_bar, found_bar in zip(layernorm.rebuild(saved, w, b), layernorm.rebuild(saved, w, b, BF16), strict=True):
        assert close_to_rounded(found_bar, exact_bar)
    rms = rmsnorm.forward(a, w, 1e-5)[1]
    assert close_to_rounded(rmsnorm.rebuild(rms, w, BF16)[1], rmsnorm.rebuild(rms, w)[1])


def close_to_rounded(found: Tensor, exact: Tensor) -> bool:
    """Equal to the rounded float32 result, or to its neighbor where two float32 results may differ by a rounding error."""
    if found.dtype == FLOAT:
        return torch.allclose(found, exact, rtol=1e-6, atol=0)
    return bool(((found.double() - exact.double()).abs() <= exact.double().abs() * 2.0**-8 * 1.001 + 1e-38).all())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu"])
def test_gates_and_activations(name: str, scale: float) -> None:
    gate, up = (torch.randn(20, 35) * scale).to(BF16), torch.randn(20, 35).to(BF16)
    delta = torch.randn(20, 35)
    wide = gated.backward(delta, gate.float(), up.float(), name)
    found = gated.backward(delta, gate, up, name)
    assert all(x.dtype == BF16 for x in found)
    assert all(close(x, y) for x, y in zip(found, wide, strict=True))
    assert close(gated.forward(gate, up, name), gated.forward(gate.float(), up.float(), name))
    if name != "silu":
        assert close(activation.forward(gate, name), activation.forward(gate.float(), name))
        pairs = zip(activation.backward(delta, gate, name), activation.backward(delta, gate.float(), name), strict=True)
        assert all(close(x, y) for x, y in pairs)


def close(found: Tensor, exact: Tensor) -> bool:
    """As above; a difference of large terms, such as 1 − σ, may be another number than that of the other code."""
    return bool(((found.double() - exact.double()).abs() <= exact.double().abs() * 2.0**-8 * 1.01 + 1e-6).all())


EXTREMES = [
    (1e-30, 1.0, 1.0),
    (1.0, 1e-15, 1e-15),
    (1e-3, 1e15, 1e15),
    (1e4, 1e-15, 1e-15),
    (1e18, 1e10, 1e5),
    (1e37, 1e-5, 1e-5),
]


@pytest.mark.parametrize("scales", EXTREMES)
@pytest.mark.parametrize("name", gated.NAMES)
def test_tiny_and_huge_gates(name: str, scales: tuple[float, float, float]) -> None:
    """Against float64, relative to the factors of a result: those of a tiny result are tiny."""
    gate, up, delta = (torch.randn(20, 35) * s for s in scales)
    gate, up = gate.to(BF16), up.to(BF16)
    wide = gate.double(), up.double()
    sizes = (delta * up, delta * gate, gate * up)  # |g(x)| ≤ |x|, |g'(x)| < 1.2
    found, exact = gated.backward(delta, gate, up, name), gated.backward(delta.double(), *wide, name)
    pairs = [
        *zip(found, exact, sizes, strict=True),
        (gated.forward(gate, up, name), gated.forward(*wide, name), sizes[2]),
    ]
    if name != "silu":
        both = activation.backward(delta, gate, name), activation.backward(delta.double(), wide[0], name)
        pairs += [*zip(*both, (delta, gate), strict=True)]
        pairs.append((activation.forward(gate, name), activation.forward(wide[0], name), gate))
    for x, y, size in pairs:
        within = 2.0**-8 * y.abs() + 2e-6 * size.double().abs() + torch.finfo(FLOAT).tiny
        assert x.dtype == BF16 and bool(((x.double() - y).abs() <= within).all())


def test_element_wise_ops_keep_what_is_no_number() -> None:
    """Where the same op gives NaN or infinity in float32, and nowhere else."""
    for bad in (math.nan, math.inf, -math.inf):
        gate, up, a = torch.randn(9, 35).to(BF16), torch.randn(9, 35).to(BF16), torch.randn(9, 35)
        delta, w, b = torch.randn(9, 35), torch.randn(35), torch.randn(35)
        gate[1, 3], up[2, 33], delta[3, 17], a[4, 5] = bad, bad, bad, bad
        wide = gate.float(), up.float()
        pairs = [
            (layernorm.forward(a, w, b, 1e-5, BF16)[0], layernorm.forward(a, w, b, 1e-5)[0]),
            (rmsnorm.forward(a, w, 1e-5, BF16)[0], rmsnorm.forward(a, w, 1e-5)[0]),
        ]
        for name in gated.NAMES:
            pairs += zip(gated.backward(delta, gate, up, name), gated.backward(delta, *wide, name), strict=True)
            pairs.append((gated.forward(gate, up, name), gated.forward(*wide, name)))
        for name in ("gelu", "gelu_tanh", "relu", "relu2"):
            pairs += zip(activation.backward(delta, gate, name), activation.backward(delta, wide[0], name), strict=True)
            pairs.append((activation.forward(gate, name), activation.forward(wide[0], name)))
        for found, exact in pairs:
            assert found.dtype == BF16 and not (math.isnan(bad) and exact.isfinite().all())
            assert torch.equal(found.isnan(), exact.isnan()) and torch.equal(found.isinf(), exact.isinf())
            assert close(*(torch.where(exact.isfinite(), x, 0.0) for x in (found, exact)))


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_scales_of_rotation(scale: float) -> None:
    x = torch.randn(12, 3, 8) * scale
    x[5, 1, 2] = math.nan
    cos, sin = rotary.angles(torch.arange(12), *rotary.frequencies(8, 100.0))
    exact, size = rotary.forward(x.double(), cos.double(), sin.double()), x.double().abs().roll(4, 2) + x.double().abs()
    found = rotary.forward(x, cos, sin, dtype=BF16)
    spoiled = torch.zeros_like(x, dtype=torch.bool)
    spoiled[5, 1, [2, 6]] = True  # both numbers of a plane
    assert torch.equal(found.isnan(), spoiled)
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6 * size)[~spoiled].all()


def test_rotation_rounds_once() -> None:
    x, positions = torch.randn(12, 3, 8), torch.arange(12)
    cos, sin = rotary.angles(positions, *rotary.frequencies(8, 100.0))
    exact = rotary.forward(x, cos, sin)
    found = rotary.forward(x, cos, sin, into=x, dtype=BF16)  # x is not written over
    assert close_to_rounded(found, exact)
    assert torch.equal(rotary.forward(x, cos, sin), exact)


# ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lengths", "heads", "groups", "d"), [
    ([1], 1, 1, 2), ([7], 1, 1, 3), ([5, 5, 5], 2, 2, 4), ([130, 257], 4, 2, 8), ([64, 65, 63], 2, 1, 64), ([131], 2, 2, 33),
])  # fmt: skip
def test_attention(lengths: list[int], heads: int, groups: int, d: int, causal: bool) -> None:
    """Against the same operands in float64: ρ, Δ_raw and the output are rounded inside, so each result may differ by a few
    units of bfloat16 of its row's size."""
    n, spans = sum(lengths), attention.spans_of(tuple(lengths))
    q, k, v = torch.randn(n, heads, d).to(BF16), *torch.randn(2, n, groups, d).to(BF16)
    delta = torch.randn(n, heads, d)
    a, saved = attention.forward(q, k, v, spans, attention.Scores(causal))
    assert a.dtype == BF16 and saved.lse.dtype == FLOAT
    found = tuple(torch.full(x.shape, math.nan) for x in (q, k, v))
    attention.backward(delta, saved, spans, found, attention.Scores(causal))
    exact_a, exact_saved = attention.forward(q.double(), k.double(), v.double(), spans, attention.Scores(causal))
    exact = tuple(torch.empty(x.shape, dtype=torch.float64) for x in (q, k, v))
    attention.backward(delta.to(BF16).double(), exact_saved, spans, exact, attention.Scores(causal))
    assert (a.double() - exact_a).norm() / exact_a.norm() <= 4e-3
    torch.testing.assert_close(saved.lse.double(), exact_saved.lse, rtol=1e-5, atol=1e-4)
    floor = max(x.norm() / math.sqrt(x.numel()) for x in exact)
    for x, y in zip(found, exact, strict=True):
        assert (x.double() - y).norm() / math.sqrt(x.numel()) <= 1.2e-2 * max(
            y.norm() / math.sqrt(y.numel()), 0.1 * floor
        )


@pytest.mark.parametrize("scale", [1e-10, 1.0, 40.0])
def test_scales_of_attention(scale: float) -> None:
    """Saturated rows are one-hot, tiny scores are uniform; nothing becomes NaN."""
    q, k, v = ((torch.randn(70, 2, 16) * s).to(BF16) for s in (scale, scale, 1.0))
    spans = attention.spans_of((70,))
    a, saved = attention.forward(q, k, v, spans)
    into = tuple(torch.empty(x.shape) for x in (q, k, v))
    attention.backward(torch.randn(70, 2, 16), saved, spans, into)
    assert all(x.isfinite().all() for x in (a.float(), saved.lse, *into))
    wide = attention.forward(q.double(), k.double(), v.double(), spans)[0]
    assert (a.double() - wide).abs().max() <= 0.02 * wide.abs().max()


@pytest.mark.parametrize("scale", [1e-10, 1.0, 40.0])
@pytest.mark.parametrize(("value", "error"), [(1e-12, 1e-12), (1e-15, 1e15), (1e15, 1e15)])
def test_scales_of_attention_backward(scale: float, value: float, error: float) -> None:
    """Against float64. ρ, a and Δ_raw are rounded, and in a saturated row the terms of Δ_raw cancel, so errors of q and k
    are relative to at least one of these terms times a key."""
    spans, scales = attention.spans_of((70,)), (scale, scale, value)
    q, k, v = ((torch.randn(70, 2, 16) * s).to(BF16) for s in scales)
    delta = torch.randn(70, 2, 16) * error
    grads = []
    for dtype in (BF16, torch.float64):
        _, saved = attention.forward(*(x.to(dtype) for x in (q, k, v)), spans)
        grads.append([torch.empty(x.shape, dtype=FLOAT if dtype == BF16 else dtype) for x in (q, k, v)])
        given = delta if dtype == BF16 else delta.to(BF16).double()
        attention.backward(given, saved, spans, tuple(grads[-1]))  # type: ignore[arg-type]
    for found, exact, floor in zip(*grads, (value * error * scale, value * error * scale, 0.0), strict=True):
        size = max(exact.norm().item(), floor * math.sqrt(exact.numel()))
        assert (found.double() - exact).norm().item() <= 1.2e-2 * size


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_attention_backward_hides_nothing(bad: float) -> None:
    """What is no number in Δ reaches its query and the keys and values that it saw, and no other head or sequence."""
    q, k, v = torch.randn(3, 30, 2, 8).to(BF16)
    delta, spans = torch.randn(30, 2, 8), attention.spans_of((20, 10))
    delta[4, 1, 3] = bad
    saved = attention.forward(q, k, v, spans)[1]
    into = tuple(torch.zeros(x.shape) for x in (q, k, v))
    attention.backward(delta, saved, spans, into)  # type: ignore[arg-type]
    grad_q, grad_k, grad_v = into
    assert not grad_q[4, 1].isfinite().any() and not grad_k[:5, 1].isfinite().any()
    assert not grad_v[:5, 1, 3].isfinite().any()
    assert all(x[:, 0].isfinite().all() and x[20:].isfinite().all() for x in into)


def test_attention_keeps_what_is_no_number() -> None:
    q, k, v = torch.randn(3, 9, 1, 8).to(BF16)
    q[4, 0, 2] = math.nan
    a = attention.forward(q, k, v, attention.spans_of((9,)))[0]
    assert a[4].isnan().all() and a[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_this_machine_multiplies_bfloat16_or_says_why_not() -> None:
    reason = library.why_not(BF16)
    assert reason is None or "AVX512_BF16" in reason or "compiler" in reason
