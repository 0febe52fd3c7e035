"""Compiled kernels against the torch code of the same op, on odd shapes and views."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import ROUNDING
from handgrad.inference.kv_cache import Cache
from handgrad.kernels import calls, compiler, library, token_calls
from handgrad.kernels.calls import Scores
from handgrad.ops import activation, attention, gated, layernorm, linear, loss, rmsnorm, rotary
from handgrad.proof.oracles import relative_error

if compiler.command() is None:
    pytest.skip("LEFT OUT: no C compiler, so there are no kernels to test", allow_module_level=True)

DTYPES = [torch.float32, torch.float64]
SHAPES = [(1, 1), (3, 2), (5, 17), (2, 64), (7, 65), (300, 129)]


def view(n: int, w: int, dtype: torch.dtype) -> Tensor:
    """(n, w), some columns of a wider tensor."""
    return torch.randn(n, w + 5, dtype=dtype)[:, 2 : w + 2]


def both(run: Callable[[], object]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that a call returns: by kernels, and by torch calls."""
    ours = tensors(run())
    with library.disabled():
        return ours, tensors(run())


def tensors(x: object) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [t for part in x for t in tensors(part)]  # type: ignore[attr-defined]


def ops(n: int, w: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    x, delta, up = (view(n, w, dtype) for _ in range(3))
    gain, bias = torch.randn(2, w, dtype=dtype)
    targets = torch.randint(w, (n,))
    layer, rms = layernorm.forward(x, gain, bias, 1e-5)[1], rmsnorm.forward(x, gain, 1e-5)[1]
    bar, rms_bar = layernorm.normalized(layer), rmsnorm.normalized(rms)
    heads, angles = torch.randn(n, 3, 2 * w, dtype=dtype), torch.randn(n, w, dtype=dtype)
    cos, sin = angles.cos(), angles.sin()
    return {
        "gelu": lambda: (activation.forward(x, "gelu_tanh"), activation.backward(delta, x, "gelu_tanh")),
        "gate": lambda: (gated.forward(x, up, "silu"), gated.backward(delta, x, up, "silu")),
        "gelu gate": lambda: (gated.forward(x, up, "gelu_tanh"), gated.backward(delta, x, up, "gelu_tanh")),
        "layernorm": lambda: (layernorm.forward(x, gain, bias, 1e-5), layernorm.rebuild(layer, gain, bias)),
        "layernorm backward": lambda: layernorm.backward(delta, bar, layer.inv_sigma, gain),
        "layernorm gradient": lambda: layernorm.grad_w(delta, bar, gain.clone()),
        "rmsnorm": lambda: (rmsnorm.forward(x, gain, 1e-5)[0], rmsnorm.rebuild(rms, gain)),
        "rmsnorm backward": lambda: rmsnorm.backward(delta, rms_bar, rms.inv_rms, gain),
        "rmsnorm gradient": lambda: rmsnorm.grad_w(delta, rms_bar, None),
        "rotation": lambda: (rotary.forward(heads, cos, sin), rotary.backward(heads[:, :2], cos, sin)),
        "in place": lambda: rotary.forward(y := heads.clone(), cos, sin, into=y),
        "loss": lambda: loss.forward_and_delta(delta.clone(), targets, 0.3),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "w"), SHAPES)
@pytest.mark.parametrize("name", list(ops(1, 1, torch.float32)))
@pytest.mark.some_cases(5)
def test_equal_to_torch_calls(name: str, n: int, w: int, dtype: torch.dtype) -> None:
    for ours, plain in zip(*both(ops(n, w, dtype)[name]), strict=True):
        assert ours.shape == plain.shape and ours.dtype == plain.dtype
        assert relative_error(ours, plain, floor=1.0) <= ROUNDING[dtype]


PRODUCTS = [
    (8, 8, 8),
    (1, 5, 3),
    (13, 7, 31),
    (9, 513, 33),
    (70, 600, 65),
    (2055, 40, 64),
    (2100, 1030, 40),
    (257, 3, 300),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "w"), PRODUCTS)
@pytest.mark.parametrize("by_columns", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.some_cases(3)
def test_products_are_equal_to_torch_calls(
    m: int, n: int, w: int, by_columns: tuple[bool, bool], dtype: torch.dtype
) -> None:
    """Matrices by rows or by columns, as parts of wider ones; with a bias, and added to what is there."""
    a = view(n, m, dtype).t() if by_columns[0] else view(m, n, dtype)
    b = view(w, n, dtype).t() if by_columns[1] else view(n, w, dtype)
    bias, before = torch.randn(w, dtype=dtype), view(m, w, dtype)
    into = before.clone()
    scale = n**0.5  # rounding errors of a sum of n products
    for ours, plain in (
        (calls.product(a, b, None), a @ b),
        (calls.product(a, b, None, bias=bias), a @ b + bias),
        (calls.product(a, b, into, add=True), before + a @ b),
    ):
        assert (ours - plain).abs().max() <= ROUNDING[dtype] * scale


def test_a_long_sum_is_as_exact_as_a_short_one() -> None:
    """As over a vocabulary: the sum of a part begins at 0, so that it does not round like the sum of all parts."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(16, 1 << 15, generator=generator), torch.rand(1 << 15, 64, generator=generator)
    exact = a.double() @ b.double()
    assert (calls.product(a, b, None) - exact).norm() <= 1e-6 * exact.norm()


def test_the_processor_decides_who_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a measurement: a machine always computes the same bits."""
    for given, expected in (("own", True), ("torch", False)):
        monkeypatch.setenv("HANDGRAD_PRODUCTS", given)
        assert library.multiplies.__wrapped__() is expected
    a, w, delta = torch.randn(64, 96), torch.randn(96, 128), torch.randn(64, 128)
    found = {}
    for own in (True, False):
        monkeypatch.setattr(library, "multiplies", lambda own=own: own)
        assert calls.multiplies(a, w) is own and not calls.multiplies(a[:7], w) and not calls.multiplies(a, w[:, ::2])
        found[own] = [
            linear.forward(a, w, w[0]), linear.backward(delta, w), linear.backward(delta, w, a.clone()),
            linear.grad_w(delta, a, None), linear.grad_w(delta, a, w.clone()),
        ]  # fmt: skip
    for ours, plain in zip(*found.values(), strict=True):
        assert relative_error(ours, plain) <= ROUNDING[torch.float32]


ATTENTION = [
    # lengths, heads, key heads, d_ρ, d_h
    ([1], 1, 1, 1, 1),
    ([64, 64, 64], 2, 2, 16, 16),
    ([63, 1, 65, 130], 6, 2, 8, 8),
    ([129], 3, 1, 80, 17),
    ([70, 0, 3], 2, 2, 5, 130),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "heads", "key_heads", "d_rho", "d_h"), ATTENTION)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 1), (True, 40), (True, 100)])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.some_cases(3)
def test_attention_is_equal_to_torch_calls(
    lengths: list[int], heads: int, key_heads: int, d_rho: int, d_h: int, causal: bool, window: int | None, some: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Whole sequences, or queries in some rows only; q, k and v are parts of one tensor, as a fused layer returns them."""
    n = sum(lengths)
    rows = torch.arange(0, n, 3) if some else None
    widths = [heads * d_rho, key_heads * d_rho, key_heads * d_h]
    q, k, v = torch.split(torch.randn(n, sum(widths), dtype=dtype), widths, 1)
    q, k, v = q.view(n, heads, -1), k.view(n, key_heads, -1), v.view(n, key_heads, -1)
    q = q if rows is None else q[rows]
    delta = torch.randn(len(q), heads, d_h, dtype=dtype)
    spans = attention.spans_of(tuple(lengths), rows)

    def run() -> list[Tensor]:
        a, saved = attention.forward(q, k, v, spans, Scores(causal, window))
        grads = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
        attention.backward(delta, saved, spans, grads, Scores(causal, window))
        return [a, saved.lse, *grads]

    for ours, plain in zip(*both(run), strict=True):
        assert relative_error(ours, plain, floor=1.0) <= ROUNDING[dtype]


@pytest.mark.parametrize(("lengths", "rows"), [((), None), ((0, 0), None), ((2, 3), torch.arange(0))])
def test_attention_without_queries_gives_keys_no_gradient(lengths: tuple[int, ...], rows: Tensor | None) -> None:
    q, k, v = torch.randn(0, 4, 8), torch.randn(sum(lengths), 2, 8), torch.randn(sum(lengths), 2, 8)
    spans = attention.spans_of(lengths, rows)

    def run() -> list[Tensor]:
        a, saved = attention.forward(q, k, v, spans)
        grads = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
        attention.backward(a, saved, spans, grads)
        return [a, *grads]

    for found in both(run):
        assert [x.shape for x in found] == [(0, 4, 8), q.shape, k.shape, v.shape] and not any(x.any() for x in found)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    q, k, v, delta = torch.randn(4, 200, 6, 32)
    spans = attention.spans_of((150, 50))
    named = {name: run for name, run in ops(300, 129, torch.float32).items() if name != "in place"}

    def run() -> list[Tensor]:
        a, saved = attention.forward(q, k, v, spans)
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        attention.backward(delta, saved, spans, grads)
        product = calls.product(q.flatten(1), delta.flatten(1).t(), None)
        return [a, product, *grads, *(t for f in named.values() for t in tensors(f()))]

    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(run())
    torch.set_num_threads(1)
    for one, two, three in zip(*found, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_exp_is_exact_to_rounding_over_its_whole_range() -> None:
    """SiLU is x/(1 + exp(−x)): from where exp underflows to where it overflows."""
    x = torch.cat([torch.linspace(-86, 86, 100_003), torch.linspace(-1e-3, 1e-3, 1001)])[None]
    exact = x.double() * torch.sigmoid(x.double())
    ours = torch.empty_like(x)
    calls.forward_activation("silu", x, ours)
    assert ((ours - exact).abs() <= 6e-7 * exact.abs() + 1e-37).all()
    far = torch.tensor([[-1e4, -200.0, 200.0, 1e4]])
    calls.forward_activation("silu", far, ours := torch.empty_like(far))
    assert ours.tolist() == [[pytest.approx(0, abs=1e-30), pytest.approx(0, abs=1e-30), 200, 1e4]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_so(bad: float) -> None:
    x = torch.randn(4, 33)
    x[2, 5] = bad
    assert not torch.isfinite(activation.forward(x, "gelu_tanh")[2, 5])
    assert not torch.isfinite(rmsnorm.forward(x, torch.ones(33), 1e-5)[0][2, 5])
    total, delta = loss.forward_and_delta(x.clone(), torch.zeros(4, dtype=torch.int64), 1.0)
    assert not torch.isfinite(total) and torch.isfinite(delta[[0, 1, 3]]).all()


def test_broadcast_shapes_are_left_to_torch() -> None:
    """A kernel reads as many rows of every tensor: one that is broadcast has fewer."""
    a, w = torch.randn(5, 1, 8), torch.randn(8)
    delta = torch.randn(5, 5, 8)
    _, saved = rmsnorm.forward(a, w, 1e-5)
    bar = rmsnorm.normalized(saved)
    ours, plain = both(lambda: rmsnorm.backward(delta, bar, saved.inv_rms, w))
    wide = bar.expand(5, 5, 8).contiguous()
    same, _ = both(lambda: rmsnorm.backward(delta, wide, saved.inv_rms.expand(5, 5, 1).contiguous(), w))
    assert torch.equal(ours[0], plain[0]) and relative_error(ours[0], same[0]) <= ROUNDING[torch.float32]


def test_what_has_no_kernel_is_computed_by_torch() -> None:
    x = torch.randn(6, 8)
    assert calls.fits(x) and calls.fits(x[:, 2:5]) and calls.fits(x.double())
    assert not calls.fits(x.bfloat16()) and not calls.fits(x.t()) and not calls.fits(x, x.double())
    assert not calls.fits(x.to("meta"))
    with library.disabled():
        assert not calls.fits(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
@pytest.mark.parametrize(("f_in", "f_out"), [(1, 3), (7, 1), (33, 5), (64, 8), (129, 70), (5, 300)])
def test_products_of_few_rows(f_in: int, f_out: int, orientation: str, dtype: torch.dtype) -> None:
    """Equal to torch's; a row has the same bits alone and beside a few others."""
    w = view(f_in, f_out, dtype) if orientation == "in_out" else view(f_out, f_in, dtype).t()
    a = view(token_calls.FEW_ROWS, f_in, dtype)
    bias = torch.randn(f_out, dtype=dtype)
    for n in range(1, token_calls.FEW_ROWS + 1):
        (ours,), (expected,) = both(lambda n=n: linear.forward(a[:n], w, bias))  # type: ignore[misc]
        assert relative_error(ours, expected) <= ROUNDING[dtype]
        alone = [linear.forward(a[i : i + 1], w, bias) for i in range(n)]
        assert torch.equal(ours, torch.cat(alone)) or (n > token_calls.FEW_ROWS // 2 and orientation == "out_in")
    more = view(linear.SHORT + 1, f_in, dtype)
    for n in (token_calls.FEW_ROWS + 1, linear.SHORT - 1, linear.SHORT, linear.SHORT + 1):
        (ours,), (expected,) = both(lambda n=n: linear.forward(more[:n], w, bias))  # type: ignore[misc]
        assert relative_error(ours, expected) <= ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "of", [Scores(), Scores(window=1), Scores(window=5, scale=0.3, cap=0.7), Scores(window=200, cap=2.0)]
)
@pytest.mark.parametrize("shared", [1, 2, 6])
def test_attention_to_cached_keys(shared: int, of: Scores, dtype: torch.dtype) -> None:
    """Several new tokens, then single ones of sequences of very different lengths, in two pools; the cache gets the new keys
    and values."""
    shape = {"n_vocab": 11, "n_context": 600, "d_model": 42, "n_heads": 6, "n_blocks": 2, "n_kv_heads": shared}
    model = hg.GPT(hg.preset("nano-llama", **shape, d_rho=6, d_head=5), dtype=dtype)
    lengths = [1, 3, 300, 130, 128, 40]
    results, how = [], (of, None if of.cap is None else torch.randn(6, dtype=dtype))
    for kernels in (True, False):
        torch.manual_seed(1)
        cache = Cache(model)
        slots = [cache.add() for _ in lengths]
        with contextlib.nullcontext() if kernels else library.disabled():
            for slot, length in zip(slots, lengths, strict=True):
                first = cache.step([(slot, length)])
                first.block(1).attend(*heads(length, shared, dtype), *how)
                first.finish()
            second = cache.step([(slots[3], 70)])
            continued = second.block(1).attend(*heads(70, shared, dtype), *how).a
            order = cache.order(slots)
            step = cache.step([(slots[i], 1) for i in order])
            a = step.block(1).attend(*heads(len(slots), shared, dtype), *how).a
        stored = [slots[i].pool.v[1, slots[i].row, :, lengths[i]] for i in order]
        assert (len(step.parts) == 1) == kernels
        results.append(torch.cat([continued.flatten(), a.flatten(), torch.stack(stored).flatten()]))
    assert relative_error(*results) <= ROUNDING[dtype]


def heads(n: int, shared: int, dtype: torch.dtype) -> list[Tensor]:
    """q (n, 6, 6), k (n, shared, 6), v (n, shared, 5)"""
    return [torch.randn(n, h, w, dtype=dtype) for h, w in ((6, 6), (shared, 6), (shared, 5))]
