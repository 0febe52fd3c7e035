"""ops.logits against paper.logits and autograd."""

import math

import pytest
import torch

from conftest import ROUNDING, rounded
from handgrad.ops.logits import LogitMap
from handgrad.paper import logits as plain
from handgrad.proof.oracles import differentiate, relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE, TOLERANCE

MAPS = [LogitMap(), LogitMap(0.3), LogitMap(1.0, 30.0), LogitMap(2.5, 0.7), LogitMap(1.0, 1e-6), LogitMap(1.0, 1e6)]


@pytest.mark.parametrize("given", MAPS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (0, 3)])
def test_equal_to_the_paper_and_autograd(shape: tuple[int, int], given: LogitMap) -> None:
    a, delta = torch.randn(2, *shape).double()
    y = given.forward(a.clone())
    assert relative_error(y, plain.forward(a, *given)) <= IDENTITY_TOLERANCE
    back = given.backward(delta.clone(), y.clone())
    assert relative_error(back, plain.delta_prev(delta, plain.forward(a, *given), *given)) <= IDENTITY_TOLERANCE
    if a.numel():
        expected = differentiate(lambda a: plain.forward(a, *given), a, upstream=delta)[0]
        assert relative_error(back, expected, 1e-12) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("given", [LogitMap(0.3), LogitMap(1.0, 30.0), LogitMap(2.5, 0.7)], ids=str)
def test_every_dtype(given: LogitMap, dtype: torch.dtype) -> None:
    a, delta = (rounded(6, 9, dtype=dtype).to(dtype) for _ in range(2))
    y, back = given.forward(a.clone()), given.backward(delta.clone(), given.forward(a.clone()))
    assert y.dtype == back.dtype == dtype
    expected = plain.forward(a.double(), *given)
    assert relative_error(y.double(), expected) <= 4 * ROUNDING[dtype]
    # where a logit is near the cap, 1 − (y/c)² is a difference: its error is one of 1
    error = (back.double() - plain.delta_prev(delta.double(), expected, *given)).abs()
    assert (error <= 8 * ROUNDING[dtype] * given.scale * (delta.double().abs() + 1)).all()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_results_overwrite_what_is_given(dtype: torch.dtype) -> None:
    for given in MAPS:
        a, delta = torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)
        y = given.forward(a)
        assert y is a and given.backward(delta, y) is delta


@pytest.mark.parametrize("dtype", ROUNDING)
def test_huge_infinite_and_undefined_logits(dtype: torch.dtype) -> None:
    """A capped logit has the cap's size and no gradient; one that is not a number stays one."""
    a = torch.tensor([[1e30, -1e30, math.inf, -math.inf, 0.0, math.nan]], dtype=dtype)
    y = LogitMap(1.0, 30.0).forward(a.clone())
    assert y[0, :5].tolist() == [30, -30, 30, -30, 0] and y[0, 5].isnan()
    back = LogitMap(1.0, 30.0).backward(torch.ones_like(y), y)
    assert back[0, :5].tolist() == [0, 0, 0, 0, 1] and back[0, 5].isnan()
    scaled = LogitMap(0.5).forward(a.clone())
    assert scaled[0, 2:5].tolist() == [math.inf, -math.inf, 0] and scaled[0, 5].isnan()


def test_the_identity_computes_nothing() -> None:
    assert LogitMap().identity and not LogitMap(2.0).identity and not LogitMap(1.0, 3.0).identity
    a = torch.tensor([math.nan, 1.0])
    assert LogitMap().forward(a) is a and LogitMap().backward(a, a) is a
