"""ops.experts against paper.experts, torch and autograd: routing, the scores' error signal, ties, every dtype."""

import pytest
import torch
import torch.nn.functional as F

from handgrad.ops import experts as fast
from handgrad.ops import gated
from handgrad.ops.routing import ROUTERS, Routing
from handgrad.paper import experts as plain
from handgrad.paper import gated as plain_gated
from handgrad.proof.oracles import differentiate, relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE, TOLERANCE

CASES = [
    Routing(k, kind, normalized, scale)
    for k in (1, 2, 5)
    for kind in ROUTERS
    for normalized in (True, False)
    for scale in ((1.0, 2.5) if kind == "sigmoid" else (1.0,))
]


def paper_gates(s: torch.Tensor, chosen: list[int], r: Routing) -> torch.Tensor:
    if r.kind == "sigmoid":
        return plain.gates_sigmoid(s, chosen, r.scale, r.normalized)
    return (plain.gates_normalized if r.normalized or r.kind != "softmax" else plain.gates_softmax)(s, chosen)


def paper_delta(delta: torch.Tensor, s: torch.Tensor, chosen: list[int], r: Routing) -> torch.Tensor:
    if r.kind == "sigmoid":
        return plain.delta_sigmoid(delta, s, chosen, r.scale, r.normalized)
    return (plain.delta_normalized if r.normalized or r.kind != "softmax" else plain.delta_softmax)(delta, s, chosen)


@pytest.mark.parametrize("r", CASES, ids=str)
@pytest.mark.parametrize("spread", [0.1, 3.0, 8.0])
@pytest.mark.some_cases(3)
def test_equal_to_the_paper_and_autograd(r: Routing, spread: float) -> None:
    s, delta_g = spread * torch.randn(7, 5).double(), torch.randn(7, r.k).double()
    before, largest = (s.clone(), delta_g.clone()), delta_g.abs().max().item()
    gates, chosen = fast.route(s, r)
    delta_s = fast.backward(delta_g, s, chosen, r)
    for t in range(len(s)):
        own = chosen[t].tolist()
        assert set(own) == set(plain.choose(s[t], r.k))
        assert relative_error(gates[t], paper_gates(s[t], own, r)) <= IDENTITY_TOLERANCE
        assert relative_error(delta_s[t], paper_delta(delta_g[t], s[t], own, r), floor=largest) <= IDENTITY_TOLERANCE
    found = differentiate(lambda s: fast.route(s, r)[0], s, upstream=delta_g)[0]
    assert relative_error(delta_s, found, floor=largest) <= TOLERANCE[torch.float64]
    assert torch.equal(s, before[0]) and torch.equal(delta_g, before[1])


def test_a_selection_bias_chooses_and_is_no_part_of_the_gate() -> None:
    s, bias = torch.zeros(1, 4).double(), torch.tensor([0.0, 5.0, 0.0, 5.0]).double()
    gates, chosen = fast.route(s, Routing(2, "sigmoid"), bias)
    assert set(chosen[0].tolist()) == {1, 3}
    assert torch.equal(gates, torch.full((1, 2), 0.5, dtype=torch.float64))


def test_groups() -> None:
    for _ in range(20):
        s = torch.randn(6, 12).double()
        _, chosen = fast.route(s, Routing(3, "sigmoid", groups=4, kept=2))
        for row, own in zip(s, chosen, strict=True):
            assert set(own.tolist()) == set(plain.choose_in_groups(torch.sigmoid(row), 3, 4, 2))


@pytest.mark.parametrize("kind", ROUTERS)
def test_ties_fall_as_torch_topk_decides(kind: str) -> None:
    s = torch.randint(2, (50, 9)).double()
    measure = {"softmax": F.softmax(s, 1), "softmax of chosen": s, "sigmoid": F.sigmoid(s)}[kind]
    expected = torch.topk(measure, 4, sorted=kind != "sigmoid")[1]
    assert torch.equal(fast.route(s, Routing(4, kind))[1], expected)


def test_rows_by_expert_are_sorted_by_token() -> None:
    chosen = torch.stack([torch.randperm(6)[:3] for _ in range(11)]) % 5  # expert 5 has no row
    places = fast.by_expert(chosen, 6)
    assert torch.equal(torch.cat(places).sort()[0], torch.arange(chosen.numel())) and not len(places[5])
    for e, rows in enumerate(places):
        assert (chosen.flatten()[rows] == e).all() and torch.equal(rows, rows.sort()[0])
    assert [len(rows) for rows in fast.by_expert(chosen[:0], 6)] == [0] * 6


@pytest.mark.parametrize("kind", ROUTERS)
def test_bfloat16_is_computed_in_float32(kind: str) -> None:
    s, r = (3 * torch.randn(9, 6)).bfloat16(), Routing(2, kind)
    gates, chosen = fast.route(s, r)
    wide, expected = fast.route(s.float(), r)
    assert torch.equal(gates, wide) and torch.equal(chosen, expected)
    delta = torch.randn(9, 2)
    assert torch.equal(fast.backward(delta, s, chosen, r), fast.backward(delta, s.float(), chosen, r).bfloat16())


def test_the_balance_loss() -> None:
    s, k = 2 * torch.randn(8, 5).double(), 2
    chosen = fast.route(s, Routing(k))[1]
    tokens = fast.tokens_of_experts(chosen, 5, s.dtype)
    p = torch.softmax(s, 1)
    assert fast.balance(tokens, p.sum(0), 8).item() == pytest.approx(plain.balance(s, k).item(), rel=1e-12)
    assert relative_error(fast.delta_balance(s, tokens, 8), plain.delta_balance(s, k)) <= IDENTITY_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 6.0, 100.0])
def test_the_clamped_gate(spread: float, dtype: torch.dtype) -> None:
    gate, up, delta = (spread * torch.randn(6, 8)).to(dtype), (spread * torch.randn(6, 8)).to(dtype), torch.randn(6, 8)
    gate[0, 0] = up[0, 1] = 7.0  # at a limit
    wide = [x.double() for x in (gate, up, delta)]
    tolerance = {torch.float64: IDENTITY_TOLERANCE, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    d_gate, d_up, a_8 = gated.backward(delta.to(dtype), gate, up, "clamped")
    expected = plain_gated.delta_clamped(delta.to(dtype).double(), *wide[:2])
    for ours, theirs in zip((d_gate, d_up, a_8), (*expected, plain_gated.clamped(*wide[:2])), strict=True):
        assert ours.dtype == dtype and relative_error(ours, theirs) <= tolerance
    assert torch.equal(gated.forward(gate, up, "clamped"), a_8)


def test_the_z_loss_and_the_sums_of_both() -> None:
    s = torch.randn(7, 5, dtype=torch.float64)
    k = 2
    assert relative_error(fast.delta_z_loss(s, 7), plain.delta_z_loss(s)) <= IDENTITY_TOLERANCE
    parts = [fast.router_sums(part, torch.topk(part, k)[1]) for part in s.split([3, 4])]
    tokens, p, squares, rows = torch.split(sum(parts), [5, 5, 1, 1])  # type: ignore[arg-type]
    assert rows.item() == 7 and squares.item() / 7 == pytest.approx(plain.z_loss(s).item(), rel=1e-12)
    assert fast.balance(tokens, p, 7).item() == pytest.approx(plain.balance(s, k).item(), rel=1e-12)
    assert torch.equal(tokens, 7 * plain.tokens_per_row(s, k))
    narrow = s.bfloat16()
    assert fast.delta_z_loss(narrow, 7).dtype == fast.delta_balance(narrow, tokens, 7).dtype == torch.bfloat16
