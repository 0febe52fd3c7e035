"""Faults of positions, orders and rows that an audit names: in attention, in the gradients of weights, in DoRA."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from audited import Make, adapted, batch, model_of, rotating, with_forward
from test_audit import in_block_1, only_backward, wrong_linear
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gpt2 import modeling_gpt2

import handgrad as hg
from handgrad.model.block import Block
from handgrad.model.steps import Step

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about DoRA


WrongRows = wrong_linear(lambda a, delta: delta.t() @ a.roll(1, 0))  # its input from the row before


def with_wrong_rows(layer: Any, right: Any, a: Tensor) -> Any:
    return WrongRows.apply(a, layer.weight)


def rotate_keys_late(right: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    turned = right(q, k, cos, sin)
    once = cos[:, 1:2].expand_as(cos), sin[:, 1:2].expand_as(sin)  # as far as from one position to the next
    return turned[0], right(q, turned[1], *once)[1]


def exchanged(change: Callable[..., tuple[Tensor, ...]]) -> Make:
    def make(patch: pytest.MonkeyPatch) -> Any:
        in_block_1(patch, modeling_gpt2, lambda right, layer, q, k, v, mask, scale, more:
                   right(layer, *change(q, k, v), mask, scaling=scale, **more))  # fmt: skip
        return model_of("gpt2")

    return make


def exchanged_in_backward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return q, only_backward(k, v), only_backward(v, k)


def without_sequence_2(layer: Any, right: Any, a: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 0.0, 1.0])[:, None, None]
    product, frozen = a @ layer.weight, a @ layer.weight.detach()
    return weight * product + (1 - weight) * frozen + layer.bias


def norms_with_gradient(patch: pytest.MonkeyPatch) -> Any:
    model = adapted(model_of("llama"), "llama", use_dora=True)
    layer = model.base_model.model.model.layers[1].self_attn.v_proj
    dora = layer.lora_magnitude_vector["default"]

    def forward(x: Tensor, *, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any, **more: Any) -> Tensor:
        norms = (base_layer.weight + scaling * lora_B.weight @ lora_A.weight).norm(dim=1)
        ratio = dora.weight / norms
        return (ratio - 1) * F.linear(x, base_layer.weight) + ratio * scaling * lora_B(lora_A(x))

    dora.forward = forward
    return model


FAULTS: dict[str, tuple[Make, str, str]] = {
    # the model, the layer that must be named, and words of the sentence
    "late keys": (
        rotating(rotate_keys_late, blocks=(1,)), "model.layers.1.self_attn", "the keys' positions were one too large",
    ),
    "positions from 1": (
        with_forward("gpt2", "transformer.wpe", lambda table, right, at: right(at + 1)),
        "transformer.wte", "positions were counted from 1",
    ),
    "q and k exchanged": (
        exchanged(lambda q, k, v: (k, q, v)), "transformer.h.1.attn", "if q and k were exchanged",
    ),
    "signals of k and v exchanged": (
        exchanged(exchanged_in_backward), "transformer.h.1.attn.c_attn", "the error signals of k and v were exchanged",
    ),
    "wrong rows": (
        with_forward("llama", "model.layers.1.mlp.down_proj", with_wrong_rows),
        "model.layers.1.mlp.down_proj", "its input were that of the previous row",
    ),
    "wrong rows of the head": (
        with_forward("gpt2", "lm_head", with_wrong_rows), "transformer.wte", "its input were that of the previous row",
    ),
    "a lost sequence": (
        with_forward("gpt2", "transformer.h.1.attn.c_attn", without_sequence_2),
        "transformer.h.1.attn.c_attn", "lacks the part of sequence 2 of 3",
    ),
    "norms with a gradient": (
        norms_with_gradient, "model.layers.1.self_attn.v_proj", "DoRA's column norms were differentiated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, layer, words = FAULTS[name]
    report = hg.audit(make(monkeypatch), batch(), setup=False)
    assert report.first is not None
    assert report.first.layer == layer and words in report.first.sentence(), report.first.sentence()


def test_resume_is_judged_by_finite_weights() -> None:
    """NaN equals NaN in no comparison: a step that breaks the weights leaves nothing to resume."""
    model = model_of("gpt2").half()
    found = {x.name: x for x in hg.audit(model, batch()).setup}["resume is exact"]
    assert found.passed and "bit for bit" in found.note, found
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight *= 2e5
    found = {x.name: x for x in hg.audit(model, batch()).setup}["resume is exact"]
    assert found.passed is None and "nothing to resume" in found.note, found


def test_a_step_that_the_audit_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Block.steps
    dummy = Step("mixing", "experts", ("a_10",), ("a_mixed",))
    monkeypatch.setattr(Block, "steps", lambda self: [*right(self), dummy])
    with pytest.raises(hg.HandgradError, match="the audit cannot read the step 'mixing'"):
        hg.audit(model_of("gpt2"), batch(), setup=False)


def test_the_names_of_a_package_and_of_a_function_do_not_meet() -> None:
    """A package `handgrad.audit` would hide the function of that name as soon as anything imports it."""
    for name in ("check", "audit", "verify", "trace", "generate", "attribute", "influence"):
        assert callable(getattr(hg, name)), name
