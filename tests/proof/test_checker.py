"""A block at a time, a model has the same checks and results as a whole, and both find a fault."""

from typing import Any

import pytest
import torch

import handgrad as hg
from conftest import make_batch, perturb
from handgrad.model.layers.norms import RMSNorm
from handgrad.model.passes.objective import MEAN_LOSS, Objective
from handgrad.ops import linear
from handgrad.proof import wide_layers
from handgrad.proof.checker import Checker
from handgrad.proof.wide_layers import float64_copy, shared_copy
from handgrad.tolerances import TOLERANCE

LLAMA: dict[str, Any] = {"preset": "nano-llama", "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "d_hidden": 20}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2, a bias at the head": {"logits_bias": True, "tied": False},
    "llama": LLAMA,
    "qwen3": {**LLAMA, "family": "qwen3", "qk_norm": True, "tied": False},
    "lfm2": {**LLAMA, "family": "lfm2", "qk_norm": True, "conv_blocks": (0,), "conv_bias": True},
    "adapters": {"adapters": "all-linear"},
    "adapters, of the head as well": {"adapters": ("c_attn", "lm_head")},
    "an adapter of the head": {**LLAMA, "adapters": "lm_head"},
}


def make(name: str, dtype: torch.dtype = torch.float32) -> tuple[hg.GPT, torch.Tensor, torch.Tensor]:
    shape = {"n_vocab": 11, "n_context": 16, "d_model": 12, "n_heads": 3, "n_blocks": 2, **MODELS[name]}
    adapters = shape.pop("adapters", "")
    model = hg.GPT(hg.preset(shape.pop("preset", "nano"), **shape), seed=0, dtype=dtype)
    if adapters:
        hg.lora.inject(model, 2, targets=adapters, dora=True)
    perturb(model)
    tokens, targets = make_batch(model, [9])
    return model.eval(), tokens, targets


@pytest.mark.parametrize("objective", [MEAN_LOSS, hg.LogitDifference(7, 3, 5)], ids=["mean", "difference"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some_cases(3)
def test_every_name_is_checked_and_agrees(name: str, objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_layers, "ROWS_AT_ONCE", 4)
    model, tokens, targets = make(name)
    computed = hg.trace(model, tokens, targets, objective=objective)
    whole = Checker(float64_copy(model), tokens, targets, computed, objective=objective, dtype=model.dtype)
    parts = Checker(shared_copy(model), tokens, targets, computed, objective=objective)
    assert whole.whole and not parts.whole
    assert parts.errors.keys() == whole.errors.keys() and parts.rounding.keys() == whole.rounding.keys()
    assert max(parts.errors.values()) <= parts.limit, max(parts.errors, key=parts.errors.__getitem__)
    assert parts.rounding == pytest.approx(whole.rounding, rel=1e-6, abs=1e-9)
    assert parts.trained == whole.trained and parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert set(whole.ours) - {"a_12", "y_pred"} <= set(parts.ours)  # not kept: as large as the vocabulary
    for signal in ("blocks.0.delta_5", "blocks.1.delta_raw", "delta_11", "delta_12"):
        assert parts.difference(signal) <= parts.difference_limit
    inside = [name for name, p in model.named_parameters() if p.requires_grad and ".0." in name]
    if inside:
        assert parts.difference_of(inside) <= parts.difference_limit
    for x in parts.trained:
        assert torch.allclose(parts.gradient(x), whole.gradient(x), rtol=1e-9, atol=1e-12)
    assert whole.difference_of(list(whole.trained)) <= whole.difference_limit
    if "adapter" not in name:
        last = [n for n, p in model.named_parameters() if any(p is q for q in model.final_norm.parameters())]
        assert parts.difference_of(last) <= parts.difference_limit
    assert all(p.grad is None for p in model.parameters())


def test_a_fault_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, targets = make("llama")
    right = RMSNorm.backward

    def wrong(*given: Any) -> torch.Tensor:
        return right(*given) * 1.001

    monkeypatch.setattr(RMSNorm, "backward", wrong)
    errors = Checker(shared_copy(model), tokens, targets).errors
    assert errors["delta_11"] <= 1e-10 < errors["blocks.1.delta_10"] < errors["blocks.0.delta_1"]
    assert errors["blocks.0.a_5"] <= 1e-10


def test_a_wrong_gradient_of_the_head_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, targets = make("gpt2")
    right = linear.grad_w
    monkeypatch.setattr(linear, "grad_w", lambda *given: right(*given) * 1.001)
    errors = Checker(shared_copy(model), tokens, targets).errors
    assert errors["transformer.wte.weight"] > 1e-6 and errors["blocks.0.delta_1"] <= 1e-10


@pytest.mark.parametrize("copied", [float64_copy, shared_copy])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_limit_of_rounding_follows_from_the_numbers(
    name: str, copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the tolerance of the dtype is exceeded, the limit is what simulated rounding explains: a fault is above it."""
    model, tokens, targets = make(name)
    computed = dict(hg.trace(model, tokens, targets))
    assert set(Checker(copied(model), tokens, targets, computed, dtype=model.dtype).rounding_limits.values()) == {1e-4}
    monkeypatch.setitem(TOLERANCE, torch.float32, 1e-9)
    right = Checker(copied(model), tokens, targets, computed, dtype=model.dtype)
    assert all(right.rounding[x] <= right.rounding_limits[x] < 1e-4 for x in right.rounding)
    assert min(right.rounding.values()) > 1e-9  # so that the limits are not the tolerance
    computed["blocks.1.delta_3"] = computed["blocks.1.delta_3"] * 1.0002
    wrong = Checker(copied(model), tokens, targets, computed, dtype=model.dtype)
    failed = [x for x in wrong.rounding if wrong.rounding[x] > wrong.rounding_limits[x]]
    assert failed == ["blocks.1.delta_3"]
