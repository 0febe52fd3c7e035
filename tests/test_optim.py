"""The optimizer inside the backward pass gives the parameters that the ordinary order gives."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import handgrad as hg
from conftest import make_batch, make_model
from handgrad import optim
from handgrad.optim import OptimizerInBackward
from handgrad.verify import relative_error

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
    monkeypatch.setattr("handgrad.gpt.TOKENS_AT_ONCE", 16)  # several pieces: gradients accumulate over them
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
