"""ops.gated against paper.gated, autograd and finite differences, also where the gate saturates."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

from conftest import ROUNDING, SCALES, rounded
from handgrad.families.family import ACTIVATIONS
from handgrad.ops import activation
from handgrad.ops import gated as fast
from handgrad.paper import gated as plain
from handgrad.proof.oracles import differentiate, directional_error, relative_error
from handgrad.tolerances import FINITE_DIFFERENCE_TOLERANCE, IDENTITY_TOLERANCE, TOLERANCE

LIBRARY = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def test_both_packages_have_the_same_gates() -> None:
    assert fast.NAMES == plain.NAMES == tuple(LIBRARY)


@pytest.mark.parametrize("name", plain.NAMES)
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize(("n", "f"), [(1, 1), (5, 7)])
@pytest.mark.some_cases(3)
def test_equal_to_the_paper_and_autograd(n: int, f: int, spread: float, name: str) -> None:
    gate, up, delta = spread * torch.randn(n, f).double(), *torch.randn(2, n, f).double()
    before = [x.clone() for x in (gate, up, delta)]
    d_gate, d_up, a_8 = fast.backward(delta, gate, up, name)
    expected = plain.forward(gate, up, name)
    assert relative_error(fast.forward(gate, up, name), expected, floor=1e-300) <= IDENTITY_TOLERANCE
    assert relative_error(a_8, expected, floor=1e-300) <= IDENTITY_TOLERANCE
    assert relative_error(d_up, plain.delta_up(delta, gate, name), floor=1e-300) <= IDENTITY_TOLERANCE
    size = (delta * up).abs().max().item()
    assert relative_error(d_gate, plain.delta_gate(delta, gate, up, name), floor=size) <= IDENTITY_TOLERANCE
    by_autograd = differentiate(lambda gate, up: LIBRARY[name](gate) * up, gate, up, upstream=delta)
    assert relative_error(d_gate, by_autograd[0], floor=size) <= TOLERANCE[torch.float64]
    assert relative_error(d_up, by_autograd[1]) <= TOLERANCE[torch.float64]
    assert all(torch.equal(x, y) for x, y in zip((gate, up, delta), before, strict=True))


@pytest.mark.parametrize("name", plain.NAMES)
def test_finite_differences(name: str) -> None:
    gate, up, delta = torch.randn(3, 5, 7).double()
    d_gate, d_up, _ = fast.backward(delta, gate, up, name)
    generator = torch.Generator().manual_seed(0)
    of_gate = directional_error(lambda x: (fast.forward(x, up, name) * delta).sum().item(), gate, d_gate, generator)
    of_up = directional_error(lambda x: (fast.forward(gate, x, name) * delta).sum().item(), up, d_up, generator)
    assert max(of_gate, of_up) <= FINITE_DIFFERENCE_TOLERANCE


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", plain.NAMES)
def test_parts_and_views_give_the_same_as_one_call(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gate and up may be the two halves of one product"""
    both, delta = torch.randn(11, 14).to(dtype), torch.randn(11, 7).to(dtype)
    gate, up = both[:, :7], both[:, 7:]
    one_call = fast.forward(gate.contiguous(), up.contiguous(), name), *fast.backward(delta, gate, up, name)
    for entries in (1, 20):
        monkeypatch.setattr(activation, "ENTRIES_AT_ONCE", entries)
        for one, two in zip(
            (fast.forward(gate, up, name), *fast.backward(delta, gate, up, name)), one_call, strict=True
        ):
            assert one.dtype == dtype and one.is_contiguous()
            assert relative_error(one, two) <= ROUNDING[dtype] / 2


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [*SCALES, 30.0, 1e6])
@pytest.mark.parametrize("name", plain.NAMES)
@pytest.mark.some_cases(3)
def test_every_dtype_and_scale(name: str, scale: float, dtype: torch.dtype) -> None:
    """Entry by entry too: a small entry next to a large one is rounded no worse."""
    gate, up = rounded(40, 33, dtype=dtype, scale=scale), rounded(40, 33, dtype=dtype)
    delta = rounded(40, 33, dtype=dtype, scale=1e-3)
    narrow = [x.to(dtype) for x in (delta, gate, up)]
    d_gate, d_up, a_8 = fast.backward(*narrow, name)
    assert d_gate.dtype == d_up.dtype == a_8.dtype == dtype
    expected = plain.forward(gate, up, name)
    assert relative_error(fast.forward(*narrow[1:], name), expected) <= ROUNDING[dtype]
    assert relative_error(a_8, expected) <= ROUNDING[dtype]
    assert relative_error(d_up, plain.delta_up(delta, gate, name)) <= ROUNDING[dtype]
    difference = (d_gate.double() - plain.delta_gate(delta, gate, up, name)).abs()
    assert (difference <= ROUNDING[dtype] * (delta * up).abs()).all()  # slopes are at most 1.13


@pytest.mark.parametrize("name", plain.NAMES)
def test_bfloat16_rounds_results_only(name: str) -> None:
    """Within half a unit of the last place, where rounding each step would be off by more"""
    gate, up, delta = (rounded(200, 33, dtype=torch.bfloat16) for _ in range(3))
    d_gate, d_up, a_8 = fast.backward(*(x.bfloat16() for x in (delta, gate, up)), name)
    for ours, exact, size in (
        (d_gate, plain.delta_gate(delta, gate, up, name), delta * up),
        (d_up, plain.delta_up(delta, gate, name), delta),
        (a_8, plain.forward(gate, up, name), up),
        (fast.forward(gate.bfloat16(), up.bfloat16(), name), plain.forward(gate, up, name), up),
    ):
        assert ((ours.double() - exact).abs() <= exact.abs() * 2.0**-8 + size.abs() * 3e-6).all()
    rounded_twice = LIBRARY[name](gate.bfloat16()) * up.bfloat16()
    assert ((rounded_twice.double() - plain.forward(gate, up, name)).abs() > a_8.double().abs() * 2.0**-8).any()


def test_silu_at_zero_and_where_it_saturates() -> None:
    x = torch.tensor([[0.0, 100.0, -100.0, 1e30, -1e30]], dtype=torch.float64)
    slope, value, _ = fast.backward(torch.ones_like(x), x, torch.ones_like(x), "silu")
    assert slope.tolist()[0] == pytest.approx([0.5, 1.0, 0.0, 1.0, 0.0], abs=1e-40)
    assert value.tolist()[0] == pytest.approx([0.0, 100.0, 0.0, 1e30, 0.0], abs=1e-40)


@pytest.mark.parametrize(
    ("hidden_act", "name"), [(theirs, ours) for theirs, ours in ACTIVATIONS.items() if ours in plain.NAMES]
)
def test_feed_forward_is_that_of_transformers(name: str, hidden_act: str) -> None:
    """Output and all gradients of Llama's feed-forward part"""
    config = SimpleNamespace(hidden_size=6, intermediate_size=10, mlp_bias=False, hidden_act=hidden_act)
    mlp = LlamaMLP(config).double()
    a_6, delta_9 = torch.randn(2, 5, 6).double()
    w_gate, w_up, w_8 = (layer.weight.detach().t() for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    gate, up = a_6 @ w_gate, a_6 @ w_up
    assert relative_error(fast.forward(gate, up, name) @ w_8, mlp(a_6)) <= IDENTITY_TOLERANCE
    d_gate, d_up, a_8 = fast.backward(delta_9 @ w_8.t(), gate, up, name)
    expected = differentiate(
        lambda a, *w: torch.func.functional_call(mlp, dict(zip(dict(mlp.named_parameters()), w, strict=True)), (a,)),
        a_6, *(p.detach() for p in mlp.parameters()), upstream=delta_9,
    )  # fmt: skip
    ours = (plain.delta_prev(d_gate, d_up, w_gate, w_up), d_gate.t() @ a_6, d_up.t() @ a_6, delta_9.t() @ a_8)
    for one, two in zip(ours, expected, strict=True):
        assert relative_error(one, two) <= TOLERANCE[torch.float64]


def test_unknown_gate_is_refused() -> None:
    x = torch.ones(1, 1)
    for f in (fast.forward, plain.forward):
        with pytest.raises(ValueError, match="unknown gate 'swish'; choose one of silu, gelu, gelu_tanh"):
            f(x, x, "swish")
    with pytest.raises(ValueError, match="unknown gate 'relu'"):
        plain.delta_gate(x, x, x, "relu")


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", plain.NAMES)
def test_written_over_gate_and_up(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "ENTRIES_AT_ONCE", 20)
    both, delta = torch.randn(11, 14).to(dtype), torch.randn(11, 7).to(dtype)
    gate, up = both[:, :7], both[:, 7:]
    expected = fast.backward(delta, gate, up, name)
    found = fast.backward(delta, gate, up, name, into=(gate, up))
    assert found[0] is gate and found[1] is up
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
