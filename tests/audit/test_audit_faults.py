"""Faults that an audit names, of positions, orders, rows, scale, rotation, padding and gate, and what it must not accuse."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from audited import Make, adapted, attending, batch, function_of, model_of, only_backward, rotating, with_forward
from test_audit import wrong_linear
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

import handgrad as hg
from families.members import transformers_model
from handgrad.model.block import Block
from handgrad.model.steps import Step

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about DoRA


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


def without_padding_mask(right: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Any:
    n = q.shape[2]
    return right(q, k, v, torch.full((n, n), -math.inf).triu(1)[None, None], scale)


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


WrongRows = wrong_linear(lambda a, delta: delta.t() @ a.roll(1, 0))  # its input from the row before


def with_wrong_rows(layer: Any, right: Any, a: Tensor) -> Any:
    return WrongRows.apply(a, layer.weight)


def rotate_keys_late(right: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    turned = right(q, k, cos, sin)
    once = cos[:, 1:2].expand_as(cos), sin[:, 1:2].expand_as(sin)  # as far as from one position to the next
    return turned[0], right(q, turned[1], *once)[1]


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


FIRST, ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.1.self_attn", "model.layers.1.mlp"
Fault = tuple[Make, str, str]  # the model, the layer that must be named, and words of the sentence
FAULTS: dict[str, Fault] = {
    "late keys": (
        rotating(rotate_keys_late, blocks=(1,)), "model.layers.1.self_attn", "the keys' positions were one too large",
    ),
    "positions from 1": (
        with_forward("gpt2", "transformer.wpe", lambda table, right, at: right(at + 1)),
        "transformer.wte", "positions were counted from 1",
    ),
    "q and k exchanged": (
        attending("gpt2", lambda right, q, k, v, *rest: right(k, q, v, *rest)),
        "transformer.h.1.attn", "if q and k were exchanged",
    ),
    "signals of k and v exchanged": (
        attending(
            "gpt2", lambda right, q, k, v, *rest: right(q, only_backward(k, v), only_backward(v, k), *rest)
        ),
        "transformer.h.1.attn.c_attn", "the error signals of k and v were exchanged",
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
LEFT_PADDED: dict[str, Fault] = {
    "scale 0.4": (scaled(0.4), ATTENTION, "if the scores were multiplied by 0.4, not by 1/√d_head = 0.5"),
    "scale 1.5": (scaled(1.5), ATTENTION, "if the scores were multiplied by 1.5, not by 1/√d_head = 0.5"),
    "sine": (rotated(backwards), FIRST, "if the sine of the rotation had the wrong sign"),
    "sine of the queries": (rotated(backwards, forwards), FIRST, "if the queries were rotated backwards"),
    "neighbors": (rotated(neighbors), FIRST, "if neighboring features were rotated"),
    "neighbors, angles of the halves": (
        rotated(lambda x, cos, sin: x * cos + pairs(x) * sin), FIRST,
        "if neighboring features were rotated by the angles of the two halves",
    ),
    "padding mask": (
        attending("llama", without_padding_mask, spread=0.3), ATTENTION, "if padding were visible",
    ),
    "padding mask, without positions": (
        attending("llama", without_padding_mask, spread=0.3), ATTENTION, "if padding were visible",
    ),
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


@pytest.mark.parametrize("name", [*FAULTS, *LEFT_PADDED])
@pytest.mark.some_cases(6)
def test_faults_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, layer, words = {**FAULTS, **LEFT_PADDED}[name]
    made = batch(left=name in LEFT_PADDED)
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
    dummy = Step("mixing", "mixing", ("a_10",), ("a_mixed",))
    monkeypatch.setattr(Block, "steps", lambda self: [*right(self), dummy])
    with pytest.raises(hg.HandgradError, match="the audit cannot read the step 'mixing'"):
        hg.audit(model_of("gpt2"), batch(), setup=False)


def test_the_names_of_a_package_and_of_a_function_do_not_meet() -> None:
    """A package `handgrad.audit` would hide the function of that name as soon as anything imports it."""
    for name in ("check", "audit", "verify", "trace", "generate", "attribute", "influence"):
        assert callable(getattr(hg, name)), name


@pytest.mark.parametrize(
    ("name", "wrong", "cause"),
    [
        ("attn_logit_softcapping", None, "if the cap of the scores were left out"),
        ("scaling", 0.5, "if the scores were divided by √d_head"),
        ("scaling", 0.3, "if the scores were multiplied by 0.3, not by 0.378"),
    ],
)
@pytest.mark.some_cases(2)
def test_faults_of_capped_scores(name: str, wrong: float | None, cause: str) -> None:
    model = transformers_model("gemma2, 3 queries to a key")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    ids = torch.arange(18).view(2, 9) * 5 % model.config.vocab_size
    assert hg.audit(model, {"input_ids": ids, "labels": ids}).passed
    attn = model.model.layers[1].self_attn
    assert name != "scaling" or attn.head_dim == 4
    setattr(attn, name, wrong)
    found = str(hg.audit(model, {"input_ids": ids, "labels": ids}))
    assert "model.layers.1.self_attn is wrong" in found and cause in " ".join(found.split())
