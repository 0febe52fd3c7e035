"""Norms and products of examples' gradients: the batched forms against the literal ones of `paper/`."""

from itertools import product

import pytest
import torch
from torch import Tensor

from conftest import ROUNDING, rounded
from handgrad.ops import per_example
from handgrad.paper import per_example as paper
from handgrad.proof.oracles import relative_error

LENGTHS = [3, 1, 6, 4]


def rows(f: int) -> Tensor:
    return torch.randn(sum(LENGTHS), f, dtype=torch.float64)


def all_pairs(*factors: Tensor) -> list[list[tuple[Tensor, ...]]]:
    """For every pair of examples the rows of i and of j, factor by factor."""
    parts = [x.split(LENGTHS) for x in factors]
    return [[tuple(y for x in parts for y in (x[i], x[j])) for j in range(4)] for i in range(4)]


def by_paper(formula: object, *factors: Tensor) -> Tensor:
    return torch.stack([torch.stack([formula(*given) for given in row]) for row in all_pairs(*factors)])  # type: ignore[operator]


@pytest.mark.parametrize(("f_in", "f_out"), [(5, 7), (1, 9), (40, 2)])
def test_products_and_squares_of_a_weight(f_in: int, f_out: int) -> None:
    """Of wide matrices Gram matrices are cheaper, of narrow ones the gradients themselves."""
    a, delta = rows(f_in), rows(f_out)
    before = a.clone(), delta.clone()
    expected = by_paper(lambda a_i, a_j, d_i, d_j: paper.product_w(a_i, d_i, a_j, d_j), a, delta)
    assert relative_error(per_example.products(a, delta, LENGTHS), expected) <= 1e-12
    grams = per_example.grams(a, LENGTHS), per_example.grams(delta, LENGTHS)
    assert relative_error(per_example.squares(*grams), expected.diagonal()) <= 1e-12
    formed = [per_example.dot(grad, grad) for grad in per_example.formed(a, delta, LENGTHS)]
    assert relative_error(torch.stack(formed), expected.diagonal()) <= 1e-12
    assert torch.equal(a, before[0]) and torch.equal(delta, before[1])


def test_both_ways_of_all_pairs_are_taken() -> None:
    wide, narrow = (rows(40), rows(40)), (rows(2), rows(2))
    for a, delta in (wide, narrow):
        expected = by_paper(lambda a_i, a_j, d_i, d_j: paper.product_w(a_i, d_i, a_j, d_j), a, delta)
        assert relative_error(per_example.products(a, delta, LENGTHS), expected) <= 1e-12


def test_sums() -> None:
    delta = rows(5)
    added = per_example.sums(delta, LENGTHS)
    expected = by_paper(paper.product_b, delta)
    assert relative_error(per_example.inner(added, added), expected) <= 1e-12
    assert torch.equal(per_example.sums(delta[:4], [4, 0])[1], torch.zeros(5, dtype=torch.float64))


def test_tables_and_a_tied_head() -> None:
    n_vocab, d = 6, 5
    ids, delta, a, signal = torch.randint(n_vocab, (sum(LENGTHS),)), rows(d), rows(d), rows(n_vocab)
    table = by_paper(lambda ids_i, ids_j, d_i, d_j: paper.product_table(ids_i, d_i, ids_j, d_j, n_vocab), ids, delta)
    assert relative_error(per_example.table_products(delta, ids, LENGTHS), table) <= 1e-12
    assert relative_error(per_example.table_squares(delta, ids, LENGTHS), table.diagonal()) <= 1e-12
    cross = by_paper(
        lambda ids_i, ids_j, e_i, e_j, a_i, a_j, d_i, d_j: paper.product_table_head(ids_i, e_i, a_j, d_j),
        ids, delta, a, signal,
    )  # fmt: skip
    assert relative_error(per_example.table_head_products(delta, ids, LENGTHS, a, signal, LENGTHS), cross) <= 1e-12
    own = [
        per_example.table_head(e, b, s[:, i])
        for e, b, s, i in zip(*(x.split(LENGTHS) for x in (delta, a, signal, ids)), strict=True)
    ]
    assert relative_error(torch.stack(own), cross.diagonal()) <= 1e-12


@pytest.mark.parametrize("k", [1, 3])
def test_products_with_given_gradients(k: int) -> None:
    a, delta, q = rows(4), rows(3), torch.randn(k, 4, 3, dtype=torch.float64)
    expected = torch.stack(
        [
            torch.stack([paper.product_with(x, y, z) for z in q])
            for x, y in zip(a.split(LENGTHS), delta.split(LENGTHS), strict=True)
        ]
    )
    assert relative_error(per_example.products_with(a, delta, q, LENGTHS), expected) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    a, delta = rounded(sum(LENGTHS), 8, dtype=dtype), rounded(sum(LENGTHS), 9, dtype=dtype)
    exact = per_example.squares(per_example.grams(a, LENGTHS), per_example.grams(delta, LENGTHS))
    found = per_example.squares(per_example.grams(a.to(dtype), LENGTHS), per_example.grams(delta.to(dtype), LENGTHS))
    assert found.dtype == torch.float64 and relative_error(found, exact) <= ROUNDING[dtype]


def test_the_cheaper_way() -> None:
    """Short examples and wide matrices: Gram matrices; long examples or narrow matrices: formed gradients."""
    for with_grad, f_out in product((True, False), (768, 3072)):
        assert not per_example.forming([16] * 8, 768, f_out, with_grad)
        assert per_example.forming([1024], 768, f_out, with_grad)
        assert per_example.forming([200] * 4, 768, 16, with_grad)
