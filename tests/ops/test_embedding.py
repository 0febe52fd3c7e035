"""ops.embedding against paper.embedding."""

import pytest
import torch

from conftest import ROUNDING, SCALES, rounded
from handgrad.ops import embedding as fast
from handgrad.paper import embedding as plain
from handgrad.proof.oracles import relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE


@pytest.mark.parametrize(("n", "v", "c", "d"), [(1, 2, 1, 1), (7, 5, 9, 3), (13, 11, 13, 8)])
def test_equal_to_the_paper(n: int, v: int, c: int, d: int) -> None:
    ids, positions = torch.randint(v, (n,)), torch.randint(c, (n,))
    w_tok, w_pos = torch.randn(v, d).double(), torch.randn(c, d).double()
    out = plain.forward(ids, w_tok) + plain.forward(positions, w_pos)
    assert relative_error(fast.forward(ids, positions, w_tok, w_pos), out) <= IDENTITY_TOLERANCE
    delta, grad = torch.randn(n, d).double(), torch.randn(v, d).double()
    expected = grad + plain.grad_w(delta, ids, v)
    assert relative_error(fast.grad_w(delta, ids, w_tok, None), expected - grad) <= IDENTITY_TOLERANCE
    assert fast.grad_w(delta, ids, w_tok, grad) is grad
    assert relative_error(grad, expected) <= IDENTITY_TOLERANCE


def test_a_repeated_token_gets_the_sum() -> None:
    grad = fast.grad_w(torch.tensor([[1.0, 2.0], [10.0, 20.0]]), torch.tensor([1, 1]), torch.empty(3, 2), None)
    assert grad.tolist() == [[0, 0], [11, 22], [0, 0]]


def test_the_tables_are_not_changed() -> None:
    w_tok, w_pos = torch.randn(4, 3), torch.randn(4, 3)
    before = w_tok.clone()
    fast.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), w_tok, w_pos)
    assert torch.equal(w_tok, before)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", SCALES)
def test_every_dtype_and_scale(scale: float, dtype: torch.dtype) -> None:
    """The gradients of a token that occurs a thousand times are all added: a sum in bfloat16 would stop growing."""
    ids, positions = torch.randint(3, (3000,)), torch.randint(9, (3000,))
    w_tok, w_pos = rounded(3, 4, dtype=dtype, scale=scale), rounded(9, 4, dtype=dtype, scale=scale)
    delta = (scale * (1 + torch.rand(3000, 4))).to(dtype).double()
    out = fast.forward(ids, positions, w_tok.to(dtype), w_pos.to(dtype))
    expected = plain.forward(ids, w_tok) + plain.forward(positions, w_pos)
    assert out.dtype == dtype and relative_error(out, expected) <= ROUNDING[dtype]
    grad = fast.grad_w(delta.to(dtype), ids, w_tok.to(dtype), None)
    assert grad.dtype == dtype and relative_error(grad, plain.grad_w(delta, ids, 3)) <= ROUNDING[dtype]


@pytest.mark.parametrize("learned", [False, True])
def test_a_multiplier_is_of_tokens_alone(learned: bool) -> None:
    ids, positions = torch.tensor([1, 3, 1]), torch.tensor([0, 1, 2])
    w_tok, w_pos = torch.randn(4, 5).double(), torch.randn(3, 5).double()
    before = w_tok.clone()
    out = fast.forward(ids, positions, w_tok, w_pos if learned else None, 2.5)
    expected = plain.forward_scaled(ids, w_tok, 2.5) + (plain.forward(positions, w_pos) if learned else 0)
    assert relative_error(out, expected) <= IDENTITY_TOLERANCE
    assert torch.equal(w_tok, before)
