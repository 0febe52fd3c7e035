"""ops.activation against paper.activation, also where exp and tanh saturate."""

import pytest
import torch

from conftest import ROUNDING, SCALES, rounded
from handgrad.model.config import ACTIVATIONS
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


def test_a_model_can_have_every_activation_of_the_paper_package() -> None:
    assert ACTIVATIONS == plain.NAMES


def test_relu_has_no_slope_at_zero() -> None:
    assert fast.backward(torch.ones(1, 1), torch.zeros(1, 1), "relu")[0].item() == 0


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [*SCALES, 30.0, 1e6])
@pytest.mark.parametrize("name", plain.NAMES)
@pytest.mark.some_cases(3)
def test_every_dtype_and_scale(name: str, scale: float, dtype: torch.dtype) -> None:
    """The error signal entry by entry too: a small entry next to a large one is rounded no worse."""
    x, delta = rounded(40, 33, dtype=dtype, scale=scale), rounded(40, 33, dtype=dtype, scale=1e-3)
    narrow = x.to(dtype), delta.to(dtype)
    ours, value = fast.backward(narrow[1], narrow[0], name)
    assert ours.dtype == value.dtype == dtype
    assert relative_error(fast.forward(narrow[0], name), plain.g(x, name)) <= ROUNDING[dtype]
    assert relative_error(value, plain.g(x, name)) <= ROUNDING[dtype]
    expected = plain.delta_prev(delta, x, name)
    size = expected if name == "relu2" else delta  # the slopes of the others are at most 1.13; relu2's grows with x
    assert ((ours.double() - expected).abs() <= ROUNDING[dtype] * size.abs()).all()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_squared_relu_rounds_once(dtype: torch.dtype) -> None:
    x, delta = rounded(40, 33, dtype=dtype), rounded(40, 33, dtype=dtype)
    ours, value = fast.backward(delta.to(dtype), x.to(dtype), "relu2")
    positive = x.clamp(min=0)
    assert torch.equal(ours, (2 * delta * positive).to(dtype))
    assert torch.equal(value, positive.square().to(dtype))
    assert torch.equal(fast.forward(x.to(dtype), "relu2"), value)


def test_squared_relu_at_zero_and_where_numbers_are_not_finite() -> None:
    """One value from both sides at the kink; NaN is passed on, not turned into 0"""
    x = torch.tensor([[-0.0, 0.0, -1e-30, -torch.inf, torch.nan]])
    ours, value = fast.backward(torch.ones_like(x), x, "relu2")
    assert ours[0, :4].tolist() == value[0, :4].tolist() == fast.forward(x, "relu2")[0, :4].tolist() == [0.0] * 4
    assert ours[0, 4].isnan() and value[0, 4].isnan() and fast.forward(x, "relu2")[0, 4].isnan()
    assert fast.backward(torch.ones(1, 1), torch.tensor([[torch.inf]]), "relu2")[0].item() == torch.inf


def test_an_unknown_activation_is_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="unknown activation 'swish'"):
        fast.forward(x, "swish")
    with pytest.raises(KeyError):
        fast.backward(x, x, "swish")
