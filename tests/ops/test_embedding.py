"""ops.embedding against paper.embedding."""

import pytest
import torch

from handgrad.ops import embedding as fast
from handgrad.paper import embedding as plain
from handgrad.verify import relative_error


@pytest.mark.parametrize(("n", "v", "c", "d"), [(1, 2, 1, 1), (7, 5, 9, 3), (13, 11, 13, 8)])
def test_equal_to_the_paper(n: int, v: int, c: int, d: int) -> None:
    ids, positions = torch.randint(v, (n,)), torch.randint(c, (n,))
    w_tok, w_pos = torch.randn(v, d).double(), torch.randn(c, d).double()
    out = plain.forward(ids, w_tok) + plain.forward(positions, w_pos)
    assert relative_error(fast.forward(ids, positions, w_tok, w_pos), out) <= 1e-12
    delta, grad = torch.randn(n, d).double(), torch.randn(v, d).double()
    expected = grad + plain.grad_w(delta, ids, v)
    assert relative_error(fast.grad_w(delta, ids, w_tok, None), expected - grad) <= 1e-12
    assert fast.grad_w(delta, ids, w_tok, grad) is grad
    assert relative_error(grad, expected) <= 1e-12


def test_a_repeated_token_collects_both() -> None:
    grad = fast.grad_w(torch.tensor([[1.0, 2.0], [10.0, 20.0]]), torch.tensor([1, 1]), torch.empty(3, 2), None)
    assert grad.tolist() == [[0, 0], [11, 22], [0, 0]]


def test_the_tables_are_not_changed() -> None:
    w_tok, w_pos = torch.randn(4, 3), torch.randn(4, 3)
    before = w_tok.clone()
    fast.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), w_tok, w_pos)
    assert torch.equal(w_tok, before)
