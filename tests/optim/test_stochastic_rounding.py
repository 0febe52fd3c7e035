"""Updates of bfloat16 weights: unbiased rounding, special values, and bits that depend on seed, step, parameter and entry
alone."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import handgrad as hg
from conftest import make_batch, make_model, run_processes
from handgrad import optim
from handgrad.optim import OptimizerInBackward, StochasticRounding, restore, state_of, stochastic_rounding
from handgrad.optim.stochastic_rounding import _mix, _signed, round_to_bfloat16_

BFLOAT16 = torch.finfo(torch.bfloat16)
KINDS = [
    "AdamW",
    "Adam",
    "NAdam",
    "RAdam",
    "Adamax",
    "SGD",
    "ASGD",
    "Adagrad",
    "Adadelta",
    "Adafactor",
    "RMSprop",
    "Rprop",
]
LENGTHS = [9, 2, 13, 5, 16]


def below_and_above(x: Tensor) -> tuple[Tensor, Tensor]:
    """The neighbors of x in bfloat16, toward zero and away from it."""
    below = (x.view(torch.int32) & -0x10000).view(torch.float32)
    above = (below.view(torch.int32) + 0x10000).view(torch.float32)
    return below, above


def make(
    kind: str, parameters: Iterable[nn.Parameter], lr: float = 1e-2, decay: float = 0.1, seed: int = 0
) -> tuple[torch.optim.Optimizer, StochasticRounding]:
    parameters = list(parameters)
    rounding = StochasticRounding(seed, parameters)
    return optim.maker(kind, lr, decay, (0.9, 0.99), rounding)(parameters), rounding


# ── rounding ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_hash_is_splitmix64() -> None:
    """The first outputs of the published generator with seed 1234567."""
    states = torch.tensor([_signed(1234567 + i * stochastic_rounding.GOLDEN) for i in range(1, 4)])
    assert [z % 2**64 for z in _mix(states).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("exponent", [-127, -126, -60, -1, 0, 30, 127])
@pytest.mark.parametrize("share", [1 / 65536, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.some_cases(3)
def test_rounding_is_unbiased(exponent: int, share: float, sign: int) -> None:
    """2^exponent · 1.25 and a share of the distance to its neighbor; 2^-127 is a subnormal number."""
    low = torch.tensor(sign * 1.25 * 2.0**exponent)
    x = (low.view(torch.int32) + round(share * 65536)).view(torch.float32)
    below, above = below_and_above(x)
    n = 300_001
    rounded = round_to_bfloat16_(x.repeat(n), key=exponent + 2**63)
    assert ((rounded == below) | (rounded == above)).all()
    up = (rounded == above).double().mean().item()
    assert abs(up - share) <= 5 * math.sqrt(share * (1 - share) / n) + 1e-5


def test_the_bits_of_neighboring_entries_steps_and_parameters_are_independent() -> None:
    x = torch.full((1 << 16,), 1 + 2.0**-8)  # in the middle between two numbers
    parameters = [nn.Parameter(x.bfloat16()) for _ in range(2)]
    flips = []
    for seed, step, which in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        rounding = StochasticRounding(seed, parameters)
        rounding.step = step
        rounded = round_to_bfloat16_(x.clone(), rounding.key(parameters[which]))
        flips.append((rounded > x).double() * 2 - 1)
    flips += [flips[0].roll(k) for k in (1, 2, 3, 4, 5, 64)]
    products = torch.stack(flips) @ torch.stack(flips).t() / len(x)
    assert (products - torch.eye(len(flips))).abs().max() < 5 / math.sqrt(len(x))


def test_what_bfloat16_represents_does_not_change() -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)  # all 65,536 numbers
    rounded = round_to_bfloat16_(every.float(), key=3).bfloat16()
    finite = ~every.isnan()
    assert torch.equal(rounded.view(torch.int16)[finite], every.view(torch.int16)[finite])
    assert rounded[~finite].isnan().all()


def test_not_a_number_infinity_and_the_largest_numbers() -> None:
    hidden = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32).item()  # NaN by its last bit alone
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([math.nan, hidden, math.inf, -math.inf, largest, -largest, BFLOAT16.max, 0.0, -0.0, 1e-45, 1.0])
    for key in range(50):
        y = round_to_bfloat16_(x.clone(), key).bfloat16()
        assert y[:2].isnan().all() and y[2] == math.inf and y[3] == -math.inf
        assert y[4] == y[6] == BFLOAT16.max and y[5] == -BFLOAT16.max
        assert y[7] == 0 and y[8] == 0 and math.copysign(1, y[8].item()) == -1 and y[10] == 1
        assert y[9].item() in (0.0, BFLOAT16.smallest_normal * 2**-7)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (3,), (7, 13), (5, 1, 11), (1031,)])
def test_any_shape_in_pieces_of_any_size(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(shape)
    whole = round_to_bfloat16_(x.clone(), key=5)
    assert torch.equal(whole, whole.bfloat16().float())
    for at_once in (4, 64, 1 << 20):
        monkeypatch.setattr(stochastic_rounding, "AT_ONCE", at_once)
        assert torch.equal(round_to_bfloat16_(x.clone(), key=5), whole)


# ── updates ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_updates_that_bfloat16_loses_add_up() -> None:
    """100 updates of 1e-4: each is a fortieth of the distance to the next number."""
    ours, plain = (nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2))
    optimizer, rounding = make("SGD", [ours], lr=1e-4, decay=0.0)
    torch_sgd = torch.optim.SGD([plain], lr=1e-4)
    for step in range(100):
        ours.grad, plain.grad = torch.ones_like(ours), torch.ones_like(plain)
        rounding.step = step
        optim.step(optimizer, 1.0)
        torch_sgd.step()
    assert (plain == 1).all()
    assert abs(ours.double().mean().item() - 0.99) < 5e-4  # five standard deviations of the mean


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.some_cases(4)
def test_the_expected_update_is_that_of_float32(kind: str, factor: float) -> None:
    """The mean of an update over parameters and seeds, with the factor of clipping; the optimizer's state is the same."""
    start, grad = torch.randn(2, 5, 3).bfloat16()
    exact = nn.Parameter(start.float())
    reference = optim.maker(kind, 1e-2, 0.1, (0.9, 0.99))([exact])
    exact.grad = grad.float()
    optim.step(reference, factor)
    seeds, copies = 20, 20
    total = torch.zeros(5, 3, dtype=torch.float64)
    for seed in range(seeds):
        same = [nn.Parameter(start.clone()) for _ in range(copies)]
        other = nn.Parameter(torch.ones(99, dtype=torch.bfloat16))
        optimizer, _ = make(kind, [*same, other], seed=seed)
        for p in same:
            p.grad = grad.clone()
        other.grad = torch.ones_like(other)
        optim.step(optimizer, factor)
        for p in same:
            total += p.detach().double()
            for key, value in optimizer.state[p].items():
                expected = reference.state[exact][key]
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected)), key
    below, above = below_and_above(exact.detach())
    limit = 5 * (above - below).abs().double() / 2 / math.sqrt(seeds * copies)
    assert ((total / (seeds * copies) - exact.detach()).abs() <= limit).all()
    assert not torch.equal(exact.detach(), start.float())


def test_a_parameter_in_another_memory_layout_gets_the_same_bits() -> None:
    x, grad = torch.randn(2, 7, 5).bfloat16()
    found = []
    for p in (nn.Parameter(x.clone()), nn.Parameter(x.t().contiguous().t())):
        p.grad = grad.clone()
        optimizer, _ = make("AdamW", [p])
        optim.step(optimizer, 1.0)
        found.append(p.detach())
    assert torch.equal(*found)


def test_float32_parameters_are_updated_by_torch_alone() -> None:
    start, grad = torch.randn(2, 9, 4)
    found = []
    for rounded in (True, False):
        p = nn.Parameter(start.clone())
        optimizer = make("AdamW", [p])[0] if rounded else optim.maker("AdamW", 1e-2, 0.1, (0.9, 0.99))([p])
        p.grad = grad.clone()
        optim.step(optimizer, 0.5)
        found.append(p.detach())
    assert torch.equal(*found)


def test_hooks_run_once_and_a_failed_step_leaves_the_optimizer_whole() -> None:
    parameters = [nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (3, 2)]
    optimizer, _ = make("AdamW", parameters)
    seen: list[object] = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda one, *_: seen.append([p.dtype for group in one.param_groups for p in group["params"]]))
    for p in parameters:
        p.grad = torch.ones_like(p)
    optim.step(optimizer, 0.5)
    assert seen == [[torch.bfloat16] * 2] * 2
    assert set(optimizer.state) == set(parameters)
    groups = optimizer.param_groups
    groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optim.step(optimizer, 1.0)
    assert optimizer.param_groups is groups and set(optimizer.state) == set(parameters)


# ── the same bits in every way ────────────────────────────────────────────────────────────────────────────────────────


def train(
    model: hg.GPT, inside: bool, clip: float | None, steps: range, state: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Train from this state of the optimizer on, and return the new one."""
    rounding = StochasticRounding(7, model.parameters())
    make = optim.maker("AdamW", 1e-3, 0.1, (0.9, 0.99), rounding)
    names = {p: name for name, p in model.named_parameters()}
    optimizer = OptimizerInBackward(model, make, clip) if inside else make(model.parameters())
    restore(optimizer, names, state or {})
    for step in steps:
        rounding.step = step
        tokens, targets = make_batch(model, LENGTHS, seed=step)
        if isinstance(optimizer, OptimizerInBackward):
            optimizer.step(tokens, targets, LENGTHS)
            continue
        model.zero_grad()
        model.loss_and_grads(tokens, targets, LENGTHS)
        norm = optim.length(optim.norm(p.grad) for p in model.parameters())
        optim.step(optimizer, optim.clip_factor(norm, clip))
    return state_of(optimizer, names)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_inside_the_backward_pass_and_after_it(tied: bool, clip: float | None) -> None:
    one, two = (make_model(dtype=torch.bfloat16, n_blocks=3, tied=tied) for _ in range(2))
    start = make_model(dtype=torch.bfloat16, n_blocks=3, tied=tied)
    train(one, False, clip, range(4))
    train(two, True, clip, range(4))
    assert same(one, two) and not same(one, start)


@pytest.mark.parametrize("inside", [True, False])
def test_an_interrupted_run_continues_with_the_same_bits(inside: bool) -> None:
    one, two = (make_model(dtype=torch.bfloat16, n_blocks=2) for _ in range(2))
    train(one, inside, 1.0, range(6))
    state = train(two, inside, 1.0, range(3))
    assert {value.dtype for value in state.values()} == {torch.float32}
    resumed = make_model(seed=1, dtype=torch.bfloat16, n_blocks=2)
    resumed.load_state_dict(two.state_dict())
    train(resumed, inside, 1.0, range(3, 6), state)
    assert same(one, resumed)


RANK = """
import sys, torch, handgrad as hg
from handgrad import optim
from handgrad.training.distributed import Ranks
from safetensors.torch import save_file
ranks = Ranks()
shape = hg.preset("nano", n_vocab=11, n_context=8, d_model=12, n_heads=3, n_blocks=2)
model = hg.GPT(shape, dtype=torch.bfloat16)
rounding = optim.StochasticRounding(0, model.parameters())
optimizer = optim.maker("AdamW", 1e-3, 0.1, (0.9, 0.99), rounding)(model.parameters())
generator = torch.Generator().manual_seed(ranks.rank)
for rounding.step in range(5):
    model.zero_grad()
    tokens, targets = torch.randint(11, (2, 3, 8), generator=generator)
    model.loss_and_grads(tokens, targets, n_targets=72, finished=ranks.all_reduce_async)
    ranks.wait()
    optim.step(optimizer, 1.0)
save_file({name: p.detach() for name, p in model.named_parameters()}, f"{sys.argv[1]}{ranks.rank}")
ranks.shutdown()
"""


def test_several_processes_hold_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    done = run_processes(3, tmp_path / "rank.py", tmp_path / "weights")
    assert done.returncode == 0, done.stderr
    first, *others = (load_file(tmp_path / f"weights{rank}") for rank in range(3))
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())
