"""ops.layernorm against paper.layernorm."""

import pytest
import torch

from conftest import ROUNDING, SCALES, norm_inputs, rounded
from handgrad.ops import layernorm as fast
from handgrad.paper import layernorm as plain
from handgrad.proof.oracles import relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE


@pytest.mark.parametrize(("n", "d"), [(1, 2), (7, 5), (3, 17)])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.1])
def test_equal_to_the_paper(n: int, d: int, eps: float) -> None:
    a, w, b, delta = (torch.randn(*shape).double() for shape in ((n, d), (d,), (d,), (n, d)))
    before = a.clone(), delta.clone()
    out, saved = fast.forward(a, w, b, eps)
    f = plain.forward(a, w, b, eps)
    assert relative_error(out, f.a) <= IDENTITY_TOLERANCE
    a_bar = fast.normalized(saved)
    assert relative_error(a_bar, f.a_bar) <= IDENTITY_TOLERANCE
    assert relative_error(fast.affine(a_bar, w, b), f.a) <= IDENTITY_TOLERANCE
    assert relative_error(saved.mu[:, 0], f.mu) <= IDENTITY_TOLERANCE
    assert relative_error(1 / saved.inv_sigma[:, 0], f.sigma) <= IDENTITY_TOLERANCE
    expected = plain.delta_prev(delta, f.a_bar, f.sigma, w)
    assert (
        relative_error(fast.backward(delta, a_bar, saved.inv_sigma, w), expected, floor=delta.abs().max().item())
        <= IDENTITY_TOLERANCE
    )
    for into in (None, torch.ones(d).double()):
        start = 0 if into is None else 1
        grad_w = fast.grad_w(delta, a_bar, None if into is None else into.clone())
        grad_b = fast.grad_b(delta, None if into is None else into.clone())
        assert relative_error(grad_w, start + plain.grad_w(delta, f.a_bar)) <= IDENTITY_TOLERANCE
        assert relative_error(grad_b, start + plain.grad_b(delta)) <= IDENTITY_TOLERANCE
    assert torch.equal(a, before[0]) and torch.equal(delta, before[1])


def test_a_constant_row_gives_finite_results() -> None:
    out, saved = fast.forward(torch.full((1, 4), 3.0), torch.ones(4), torch.zeros(4), 1e-5)
    assert out.abs().max() == 0
    assert torch.isfinite(
        fast.backward(torch.randn(1, 4), fast.normalized(saved), saved.inv_sigma, torch.ones(4))
    ).all()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [*SCALES, 1e6])
@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.some_cases(3)
def test_every_dtype_and_scale(scale: float, shift: float, dtype: torch.dtype) -> None:
    """Rows around zero, and rows whose mean is much larger than their spread, in a and in Δ."""
    n, d, eps = 50, 64, 1e-5
    a, delta, w = norm_inputs(n, d, scale, shift, dtype)
    b = rounded(d, dtype=dtype)
    f = plain.forward(a, w, b, eps)
    out, saved = fast.forward(a.to(dtype), w.to(dtype), b.to(dtype), eps)
    a_bar = fast.normalized(saved)
    limit = ROUNDING[dtype] * (1 + shift * (dtype == torch.float32))  # float32 subtracts a rounded mean
    assert out.dtype == a_bar.dtype == dtype
    assert relative_error(out, f.a) <= limit
    assert relative_error(a_bar, f.a_bar) <= limit
    assert relative_error(fast.affine(a_bar, w.to(dtype), b.to(dtype)), f.a) <= limit
    rounded_bar = a_bar.double()  # the input of the backward pass
    signal = fast.backward(delta.to(dtype), a_bar, saved.inv_sigma, w.to(dtype))
    assert signal.dtype == dtype
    assert relative_error(signal, plain.delta_prev(delta, rounded_bar, f.sigma, w)) <= limit
    assert relative_error(fast.grad_w(delta.to(dtype), a_bar, None), plain.grad_w(delta, rounded_bar)) <= limit
    assert relative_error(fast.grad_b(delta.to(dtype), None), plain.grad_b(delta)) <= limit


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("d", [2, 17, 64])
def test_without_a_bias_as_with_zeros(d: int, dtype: torch.dtype) -> None:
    a, w = torch.randn(5, d).to(dtype), torch.randn(d).to(dtype)
    for output in (None, torch.bfloat16):
        out, saved = fast.forward(a, w, None, 1e-5, output)
        expected, _ = fast.forward(a, w, torch.zeros_like(w), 1e-5, output)
        assert torch.equal(out, expected)
        assert torch.equal(
            fast.rebuild(saved, w, None, output)[1], fast.rebuild(saved, w, torch.zeros_like(w), output)[1]
        )
    reference = torch.nn.functional.layer_norm(a.double(), (d,), w.double(), None, 1e-5)
    assert relative_error(fast.forward(a.double(), w.double(), None, 1e-5)[0], reference) <= IDENTITY_TOLERANCE
