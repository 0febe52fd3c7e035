"""The optimizer inside the backward pass gives the parameters that the ordinary order gives."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import handgrad as hg
from conftest import make_batch, make_model
from handgrad import optim
from handgrad.optim import OptimizerInBackward
from handgrad.proof.oracles import relative_error
from handgrad.training.distributed import Ranks

LENGTHS = [9, 2, 13, 5, 16]
MAKERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
}


def ordinary(model: hg.GPT, make: Callable[..., torch.optim.Optimizer], clip: float | None, steps: int) -> list[float]:
    optimizer = make(list(model.parameters()))
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = make_batch(model, LENGTHS, seed=step, ignored=0.5)
        model.loss_and_grads(tokens, targets, LENGTHS)
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
    return norms


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("clip", [None, 0.05, 1e9])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("tied", [True, False])
def test_same_parameters_as_the_ordinary_order(
    name: str, clip: float | None, recompute: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handgrad.model.gpt.TOKENS_AT_ONCE", 16)  # several pieces: gradients accumulate over them
    shape = {"n_blocks": 3, "tied": tied, "logits_bias": True}
    one, two = make_model(**shape), make_model(**shape)
    norms = ordinary(one, MAKERS[name], clip, steps=3)
    optimizer = OptimizerInBackward(two, MAKERS[name], clip, recompute)
    for step in range(3):
        tokens, targets = make_batch(two, LENGTHS, seed=step, ignored=0.5)
        optimizer.step(tokens, targets, LENGTHS)
        if clip is not None:
            assert optimizer.norm == pytest.approx(norms[step], rel=1e-9)
    for (key, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert relative_error(q, p) <= 1e-10, key
        assert q.grad is None


def test_the_gradients_of_all_layers_never_exist_together() -> None:
    model = make_model(n_blocks=4)
    most = 0

    class Watching(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            nonlocal most
            most = max(most, sum(p.grad is not None for p in model.parameters()))
            super().step()

    OptimizerInBackward(model, lambda p: Watching(p, lr=0.1)).step(*make_batch(model, [9]))
    block = len(list(model.blocks[0].parameters()))
    assert most <= block + 1  # a block's and the tied embedding's


def test_frozen_layers_are_left_alone() -> None:
    model = make_model(n_blocks=3)
    for name, p in model.named_parameters():
        p.requires_grad_("h.1." in name)
    before = {name: p.clone() for name, p in model.named_parameters()}
    OptimizerInBackward(model, MAKERS["AdamW"], clip=1.0).step(*make_batch(model, [9]))
    for name, p in model.named_parameters():
        # b_k has no gradient, and weight decay alone moves it
        assert torch.equal(p, before[name]) != ("h.1." in name), name


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_a_batch_without_targets_counts_nothing(clip: float | None, recompute: str) -> None:
    """Its gradient is 0, layer by layer, for other processes to add theirs."""
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [9, 4])
    summed: list[nn.Parameter] = []

    def combine(layer: list[nn.Parameter]) -> None:
        assert all((p.grad == 0).all() for p in layer)
        summed.extend(layer)

    before = [p.clone() for p in model.parameters()]
    optimizer = OptimizerInBackward(model, MAKERS["SGD"], clip, recompute, combine)
    assert optimizer.step(tokens, torch.full_like(targets, -100), [9, 4], n_targets=5) == 0.0
    assert set(summed) == set(model.parameters())
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))
    with pytest.raises(hg.HandgradError, match="every target is ignored"):
        optimizer.step(tokens, torch.full_like(targets, -100), [9, 4])
    with pytest.raises(hg.HandgradError, match="n_targets is the number of targets"):
        optimizer.step(tokens, targets, [9, 4], n_targets=0)


def test_gradients_of_an_earlier_call_are_not_part_of_a_step() -> None:
    one, two = make_model(), make_model()
    batch = make_batch(one, [9])
    two.loss_and_grads(*batch)
    for model in (one, two):
        optimizer = OptimizerInBackward(model, MAKERS["SGD"], clip=0.1)
        optimizer.step(*batch)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_is_right_over_the_whole_range(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    unit = torch.randn(40, 50, dtype=torch.float64)
    low, high = math.log10(limits.tiny), math.log10(limits.max)
    for exponent in [
        low + 2,
        low / 2 - 3,
        low / 2,
        low / 2 + 3,
        -23,
        -10,
        0,
        10,
        19,
        high / 2 - 1,
        high / 2 + 2,
        high - 2,
    ]:
        grad = (unit * 10.0**exponent).to(dtype)
        largest = grad.double().abs().max()
        truth = (grad.double() / largest).norm() * largest
        assert optim.norm(grad).item() == pytest.approx(truth.item(), rel=1e-5), exponent
    most = torch.full((3,), limits.max, dtype=dtype)
    if dtype != torch.float64:
        assert optim.norm(most).item() == pytest.approx(math.sqrt(3) * limits.max)
    assert optim.norm(torch.zeros(5, dtype=dtype)).item() == 0 and optim.norm(torch.zeros(0, dtype=dtype)).item() == 0
    assert math.isinf(optim.norm(torch.tensor([1.0, math.inf], dtype=dtype)).item())
    assert math.isnan(optim.norm(torch.tensor([1.0, math.nan], dtype=dtype)).item())


def test_an_ordinary_norm_keeps_its_bits() -> None:
    grad = torch.randn(1000)
    assert optim.norm(grad).item() == torch.dot(grad, grad).sqrt().item()
    assert optim.length([3.0, 4.0]) == 5.0
    assert optim.length([3e200, 4e200]) == pytest.approx(5e200) and optim.length([3e-200, 4e-200]) == pytest.approx(
        5e-200
    )
    assert math.isnan(optim.length([1.0, math.nan])) and optim.length([]) == 0.0


def test_huge_gradients_are_clipped() -> None:
    model = make_model(dtype=torch.float32)
    before = [p.clone() for p in model.parameters()]

    def combine(layer: list[nn.Parameter]) -> None:
        for p in layer:
            p.grad.mul_(1e25)

    optimizer = OptimizerInBackward(model, lambda p: torch.optim.SGD(p, lr=1.0), clip=1.0, combine=combine)
    optimizer.step(*make_batch(model, [9]))
    assert 1e23 < optimizer.norm < math.inf
    moved = math.sqrt(sum((p - q).double().norm().item() ** 2 for p, q in zip(model.parameters(), before, strict=True)))
    assert moved == pytest.approx(1.0, rel=1e-4)


def test_a_schedule_can_reach_every_layer() -> None:
    model = make_model(n_blocks=2)
    optimizer = OptimizerInBackward(model, MAKERS["SGD"])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.clone() for p in model.parameters()]
    optimizer.step(*make_batch(model, [9]))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
def test_a_factor_is_taken_along_by_the_step(kind: str) -> None:
    start, grads = torch.randn(7, 5), [torch.randn(7, 5) for _ in range(3)]
    ends = []
    for inside in (True, False):
        p = torch.nn.Parameter(start.clone())
        optimizer = optim.maker(kind, 0.1, 0.01, (0.9, 0.99))([p])
        for grad in grads:
            p.grad = grad.clone() if inside else 0.25 * grad
            optim.step(optimizer, 0.25 if inside else 1.0)
        assert not hasattr(optimizer, "grad_scale")
        ends.append(p.detach())
    assert torch.allclose(*ends, atol=1e-6, rtol=0) and not torch.allclose(ends[0], start)


@pytest.mark.parametrize(("device", "backend"), [(None, "gloo"), ("cpu", "gloo"), ("cuda:1", "nccl")])
def test_gradients_are_summed_where_they_are(device: str | None, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU in the machine means nothing as long as the model is on the CPU."""
    chosen: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **options: chosen.append(backend))
    monkeypatch.setattr(Ranks, "_open_store", lambda self: None)
    Ranks() if device is None else Ranks(device)
    assert chosen == [backend]
