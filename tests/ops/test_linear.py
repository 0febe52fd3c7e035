"""ops.linear against paper.linear."""

import pytest
import torch

from conftest import ROUNDING, SCALES, rounded
from handgrad.ops import linear as fast
from handgrad.paper import linear as plain
from handgrad.proof.oracles import relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE


@pytest.mark.parametrize(("n", "f_in", "f_out"), [(1, 1, 1), (7, 5, 3), (2, 13, 17)])
@pytest.mark.parametrize("bias", [True, False])
def test_equal_to_the_paper(n: int, f_in: int, f_out: int, bias: bool) -> None:
    a, w, delta = torch.randn(n, f_in).double(), torch.randn(f_in, f_out).double(), torch.randn(n, f_out).double()
    b = torch.randn(f_out).double() if bias else None
    assert relative_error(fast.forward(a, w, b), plain.forward(a, w, b)) <= IDENTITY_TOLERANCE
    assert relative_error(fast.backward(delta, w), plain.delta_prev(delta, w)) <= IDENTITY_TOLERANCE
    grad_w, grad_b = torch.randn(f_in, f_out).double(), torch.randn(f_out).double()
    expected_w, expected_b = grad_w + plain.grad_w(delta, a), grad_b + plain.grad_b(delta)
    assert relative_error(fast.grad_w(delta, a, None), plain.grad_w(delta, a)) <= IDENTITY_TOLERANCE
    assert relative_error(fast.grad_b(delta, None), plain.grad_b(delta)) <= IDENTITY_TOLERANCE
    fast.grad_w(delta, a, grad_w)
    fast.grad_b(delta, grad_b)
    assert relative_error(grad_w, expected_w) <= IDENTITY_TOLERANCE
    assert relative_error(grad_b, expected_b) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", SCALES)
def test_every_dtype_and_scale(scale: float, dtype: torch.dtype) -> None:
    n, f_in, f_out = 700, 40, 24
    a, w, b = rounded(n, f_in, dtype=dtype), rounded(f_in, f_out, dtype=dtype, scale=scale), rounded(f_out, dtype=dtype)
    delta = rounded(n, f_out, dtype=dtype, scale=scale)
    narrow = [x.to(dtype) for x in (a, w, b, delta)]
    found = [
        fast.forward(*narrow[:3]), fast.backward(narrow[3], narrow[1]),
        fast.grad_w(narrow[3], narrow[0], None), fast.grad_b(narrow[3], None),
    ]  # fmt: skip
    expected = [plain.forward(a, w, b), plain.delta_prev(delta, w), plain.grad_w(delta, a), plain.grad_b(delta)]
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == dtype and relative_error(x, y) <= ROUNDING[dtype]


def test_a_mixed_product_over_nothing_is_the_bias() -> None:
    x, y = torch.empty(5, 0, dtype=torch.bfloat16), torch.empty(0, 7, dtype=torch.bfloat16)
    for bias in (None, torch.randn(7)):
        torch.full((300, 300), torch.nan)  # memory that may be used again
        found = fast.product(x, y, None, torch.float32, bias=bias)
        assert torch.equal(found, torch.zeros(5, 7) if bias is None else bias.expand(5, 7))
