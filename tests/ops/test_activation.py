"""ops.activation against paper.activation, also where exp and tanh saturate."""

import pytest
import torch

from conftest import ROUNDING, SCALES, rounded
from handgrad.ops import activation as fast
from handgrad.paper import activation as plain
from handgrad.proof.oracles import differentiate, relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE, TOLERANCE


@pytest.mark.parametrize("name", plain.NAMES)
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0, 1000.0])
def test_equal_to_the_paper(name: str, spread: float) -> None:
    x, delta = spread * torch.randn(5, 7).double(), torch.randn(5, 7).double()
    before = x.clone(), delta.clone()
    assert relative_error(fast.forward(x, name), plain.g(x, name), floor=1e-300) <= IDENTITY_TOLERANCE
    ours, value = fast.backward(delta, x, name)
    assert relative_error(value, plain.g(x, name), floor=1e-300) <= IDENTITY_TOLERANCE
    assert relative_error(ours, plain.delta_prev(delta, x, name)) <= IDENTITY_TOLERANCE
    (expected,) = differentiate(lambda x: plain.g(x, name), x, upstream=delta)
    assert relative_error(ours, expected) <= TOLERANCE[torch.float64]
    assert torch.equal(x, before[0]) and torch.equal(delta, before[1])


@pytest.mark.parametrize("name", plain.NAMES)
def test_parts_give_the_same_as_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, delta = torch.randn(2, 11, 7).double()
    one_call = fast.forward(x, name), *fast.backward(delta, x, name)
    monkeypatch.setattr(fast, "ENTRIES_AT_ONCE", 20)
    for one, two in zip((fast.forward(x, name), *fast.backward(delta, x, name)), one_call, strict=True):
        assert relative_error(one, two) <= IDENTITY_TOLERANCE


def test_relu_has_no_slope_at_zero() -> None:
    assert fast.backward(torch.ones(1, 1), torch.zeros(1, 1), "relu")[0].item() == 0


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [*SCALES, 30.0, 1e6])
@pytest.mark.parametrize("name", plain.NAMES)
def test_every_dtype_and_scale(name: str, scale: float, dtype: torch.dtype) -> None:
    """The error signal entry by entry too: a small entry next to a large one is rounded no worse."""
    x, delta = rounded(40, 33, dtype=dtype, scale=scale), rounded(40, 33, dtype=dtype, scale=1e-3)
    narrow = x.to(dtype), delta.to(dtype)
    ours, value = fast.backward(narrow[1], narrow[0], name)
    assert ours.dtype == value.dtype == dtype
    assert relative_error(fast.forward(narrow[0], name), plain.g(x, name)) <= ROUNDING[dtype]
    assert relative_error(value, plain.g(x, name)) <= ROUNDING[dtype]
    expected = plain.delta_prev(delta, x, name)
    assert ((ours.double() - expected).abs() <= ROUNDING[dtype] * delta.abs()).all()
