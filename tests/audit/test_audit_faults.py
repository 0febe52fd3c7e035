"""Faults of scale, rotation, padding and gate that an audit names, and what it must not accuse."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from audited import Make, adapted, batch, function_of, model_of, rotating, with_forward
from test_audit import in_block_1
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

import handgrad as hg

pytestmark = pytest.mark.filterwarnings("ignore")


def scaled(scale: float) -> Make:
    def make(patch: pytest.MonkeyPatch) -> Any:
        model = model_of("llama", spread=0.3)
        model.model.layers[1].self_attn.scaling = scale
        return model

    return make


Turn = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotated(turn: Turn, turn_keys: Turn | None = None) -> Make:
    """Queries and keys turned by these functions of a tensor, cosine and sine; keys as the queries if there is one."""
    return rotating(
        lambda right, q, k, cos, sin: (
            turn(q, cos[:, None], sin[:, None]), (turn_keys or turn)(k, cos[:, None], sin[:, None])
        )
    )  # fmt: skip


def half(x: Tensor) -> Tensor:
    return modeling_llama.rotate_half(x)


def pairs(x: Tensor) -> Tensor:
    """(x_1, x_2, …) → (−x_2, x_1, …)"""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def neighbors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (y.chunk(2, -1)[0].repeat_interleave(2, -1) for y in (cos, sin))
    return x * cos + pairs(x) * sin


def forwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + half(x) * sin


def backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos - half(x) * sin


def without_padding_mask(patch: pytest.MonkeyPatch) -> Any:
    def causal(right: Any, layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, more: Any) -> Any:
        n = q.shape[2]
        later = torch.full((n, n), -math.inf).triu(1)[None, None]
        return right(layer, q, k, v, later, scaling=scale, **more)

    in_block_1(patch, modeling_llama, causal)
    return model_of("llama", spread=0.3)


# SiLU whose derivative is σ(x), without x σ′(x)
Half = function_of(F.silu, lambda delta, x: delta * torch.sigmoid(x))


def without_up(delta: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The error signals of silu(gate) · up; that of the gate lacks the factor up."""
    s = torch.sigmoid(gate)
    return delta * s * (1 + gate * (1 - s)), delta * F.silu(gate)


def feed_forward(compute: Callable[[Tensor, Tensor], Any]) -> Make:
    return with_forward(
        "llama", MLP, lambda mlp, right, x: mlp.down_proj(compute(mlp.gate_proj(x), mlp.up_proj(x))), spread=0.3
    )


FIRST, ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.1.mlp"
FAULTS: dict[str, tuple[Make, str, str]] = {
    "scale 0.4": (scaled(0.4), ATTENTION, "if the scores were multiplied by 0.4, not by 1/√d_head = 0.5"),
    "scale 1.5": (scaled(1.5), ATTENTION, "if the scores were multiplied by 1.5, not by 1/√d_head = 0.5"),
    "sine": (rotated(backwards), FIRST, "if the sine of the rotation had the wrong sign"),
    "sine of the queries": (rotated(backwards, forwards), FIRST, "if the queries were rotated backwards"),
    "neighbors": (rotated(neighbors), FIRST, "if neighboring features were rotated"),
    "neighbors, angles of the halves": (
        rotated(lambda x, cos, sin: x * cos + pairs(x) * sin), FIRST,
        "if neighboring features were rotated by the angles of the two halves",
    ),
    "padding mask": (without_padding_mask, ATTENTION, "if padding were visible"),
    "padding mask, without positions": (without_padding_mask, ATTENTION, "if padding were visible"),
    "a term of the gate": (
        with_forward("llama", f"{MLP}.act_fn", lambda act, right, x: Half.apply(x), spread=0.3),
        MLP, "lacks the term x σ′(x) of the derivative g′ = σ(x) + x σ′(x)",
    ),
    "a factor of the gate": (
        feed_forward(function_of(lambda gate, up: F.silu(gate) * up, without_up).apply),
        MLP, "if the factor up were missing",
    ),
    "no activation": (feed_forward(lambda gate, up: gate * up), MLP, "if the gate had no activation function"),
    "no up": (feed_forward(lambda gate, up: F.silu(gate)), MLP, "if the factor up were missing"),
    "no gate": (feed_forward(lambda gate, up: up), MLP, "if the gate were missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, layer, words = FAULTS[name]
    made = batch(left=True)
    if name.endswith("without positions"):
        del made["position_ids"]
    report = hg.audit(make(monkeypatch), made, setup=False)
    assert report.first is not None
    assert report.first.layer == layer and words in report.first.sentence(), report.first.sentence()


@pytest.mark.parametrize("tied", [True, False])
def test_the_row_of_padding_is_the_librarys_rule(tied: bool) -> None:
    """nn.Embedding gives the row of its padding_idx no gradient, also where the token is no padding."""
    made = batch()
    pad = int(made["input_ids"][0, 2])
    model = model_of("llama", tie_word_embeddings=tied, pad_token_id=pad)
    assert model.model.embed_tokens.padding_idx == pad
    report = hg.audit(model, made, setup=False)
    assert report.passed, str(report)
    assert any(f"token {pad} is the padding_idx of the embedding" in note for note in report.notes)
    assert not any("padding_idx" in note for note in hg.audit(model_of("llama"), made, setup=False).notes)
    model.model.embed_tokens.weight.register_hook(lambda grad: grad * 1.01)  # the other rows are still judged
    assert not hg.audit(model, made, setup=False).passed


def test_a_base_weight_that_trains_beside_an_adapter() -> None:
    model = adapted(model_of("llama"), "llama")
    base = model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight
    for trains in (True, False):
        base.requires_grad_(trains)
        report = hg.audit(model, batch())
        found = {x.name: x for x in report.setup}["frozen weights receive none"]
        assert found.passed is not trains and report.passed is not trains
        assert not report.wrong  # its gradient is right; that it has one is the mistake
        if trains:
            assert "layers.1.mlp.up_proj.base_layer.weight trains" in found.note and "modules_to_save" in found.note
