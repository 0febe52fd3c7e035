"""ops.short_conv against paper.short_conv, sequence by sequence, torch's conv1d and autograd."""

import pytest
import torch
import torch.nn.functional as F

from conftest import ROUNDING, rounded
from handgrad.ops import attention
from handgrad.ops import short_conv as fast
from handgrad.paper import short_conv as plain
from handgrad.proof.oracles import differentiate, relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE

LENGTHS = [(1,), (7,), (2, 1, 1, 5), (1, 1, 1), (3, 0, 4), (0,), (4, 4, 2)]
CPU = torch.device("cpu")


def borders_of(lengths: tuple[int, ...], taps: int) -> fast.Borders:
    return fast.Borders(attention.spans_of(lengths), taps, CPU)


def in_order(weight: torch.Tensor) -> torch.Tensor:
    """(d, 1, L) as files hold it → (L, d) as the paper's form has it"""
    return weight[:, 0].flip(1).t()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("d", "taps"), [(1, 3), (5, 3), (3, 1), (2, 2), (4, 6)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.some_cases(3)
def test_packed_sequences_equal_the_paper_one_by_one(lengths: tuple[int, ...], d: int, taps: int, bias: bool) -> None:
    n = sum(lengths)
    z, delta, weight, b = (torch.randn(*s).double() for s in ((n, d), (n, d), (d, 1, taps), (d,)))
    before = z.clone(), delta.clone(), weight.clone()
    borders, w, b_or_none = borders_of(lengths, taps), in_order(weight), b if bias else None
    parts = list(zip(z.split([*lengths]), delta.split([*lengths]), strict=True))
    out = torch.cat([plain.conv(z_i, w, b_or_none) for z_i, _ in parts])
    signal = torch.cat([plain.delta_z(delta_i, w) for _, delta_i in parts])
    grads = torch.stack([plain.grad_w(delta_i, z_i, taps) for z_i, delta_i in parts])
    grad = grads.sum(0).flip(0).t()[:, None]
    assert relative_error(fast.forward(z, weight, b_or_none, borders), out) <= IDENTITY_TOLERANCE
    assert relative_error(fast.backward(delta, weight, borders), signal) <= IDENTITY_TOLERANCE
    assert relative_error(fast.grad_w(delta, z, borders, None), grad) <= IDENTITY_TOLERANCE
    buffer = torch.ones_like(weight)
    assert fast.grad_w(delta, z, borders, buffer) is buffer
    assert relative_error(buffer, 1 + grad) <= IDENTITY_TOLERANCE
    per_token = fast.products(delta, z, borders).view(n, d, taps)
    for x, expected in zip(per_token.split([*lengths]), grads, strict=True):
        assert relative_error(x.sum(0), expected.flip(0).t(), 1.0) <= IDENTITY_TOLERANCE
    assert all(torch.equal(x, y) for x, y in zip((z, delta, weight), before, strict=True))


@pytest.mark.parametrize(("n", "d", "taps"), [(1, 1, 3), (6, 5, 3), (2, 3, 4)])
def test_equal_to_autograd_of_torch(n: int, d: int, taps: int) -> None:
    z, delta, weight, b = (torch.randn(*s).double() for s in ((n, d), (n, d), (d, 1, taps), (d,)))

    def by_torch(z: torch.Tensor, weight: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv1d(z.t()[None], weight, b, padding=taps - 1, groups=d)[0, :, :n].t()

    borders = borders_of((n,), taps)
    assert relative_error(fast.forward(z, weight, b, borders), by_torch(z, weight, b)) <= IDENTITY_TOLERANCE
    expected = differentiate(by_torch, z, weight, b, upstream=delta)
    assert relative_error(fast.backward(delta, weight, borders), expected[0]) <= IDENTITY_TOLERANCE
    assert relative_error(fast.grad_w(delta, z, borders, None), expected[1]) <= IDENTITY_TOLERANCE
    assert relative_error(delta.sum(0), expected[2]) <= IDENTITY_TOLERANCE


def test_rows_of_sequences_without_queries_are_not_read() -> None:
    """Spans leave out sequences whose rows nobody needs: those of the others are the same, and NaN stays where it is."""
    lengths, taps, rows = (3, 2, 4, 1), 3, torch.tensor([1, 5, 8])
    z, delta, weight = torch.randn(10, 2).double(), torch.randn(10, 2).double(), torch.randn(2, 1, taps).double()
    delta[3:5] = delta[9:] = 0
    all_rows, some = borders_of(lengths, taps), fast.Borders(attention.spans_of(lengths, rows), taps, CPU)
    used = [0, 1, 2, 5, 6, 7, 8]
    expected, signal = fast.forward(z, weight, None, all_rows)[used], fast.backward(delta, weight, all_rows)[used]
    assert torch.equal(fast.grad_w(delta, z, some, None), fast.grad_w(delta, z, all_rows, None))
    z[3:5] = z[9:] = torch.nan
    assert torch.equal(fast.forward(z, weight, None, some)[used], expected)
    assert torch.equal(fast.backward(delta, weight, some)[used], signal)


def test_a_broken_sequence_breaks_no_other() -> None:
    lengths, weight = (3, 1, 4), torch.randn(2, 1, 3)
    z, borders = torch.randn(8, 2), borders_of(lengths, 3)
    expected = fast.forward(z, weight, None, borders)
    z[3] = torch.inf
    found = fast.forward(z, weight, None, borders)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[others], expected[others])
    assert torch.equal(fast.backward(z, weight, borders)[others].isfinite(), torch.ones(7, 2).bool())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e3])
def test_every_dtype_and_scale(scale: float, dtype: torch.dtype) -> None:
    lengths, d, taps = (9, 2, 30), 17, 3
    z, delta = (rounded(sum(lengths), d, dtype=dtype, scale=scale) for _ in range(2))
    weight, b = rounded(d, 1, taps, dtype=dtype), rounded(d, dtype=dtype)
    borders = borders_of(lengths, taps)
    inputs = [x.to(dtype) for x in (z, delta, weight, b)]
    for found, expected in (
        (fast.forward(inputs[0], inputs[2], inputs[3], borders), fast.forward(z, weight, b, borders)),
        (fast.backward(inputs[1], inputs[2], borders), fast.backward(delta, weight, borders)),
        (fast.grad_w(inputs[1], inputs[0], borders, None), fast.grad_w(delta, z, borders, None)),
    ):
        assert found.dtype == dtype
        assert relative_error(found, expected) <= ROUNDING[dtype]


def test_a_product_is_rounded_once() -> None:
    x, y = rounded(50, dtype=torch.bfloat16), rounded(50, dtype=torch.bfloat16)
    assert torch.equal(fast.product(x.bfloat16(), y.bfloat16(), torch.float32).double(), x * y)  # 8 · 8 bits fit
    assert torch.equal(fast.product(x.bfloat16(), y.bfloat16(), torch.bfloat16), (x * y).bfloat16())
