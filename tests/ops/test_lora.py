"""ops.lora against paper.lora."""

import pytest
import torch

from handgrad.ops import lora as fast
from handgrad.paper import lora as plain
from handgrad.verify import relative_error


@pytest.mark.parametrize(("n", "f_in", "r", "f_out"), [(1, 1, 1, 1), (7, 5, 2, 3), (2, 13, 8, 17)])
def test_equal_to_the_paper(n: int, f_in: int, r: int, f_out: int) -> None:
    scale = 0.37
    a, d, u, delta, base, below = (
        torch.randn(*s).double() for s in ((n, f_in), (f_in, r), (r, f_out), (n, f_out), (n, f_out), (n, f_in))
    )
    out = base.clone()
    h = fast.forward(a, d, u, scale, into=out)
    assert relative_error(out, base + plain.forward(a, d, u, scale)) <= 1e-12
    g = fast.upstream(delta, u, scale)
    signal = below.clone()
    fast.backward(g, d, into=signal)
    assert relative_error(signal, below + plain.delta_prev(delta, d, u, scale)) <= 1e-12
    grad_d, grad_u = torch.ones(f_in, r).double(), torch.ones(r, f_out).double()
    assert relative_error(fast.grad_d(g, a, None), plain.grad_d(delta, a, u, scale)) <= 1e-12
    assert relative_error(fast.grad_u(delta, h, scale, None), plain.grad_u(delta, a, d, scale)) <= 1e-12
    fast.grad_d(g, a, grad_d)
    fast.grad_u(delta, h, scale, grad_u)
    assert relative_error(grad_d, 1 + plain.grad_d(delta, a, u, scale)) <= 1e-12
    assert relative_error(grad_u, 1 + plain.grad_u(delta, a, d, scale)) <= 1e-12
