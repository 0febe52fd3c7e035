"""ops.lora against paper.lora."""

import pytest
import torch

from conftest import ROUNDING, SCALES, rounded
from handgrad.ops import lora as fast
from handgrad.paper import lora as plain
from handgrad.proof.oracles import relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE


@pytest.mark.parametrize(("n", "f_in", "r", "f_out"), [(1, 1, 1, 1), (7, 5, 2, 3), (2, 13, 8, 17)])
def test_equal_to_the_paper(n: int, f_in: int, r: int, f_out: int) -> None:
    scale = 0.37
    a, d, u, delta, base, below = (
        torch.randn(*s).double() for s in ((n, f_in), (f_in, r), (r, f_out), (n, f_out), (n, f_out), (n, f_in))
    )
    out = base.clone()
    fast.forward(a, d, u, scale, into=out)
    h = fast.project(a, d, scale)
    assert relative_error(out, base + plain.forward(a, d, u, scale)) <= IDENTITY_TOLERANCE
    g = fast.upstream(delta, u, scale)
    signal = below.clone()
    fast.backward(g, d, into=signal)
    assert relative_error(signal, below + plain.delta_prev(delta, d, u, scale)) <= IDENTITY_TOLERANCE
    mask, dropped = fast.mask(a, 0.5, seed=3), below.clone()
    fast.backward(g, d, into=dropped, mask=mask)
    assert relative_error(dropped, below + plain.delta_prev_dropped(delta, d, u, scale, mask)) <= IDENTITY_TOLERANCE
    grad_d, grad_u = torch.ones(f_in, r).double(), torch.ones(r, f_out).double()
    assert relative_error(fast.grad_d(g, a, None), plain.grad_d(delta, a, u, scale)) <= IDENTITY_TOLERANCE
    assert relative_error(fast.grad_u(delta, h, None), plain.grad_u(delta, a, d, scale)) <= IDENTITY_TOLERANCE
    fast.grad_d(g, a, grad_d)
    fast.grad_u(delta, h, grad_u)
    assert relative_error(grad_d, 1 + plain.grad_d(delta, a, u, scale)) <= IDENTITY_TOLERANCE
    assert relative_error(grad_u, 1 + plain.grad_u(delta, a, d, scale)) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", SCALES)
def test_every_dtype_and_scale(scale: float, dtype: torch.dtype) -> None:
    """u, w and Δ at every scale; a, d and z at scale 1."""
    n, f_in, r, f_out, alpha = 700, 40, 8, 24, 0.37
    a, d, u = rounded(n, f_in, dtype=dtype), rounded(f_in, r, dtype=dtype), rounded(r, f_out, dtype=dtype, scale=scale)
    delta = rounded(n, f_out, dtype=dtype, scale=scale)
    w, z = rounded(f_in, f_out, dtype=dtype, scale=scale), rounded(n, f_out, dtype=dtype)
    na, nd, nu, ndelta, nw, nz = (x.to(dtype) for x in (a, d, u, delta, w, z))
    out, signal = torch.zeros(n, f_out, dtype=dtype), torch.zeros(n, f_in, dtype=dtype)
    fast.forward(na, nd, nu, alpha, into=out)
    h = fast.project(na, nd, alpha)
    g = fast.upstream(ndelta, nu, alpha)
    fast.backward(g, nd, into=signal)
    norms = fast.column_norms(nw, nd, nu, alpha)
    found = {
        "a": (out, plain.forward(a, d, u, alpha)),
        "delta": (signal, plain.delta_prev(delta, d, u, alpha)),
        "d": (fast.grad_d(g, na, None), plain.grad_d(delta, a, u, alpha)),
        "u": (fast.grad_u(ndelta, h, None), plain.grad_u(delta, a, d, alpha)),
        "c": (norms, (w + alpha * d @ u).norm(dim=0)),
        "m": (fast.grad_m(ndelta, nz, norms, None), (delta * z).sum(0) / norms.double()),
    }
    for name, (x, y) in found.items():
        assert x.dtype == dtype and relative_error(x, y) <= ROUNDING[dtype], name


def test_gradient_of_a_magnitude_with_canceling_terms() -> None:
    """Σ Δ ∘ z over terms that nearly cancel: of products rounded to bfloat16, mostly rounding would remain."""
    delta, z = torch.ones(1000, 1).bfloat16(), (100 + torch.rand(1000, 1)).bfloat16()
    delta[::2] = -1.0078125
    grad = fast.grad_m(delta, z, torch.ones(1).bfloat16(), None)
    assert relative_error(grad, (delta.double() * z.double()).sum(0)) <= ROUNDING[torch.bfloat16]
