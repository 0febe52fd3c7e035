"""Mixtures of experts in every mode of the model: examples, paths, experts without a token, edits, low bits, adapters."""

from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import make_batch, perturb
from handgrad.families import FAMILIES
from handgrad.model.layers.experts import SELECTION, Experts
from handgrad.model.passes.example_gradients import ExampleNorms, ExamplePairs, ExamplesAgainst
from handgrad.model.storage.quantize import quantize
from handgrad.optim import OptimizerInBackward

LENGTHS = [6, 1, 4]
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"n_experts": 9, "experts_per_token": 2},
    "qwen2_moe": {"n_experts": 5, "experts_per_token": 3, "normalized_gates": False, "d_shared": 6, "dense": (1,)},
    "dots1": {
        "n_experts": 6, "experts_per_token": 2, "expert_groups": 3, "groups_per_token": 2, "gate_scale": 2.5, "d_shared": 14,
        "dense": (0,), "n_kv_heads": 4,
    },
    "gpt_oss": {"n_experts": 4, "experts_per_token": 4},
}  # fmt: skip


def make(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[hg.GPT, Tensor, Tensor]:
    shape = {
        "n_vocab": 11,
        "n_context": 16,
        "d_model": 16,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_blocks": 2,
        "d_hidden": 20,
    }
    plain = {"qkv_bias": False, "out_bias": False, "mlp_bias": False, "norm": "rms", "activation": "silu"}
    fields = {**shape, **plain, **FAMILIES[family].fixed, **SHAPES[family], **changes}
    model = hg.GPT(hg.ModelConfig(family=family, **fields), seed=0, dtype=dtype)
    perturb(model)
    return model, *make_batch(model, LENGTHS)


def gradients(model: hg.GPT, tokens: Tensor, targets: Tensor, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model.loss_and_grads(tokens, targets, LENGTHS, **options)
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in found.values()), "an optimizer would leave a parameter out"
    return {name: grad.clone() for name, grad in found.items()}


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.some_cases(4)
def test_gradients_against_autograd_and_finite_differences(family: str) -> None:
    model, tokens, targets = make(family)
    report = hg.verify(model, tokens, targets, LENGTHS)
    assert report.passed, report.failed or report.missing


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("options", [{"recompute": "blocks"}, {"tokens_at_once": 3}], ids=str)
def test_other_paths(family: str, options: dict[str, Any]) -> None:
    model, *batch = make(family)
    expected, found = gradients(model, *batch), gradients(model, *batch, **options)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("family", SHAPES)
def test_gradients_of_examples(family: str) -> None:
    """Norms, products of all pairs and products with given gradients, of examples that use different experts"""
    model, tokens, targets = make(family)
    trained = [p for p in model.parameters() if p.requires_grad]
    single = []
    for ids, own in zip(tokens.split(LENGTHS), targets.split(LENGTHS), strict=True):
        model.zero_grad()
        if (own != -100).any():
            model.loss_and_grads(ids[None], own[None])
        single.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]))
    rows = torch.stack(single)
    given = {p: torch.randn(2, *p.shape, dtype=p.dtype) for p in trained}
    flat = torch.cat([q.flatten(1) for q in given.values()], 1)
    measured = norms, pairs, against = ExampleNorms(grads=True), ExamplePairs(), ExamplesAgainst(given)
    for options in ({}, {"tokens_at_once": 6}):
        for measure in measured:
            model.zero_grad()
            model.loss_and_grads(tokens, targets, LENGTHS, examples=measure, **options)
        torch.testing.assert_close(norms.result(), rows.norm(dim=1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(pairs.result(), rows @ rows.t(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(against.result(), rows @ flat.t(), rtol=1e-9, atol=1e-12)


def test_an_expert_without_a_token_has_the_gradient_0() -> None:
    model, *batch = make("mixtral", n_experts=40)
    found = gradients(model, *batch)
    idle = [name for name, grad in found.items() if "experts" in name and not grad.any()]
    assert len(idle) > 3 * 20
    hg.lora.inject(model, 2)
    assert all(grad is not None for grad in gradients(model, *batch).values())


def test_a_single_token() -> None:
    model, *_ = make("qwen2_moe")
    tokens = torch.tensor([[3]])
    assert model.loss_and_grads(tokens, torch.tensor([[5]])) == pytest.approx(model.loss(tokens, torch.tensor([[5]])))


@pytest.mark.parametrize("family", SHAPES)
def test_one_step_of_an_optimizer(family: str) -> None:
    """Inside the backward pass as after it; the bias that chooses experts stays."""
    (first, *batch), (second, *_) = make(family), make(family)
    gradients(first, *batch)
    torch.optim.AdamW([p for p in first.parameters() if p.requires_grad], lr=0.1).step()
    inside = OptimizerInBackward(second, lambda p: torch.optim.AdamW(p, lr=0.1))
    inside.step(*batch, LENGTHS)
    start = dict(make(family)[0].named_parameters())
    for (name, p), q in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-13)
        assert torch.equal(p, start[name]) == name.endswith(SELECTION)
    second.requires_grad_(True)
    assert all(p.requires_grad != name.endswith(SELECTION) for name, p in second.named_parameters())


@pytest.mark.parametrize("family", SHAPES)
def test_edits_of_scores_gates_and_outputs(family: str) -> None:
    """What uses a tensor uses the edited one, and its Δ passes the edit: against finite differences of the edited pass."""
    model, tokens, targets = make(family)
    i = next(i for i, block in enumerate(model.blocks) if isinstance(block.mlp, Experts))
    for name in ("a_scores", "a_gates", "a_experts"):
        edit = {f"blocks.{i}.{name}": lambda x: x + 0.3 * torch.ones_like(x).cumsum(-1)}
        run = hg.trace(model, tokens, targets, LENGTHS, edit=edit)
        plain = hg.trace(model, tokens, targets, LENGTHS)
        assert run.loss != plain.loss
        layer = f"{model.config.table.names['blocks']}.{i}.{model.config.table.names['mlp']}"
        router = model.get_submodule(f"{layer}.{model.config.table.names['mlp.router']}").weight
        direction = torch.randn_like(router)
        losses = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                router.add_(direction, alpha=step)
                losses.append(hg.trace(model, tokens, targets, LENGTHS, edit=edit).loss)
                router.sub_(direction, alpha=step)
        slope = (run[f"blocks.{i}.grad_w_router"] * direction.t()).sum().item()
        assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("bits", [4, 8])
def test_low_bits_and_generation(bits: int) -> None:
    model, *_ = make("qwen2_moe", torch.float32, d_model=32, d_hidden=64, d_expert=32, d_shared=64, n_context=64)
    tokens = torch.randint(11, (1, 9))
    before = model.logits(tokens)
    quantize(model, bits)
    assert (model.logits(tokens) - before).abs().max() < before.abs().max()
    model.rounds_activations = False
    written = hg.generate(model, tokens, max_new_tokens=8, temperature=0)
    for t in range(8):
        expected = model.logits(torch.cat([tokens, written[:, :t]], 1))[0, -1].argmax()
        assert written[0, t] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": None}, "needs both n_experts and experts_per_token"),
        ({"experts_per_token": 10}, "more than the 9 experts to choose from"),
        ({"router": "argmax"}, "unknown router 'argmax'"),
        ({"expert_groups": 3}, "groups are of a sigmoid router"),
        ({"gate_scale": 0}, "gate_scale must be a number above 0"),
        ({"dense": (0,)}, "no name for mlp.contract"),
        ({"d_shared": 4}, "no name for mlp.shared"),
        ({"n_experts": None, "experts_per_token": None}, "has experts only"),
    ],
)
def test_choices_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        make("mixtral", **changes)
