"""ops.rmsnorm against paper.rmsnorm, torch's rms_norm and autograd."""

import pytest
import torch
import torch.nn.functional as F

from conftest import ROUNDING, SCALES, norm_inputs, rounded
from handgrad.ops import rmsnorm as fast
from handgrad.paper import rmsnorm as plain
from handgrad.proof.oracles import differentiate, relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE


@pytest.mark.parametrize(("n", "d"), [(1, 1), (1, 2), (7, 5), (3, 17)])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.1])
def test_equal_to_the_paper(n: int, d: int, eps: float) -> None:
    a, w, delta = (torch.randn(*shape).double() for shape in ((n, d), (d,), (n, d)))
    before = a.clone(), w.clone(), delta.clone()
    out, saved = fast.forward(a, w, eps)
    f = plain.forward(a, w, eps)
    a_bar = fast.normalized(saved)
    assert relative_error(out, f.a) <= IDENTITY_TOLERANCE
    assert relative_error(a_bar, f.a_bar) <= IDENTITY_TOLERANCE
    assert relative_error(1 / saved.inv_rms[:, 0], f.rms) <= IDENTITY_TOLERANCE
    signal = fast.backward(delta, a_bar, saved.inv_rms, w)
    floor = (delta * w / f.rms[:, None]).abs().max().item()  # with d = 1 and ε = 0 the signal is exactly 0
    assert relative_error(signal, plain.delta_prev(delta, f.a_bar, f.rms, w), floor) <= IDENTITY_TOLERANCE
    expected = plain.grad_w(delta, f.a_bar)
    buffer = torch.ones(d).double()
    assert relative_error(fast.grad_w(delta, a_bar, None), expected) <= IDENTITY_TOLERANCE
    assert fast.grad_w(delta, a_bar, buffer) is buffer
    assert relative_error(buffer, 1 + expected) <= IDENTITY_TOLERANCE
    assert all(torch.equal(x, y) for x, y in zip((a, w, delta), before, strict=True))


@pytest.mark.parametrize("shape", [(1, 3), (6, 13), (5, 3, 7), (1, 1, 2), (4, 1, 6)])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.1])
def test_equal_to_autograd_of_torch(shape: tuple[int, ...], eps: float) -> None:
    a, delta, w = torch.randn(*shape).double(), torch.randn(*shape).double(), torch.randn(shape[-1]).double()
    out, saved = fast.forward(a, w, eps)
    a_bar = fast.normalized(saved)
    assert relative_error(out, F.rms_norm(a, w.shape, w, eps)) <= IDENTITY_TOLERANCE
    expected = differentiate(lambda a, w: F.rms_norm(a, w.shape, w, eps), a, w, upstream=delta)
    assert relative_error(fast.backward(delta, a_bar, saved.inv_rms, w), expected[0]) <= IDENTITY_TOLERANCE
    assert relative_error(fast.grad_w(delta, a_bar, None), expected[1]) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize(("n", "h", "d_rho"), [(1, 1, 2), (5, 3, 7), (4, 2, 1)])
def test_query_and_key_norm_equal_to_the_paper(n: int, h: int, d_rho: int) -> None:
    """q is a view into a wider tensor that holds q, k and v, as a model passes it."""
    eps, w = 1e-6, torch.randn(d_rho).double()
    packed = torch.randn(n, 3 * h * d_rho).double()
    before = packed.clone()
    q, delta = packed[:, : h * d_rho].view(n, h, d_rho), torch.randn(n, h, d_rho).double()
    out, saved = fast.forward(q, w, eps)
    q_bar = fast.normalized(saved)
    heads = plain.forward_heads(q.unbind(1), w, eps)
    assert saved.inv_rms.shape == (n, h, 1)
    assert relative_error(out, torch.stack([f.a for f in heads], 1)) <= IDENTITY_TOLERANCE
    signals = plain.delta_prev_heads(delta.unbind(1), heads, w)
    ours = fast.backward(delta, q_bar, saved.inv_rms, w)
    assert relative_error(ours, torch.stack(signals, 1), delta.abs().max().item()) <= IDENTITY_TOLERANCE
    expected = plain.grad_w_heads(delta.unbind(1), heads)
    assert relative_error(fast.grad_w(delta, q_bar, None), expected) <= IDENTITY_TOLERANCE
    buffer = torch.ones(d_rho).double()
    assert relative_error(fast.grad_w(delta, q_bar, buffer), 1 + expected) <= IDENTITY_TOLERANCE
    assert torch.equal(packed, before)


def test_a_row_of_zeros_gives_finite_results() -> None:
    """ā is 0 and rms is √ε, so that Δ_{i−1} = Δ_i ∘ w/√ε."""
    w, delta = torch.randn(4), torch.randn(1, 4)
    out, saved = fast.forward(torch.zeros(1, 4), w, 1e-6)
    assert out.abs().max() == 0
    signal = fast.backward(delta, fast.normalized(saved), saved.inv_rms, w)
    assert relative_error(signal, delta * w * 1e3) <= ROUNDING[torch.float32]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [*SCALES, 1e6])
@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.some_cases(3)
def test_every_dtype_and_scale(scale: float, shift: float, dtype: torch.dtype) -> None:
    """Rows around zero, and rows of almost equal numbers: there Δ is almost parallel to ā, and most of it cancels."""
    n, d, eps = 50, 64, 1e-5
    a, delta, w = norm_inputs(n, d, scale, shift, dtype)
    inputs = a.to(dtype), w.to(dtype), delta.to(dtype)
    f = plain.forward(a, w, eps)
    out, saved = fast.forward(*inputs[:2], eps)
    a_bar = fast.normalized(saved)
    limit = ROUNDING[dtype]
    assert out.dtype == a_bar.dtype == dtype
    assert saved.inv_rms.dtype == torch.promote_types(dtype, torch.float32)
    assert relative_error(out, f.a) <= limit
    assert relative_error(a_bar, f.a_bar) <= limit
    rounded_bar = a_bar.double()  # the input of the backward pass
    signal = fast.backward(inputs[2], a_bar, saved.inv_rms, inputs[1])
    assert signal.dtype == dtype
    assert relative_error(signal, plain.delta_prev(delta, rounded_bar, f.rms, w)) <= limit
    assert relative_error(fast.grad_w(inputs[2], a_bar, None), plain.grad_w(delta, rounded_bar)) <= limit
    assert all(torch.equal(x.double(), y) for x, y in zip(inputs, (a, w, delta), strict=True))


def last_place(x: torch.Tensor) -> torch.Tensor:
    """The unit of the last place of x in bfloat16."""
    return 2.0 ** (x.abs().log2().floor() - 7)


def test_bfloat16_output_is_rounded_once() -> None:
    a, w = rounded(50, 64, dtype=torch.bfloat16), rounded(64, dtype=torch.bfloat16)
    out, _ = fast.forward(a.bfloat16(), w.bfloat16(), 1e-6)
    exact = plain.forward(a, w, 1e-6).a
    assert ((out.double() - exact).abs() <= 0.5001 * last_place(exact)).all()


def test_rounding_against_hugging_face() -> None:
    """The table of docs/layers/rmsnorm.md."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    a, w = rounded(50, 64, dtype=torch.bfloat16), rounded(64, dtype=torch.bfloat16)
    theirs, ours = {}, {}
    for dtype in ROUNDING:
        norm = LlamaRMSNorm(64, 1e-6).to(dtype)
        with torch.no_grad():
            norm.weight.copy_(w)
            theirs[dtype] = norm(a.to(dtype)).double()
        ours[dtype] = fast.forward(a.to(dtype), w.to(dtype), 1e-6)[0].double()
    difference = (theirs[torch.bfloat16] - ours[torch.bfloat16]).abs()
    assert 0 < (difference / last_place(ours[torch.bfloat16])).max() <= 1
    assert relative_error(theirs[torch.float32], ours[torch.float32]) <= 1e-6
    assert 1e-9 <= relative_error(theirs[torch.float64], ours[torch.float64]) <= 1e-6


def test_bfloat16_gradient_of_rows_that_nearly_cancel() -> None:
    """Products rounded to bfloat16 before the sum would lose the difference of the two rows."""
    a_bar, delta = rounded(2, 64, dtype=torch.bfloat16)
    opposite = -delta - last_place(delta) * delta.sign()  # the next larger number, negative
    rows, signals = torch.stack([a_bar, a_bar]), torch.stack([delta, opposite])
    ours = fast.grad_w(signals.bfloat16(), rows.bfloat16(), None)
    assert relative_error(ours, plain.grad_w(signals, rows)) <= ROUNDING[torch.bfloat16]


@pytest.mark.parametrize(("n", "h", "d_rho"), [(1, 1, 2), (6, 3, 5)])
def test_a_norm_of_all_heads_together(n: int, h: int, d_rho: int) -> None:
    q, delta = torch.randn(2, n, h, d_rho).double()
    w = torch.randn(h * d_rho).double()
    heads, f = plain.forward_joint(q.unbind(1), w, 1e-5)
    out, saved = fast.forward(q.flatten(1), w, 1e-5)
    assert relative_error(out.view_as(q), torch.stack(heads, 1)) <= IDENTITY_TOLERANCE
    back = fast.backward(delta.flatten(1), fast.normalized(saved), saved.inv_rms, w)
    expected = torch.stack(plain.delta_prev_joint(delta.unbind(1), f, w), 1)
    assert relative_error(back.view_as(q), expected) <= IDENTITY_TOLERANCE
