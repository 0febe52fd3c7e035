"""Optimizer steps inside the backward pass, gradient norms, clipping and scaled steps."""

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import handgrad as hg
from conftest import make_batch, make_model, perturb
from handgrad import optim
from handgrad.model.passes.example_gradients import ExampleNorms
from handgrad.optim import OptimizerInBackward, align
from handgrad.optim.optimizers import ROW
from handgrad.proof.oracles import relative_error

LENGTHS = [9, 2, 13, 5, 16]
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
}


def train_with_separate_step(
    model: hg.GPT, make: Callable[..., torch.optim.Optimizer], clip: float | None, steps: int
) -> list[float]:
    """Train with backward, clip and step in sequence. Returns the gradient norms if `clip` is given."""
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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.05, 1e9])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.some_cases(5)
def test_optimizer_in_backward_matches_separate_step(
    name: str, clip: float | None, recompute: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handgrad.model.network.TOKENS_AT_ONCE", 16)  # several chunks, so that gradients accumulate
    shape = {"n_blocks": 3, "tied": tied, "logits_bias": True}
    one, two = make_model(**shape), make_model(**shape)
    norms = train_with_separate_step(one, OPTIMIZERS[name], clip, steps=3)
    optimizer = OptimizerInBackward(two, OPTIMIZERS[name], clip, recompute)
    for step in range(3):
        tokens, targets = make_batch(two, LENGTHS, seed=step, ignored=0.5)
        optimizer.step(tokens, targets, LENGTHS)
        if clip is not None:
            assert optimizer.norm == pytest.approx(norms[step], rel=1e-9)
    for (key, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert relative_error(q, p) <= 1e-10, key
        assert q.grad is None


def test_only_one_blocks_gradients_exist_at_a_time() -> None:
    model = make_model(n_blocks=4)
    most_gradients = 0

    class CountingSGD(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            nonlocal most_gradients
            most_gradients = max(most_gradients, sum(p.grad is not None for p in model.parameters()))
            super().step()

    OptimizerInBackward(model, lambda p: CountingSGD(p, lr=0.1)).step(*make_batch(model, [9]))
    block = len(list(model.blocks[0].parameters()))
    assert most_gradients <= block + 1  # those of one block and of the tied embedding


def test_frozen_layers_are_not_updated() -> None:
    model = make_model(n_blocks=3)
    for name, p in model.named_parameters():
        p.requires_grad_("h.1." in name)
    before = {name: p.clone() for name, p in model.named_parameters()}
    OptimizerInBackward(model, OPTIMIZERS["AdamW"], clip=1.0).step(*make_batch(model, [9]))
    for name, p in model.named_parameters():
        # b_k has no gradient: only weight decay changes it
        assert torch.equal(p, before[name]) != ("h.1." in name), name


@pytest.mark.parametrize("clip", [-1, "x", math.nan, True])
def test_a_clip_that_is_no_norm_is_refused(clip: Any) -> None:
    with pytest.raises(hg.HandgradError, match=rf"clip must be a number of at least 0.*, not {clip!r}"):
        OptimizerInBackward(make_model(), OPTIMIZERS["SGD"], clip)


@pytest.mark.parametrize("clip", [None, 0, 1.0])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_batch_without_targets_has_zero_gradient(clip: float | None, recompute: str) -> None:
    """Every layer still gets a zero gradient, to which other processes add theirs."""
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [9, 4])
    combined: list[nn.Parameter] = []

    def combine(layer: list[nn.Parameter]) -> None:
        assert all((p.grad == 0).all() for p in layer)
        combined.extend(layer)

    before = [p.clone() for p in model.parameters()]
    optimizer = OptimizerInBackward(model, OPTIMIZERS["SGD"], clip, recompute, combine)
    assert optimizer.step(tokens, torch.full_like(targets, -100), [9, 4], n_targets=5) == 0.0
    assert set(combined) == set(model.parameters())
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))
    with pytest.raises(hg.HandgradError, match="every target is ignored"):
        optimizer.step(tokens, torch.full_like(targets, -100), [9, 4])
    with pytest.raises(hg.HandgradError, match="n_targets is the number of targets"):
        optimizer.step(tokens, targets, [9, 4], n_targets=0)


def test_step_ignores_gradients_of_earlier_calls() -> None:
    one, two = make_model(), make_model()
    batch = make_batch(one, [9])
    two.loss_and_grads(*batch)
    for model in (one, two):
        optimizer = OptimizerInBackward(model, OPTIMIZERS["SGD"], clip=0.1)
        optimizer.step(*batch)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_is_accurate_over_the_range_of_each_dtype(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = torch.randn(40, 50, dtype=torch.float64)
    low, high = math.log10(limits.tiny), math.log10(limits.max)
    exponents = [low + 2, low / 2 - 3, low / 2, low / 2 + 3, -23, -10, 0, 10, 19, high / 2 - 1, high / 2 + 2, high - 2]
    for exponent in exponents:
        grad = (values * 10.0**exponent).to(dtype)
        largest = grad.double().abs().max()
        expected = (grad.double() / largest).norm() * largest
        assert optim.norm(grad) == pytest.approx(expected.item(), rel=1e-5), exponent
    largest_values = torch.full((3,), limits.max, dtype=dtype)
    if dtype != torch.float64:
        assert optim.norm(largest_values) == pytest.approx(math.sqrt(3) * limits.max)
    assert optim.norm(torch.zeros(5, dtype=dtype)) == 0 and optim.norm(torch.zeros(0, dtype=dtype)) == 0
    assert math.isinf(optim.norm(torch.tensor([1.0, math.inf], dtype=dtype)))
    assert math.isnan(optim.norm(torch.tensor([1.0, math.nan], dtype=dtype)))


def test_norm_does_not_depend_on_threads() -> None:
    threads = torch.get_num_threads()
    for n in (0, 1, 5, ROW - 1, ROW, 3 * ROW + 7, 300_001):
        grad, found = torch.randn(n), set[float]()
        for number in (1, 2, 3, 5):
            torch.set_num_threads(number)
            found.add(optim.norm(grad))
        torch.set_num_threads(threads)
        assert len(found) == 1 and found.pop() == pytest.approx(grad.double().norm().item(), rel=1e-6)


def test_length_of_several_norms() -> None:
    assert optim.length([3.0, 4.0]) == 5.0
    assert optim.length([3e200, 4e200]) == pytest.approx(5e200)
    assert optim.length([3e-200, 4e-200]) == pytest.approx(5e-200)
    assert math.isnan(optim.length([1.0, math.nan])) and optim.length([]) == 0.0


def test_huge_gradients_are_clipped_to_norm_one() -> None:
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


def test_param_groups_set_the_learning_rate_of_every_layer() -> None:
    model = make_model(n_blocks=2)
    optimizer = OptimizerInBackward(model, OPTIMIZERS["SGD"])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.clone() for p in model.parameters()]
    optimizer.step(*make_batch(model, [9]))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
def test_step_with_grad_scale_equals_scaled_gradients(kind: str) -> None:
    start, grads = torch.randn(7, 5), [torch.randn(7, 5) for _ in range(3)]
    results = []
    for scaled_by_step in (True, False):
        p = torch.nn.Parameter(start.clone())
        optimizer = optim.maker(kind, 0.1, 0.01, (0.9, 0.99))([p])
        for grad in grads:
            p.grad = grad.clone() if scaled_by_step else 0.25 * grad
            optim.step(optimizer, 0.25 if scaled_by_step else 1.0)
        assert not hasattr(optimizer, "grad_scale")
        results.append(p.detach())
    assert torch.allclose(*results, atol=1e-6, rtol=0) and not torch.allclose(results[0], start)


def test_a_run_does_not_import_the_compiler_of_torch(tmp_path: Path) -> None:
    """Importing it takes two seconds and 50 MB."""
    code = (
        "import sys, handgrad as hg\n"
        "for kind in 'AdamW', 'muon':\n"
        "    hg.train(sys.argv[1], steps=2, out=sys.argv[2] + kind, quiet=True, n_blocks=1, optimizer=kind)\n"
        "    assert 'torch.optim' in sys.modules and 'torch._dynamo' not in sys.modules, kind"
    )
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be, that is the question. " * 40)
    subprocess.run([sys.executable, "-c", code, text, tmp_path / "run"], check=True)


def test_an_optimizer_made_here_can_be_used_by_others() -> None:
    """`step` and `zero_grad` of torch still work on it, and torch's own functions are left as they were."""
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    ours = optim.maker("AdamW", 0.1, 0.0, (0.9, 0.99))([p])
    theirs = torch.optim.AdamW([q], 0.1, (0.9, 0.99), weight_decay=0.0, fused=True)
    for _ in range(2):
        p.grad, q.grad = torch.full((2, 3), 0.5)
        optim.step(ours, 1.0)
        theirs.step()
    for copied in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert type(copied) is torch.optim.AdamW and str(copied.state_dict()) == str(ours.state_dict())
    ours.zero_grad()
    assert torch.equal(p, q) and p.grad is None
    ours.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(ours.param_groups) == 2


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_hooks_of_steps_are_run(inside: bool, ours: bool) -> None:
    """Those of an optimizer and those of all optimizers, whoever made it, also with clipping."""
    model, fired = make_model(dtype=torch.float32), []
    make = optim.maker("AdamW", 0.1, 0.0, (0.9, 0.9)) if ours else OPTIMIZERS["AdamW"]
    one = OptimizerInBackward(model, make, clip=1e-3) if inside else make(list(model.parameters()))
    optimizers = set(one.optimizers.values()) if isinstance(one, OptimizerInBackward) else {one}
    own = [
        handle
        for x in optimizers
        for handle in (
            x.register_step_pre_hook(lambda *_: fired.append("before")),
            x.register_step_post_hook(lambda *_: fired.append("after")),
        )
    ]
    everyone = [
        register_optimizer_step_pre_hook(lambda *_: fired.append("before any")),
        register_optimizer_step_post_hook(lambda *_: fired.append("after any")),
    ]
    tokens, targets = make_batch(model, [9])
    try:
        if isinstance(one, OptimizerInBackward):
            one.step(tokens, targets, [9])
        else:
            model.loss_and_grads(tokens, targets, [9])
            optim.step(one, 0.5)
    finally:
        for handle in (*own, *everyone):
            handle.remove()
    assert fired == ["before any", "before", "after", "after any"] * len(optimizers)


def test_a_step_that_a_class_or_a_scheduler_wraps_is_the_one_that_runs() -> None:
    class Counting(torch.optim.SGD):
        steps = 0

        @wraps(torch.optim.SGD.step)
        def step(self, closure: None = None) -> None:
            self.steps += 1
            super().step()

    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = Counting([p], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optim.step(optimizer, 1.0)
    assert optimizer.steps == 1 and optimizer._opt_called  # type: ignore[attr-defined]
    assert torch.allclose(p, torch.full((3,), 0.9))


def test_optimizers_of_one_kind_share_a_class() -> None:
    one, two = (optim.maker("AdamW", 0.1, 0.0, (0.9, 0.9))([nn.Parameter(torch.ones(2))]) for _ in range(2))
    assert type(one) is type(two) and isinstance(one, torch.optim.AdamW)


def test_examples_without_gradients_update_nothing() -> None:
    model = make_model()
    tokens, targets = make_batch(model, [9, 4])
    before = [p.clone() for p in model.parameters()]
    optimizer = OptimizerInBackward(model, lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(hg.HandgradError, match=r"give ExampleNorms\(grads=True\)"):
        optimizer.step(tokens, targets, [9, 4], examples=ExampleNorms())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.step(tokens, targets, [9, 4], examples=ExampleNorms(grads=True))
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("examples", [True, False])
def test_clipping_measures_the_masks_that_update(examples: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on the head's adapter: the rows come in groups, which are others if examples are measured."""
    monkeypatch.setattr("handgrad.model.passes.readout.LOGITS_AT_ONCE", 5 * 11)
    lengths = [9, 4, 3]
    model = make_model(n_context=16, tied=False)
    hg.lora.inject(model, 2, targets="lm_head", dropout=0.5)
    perturb(model)
    tokens, targets = make_batch(model, lengths, ignored=0.2)
    updated: list[torch.Tensor] = []

    class Watching(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            updated.extend(p.grad.clone() for group in self.param_groups for p in group["params"])

    optimizer = OptimizerInBackward(model, lambda p: Watching(p, lr=0.1), clip=1e9)
    norms = ExampleNorms(grads=True) if examples else None
    loss = optimizer.step(tokens, targets, lengths, seed=3, examples=norms)
    used = torch.cat([x.flatten() for x in updated])
    assert optimizer.norm == pytest.approx(used.norm().item(), rel=1e-12)
    assert loss == pytest.approx(model.loss_and_grads(tokens, targets, lengths, seed=3), rel=1e-12)
    plain = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    assert used.norm().item() == pytest.approx(plain.norm().item(), rel=1e-12)


def share_by_hand(model: hg.GPT) -> hg.GPT:
    """A matrix in two blocks, and a gain in three."""
    first, second, third = model.blocks
    third.mlp.contract.plain().weight = first.mlp.contract.plain().weight
    second.norm_1.weight = third.norm_1.weight = first.norm_1.weight
    return model


def test_a_parameter_shared_by_blocks_is_announced_when_it_is_final() -> None:
    model = share_by_hand(make_model(n_blocks=3))
    tokens, targets = make_batch(model, LENGTHS)
    found: dict[torch.nn.Parameter, torch.Tensor] = {}

    def finished(layer: list[torch.nn.Parameter]) -> None:
        for p in layer:
            assert p not in found, "announced twice"
            found[p] = p.grad.clone()

    model.loss_and_grads(tokens, targets, LENGTHS, finished=finished)
    assert set(found) == set(model.parameters())
    for p, grad in found.items():
        assert torch.equal(grad, p.grad)
    with pytest.raises(hg.HandgradError, match="blocks share a parameter"):
        model.loss_and_grads(tokens, targets, LENGTHS, examples=ExampleNorms())


@pytest.mark.parametrize("clip", [None, 0.05])
def test_optimizer_in_backward_updates_a_shared_parameter_once(clip: float | None) -> None:
    one, two = (share_by_hand(make_model(n_blocks=3)) for _ in range(2))
    train_with_separate_step(one, OPTIMIZERS["AdamW"], clip, steps=2)
    optimizer = OptimizerInBackward(two, OPTIMIZERS["AdamW"], clip)
    for step in range(2):
        tokens, targets = make_batch(two, LENGTHS, seed=step, ignored=0.5)
        optimizer.step(tokens, targets, LENGTHS)
    for (key, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert relative_error(q, p) <= 1e-10, key


def test_parameters_of_a_mapped_file_are_aligned() -> None:
    storage = torch.randn(100, dtype=torch.float64)
    offset = torch.nn.Parameter(storage[1:33].view(4, 8))
    aligned = torch.nn.Parameter(torch.randn(3))
    before, address = offset.detach().clone(), aligned.data_ptr()
    align([offset, aligned])
    assert offset.data_ptr() % 64 == 0 and torch.equal(offset, before) and aligned.data_ptr() == address
