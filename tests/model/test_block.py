"""Blocks in other orders than the paper's, on the choices that families make: everything verify checks, code paths, and each
formula broken on purpose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import make_batch, perturb
from handgrad.families import FAMILIES
from handgrad.model.block import Branch, Path, Residual
from handgrad.model.config import ModelConfig
from handgrad.model.layers.linear import Embedding
from handgrad.model.layers.norms import RMSNorm
from handgrad.ops import layernorm, rmsnorm, rotary
from handgrad.ops.logits import LogitMap
from handgrad.ops.rope_scaling import Scaling
from handgrad.proof.oracles import relative_error

RMS = {"norm": "rms", "positions": "rotary", "rope_base": 50.0, "gated": True, "activation": "silu"}
NO_BIASES = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
PLAIN_RMS = {**RMS, **NO_BIASES}
# the choices of each form; sizes and the rest are random
FORMS: dict[str, dict[str, Any]] = {
    "norms on both sides": {
        "family": "gemma2", **PLAIN_RMS, "gain_offset": 1.0, "embedding_scale": 3.5, "score_cap": 2.0, "logit_cap": 1.5,
        "window": 3, "windowed": (0,),
    },
    "two tables, norms of heads": {
        "family": "gemma3_text", **PLAIN_RMS, "gain_offset": 1.0, "qk_norm": True, "window": 3, "windowed": (1,),
        "local_rope_base": 9.0, "embedding_scale": 2.0,
    },
    "norms after branches": {"family": "olmo2", **PLAIN_RMS, "qk_norm": True, "qk_norm_joint": True},
    "parallel, one norm": {
        "family": "cohere", **PLAIN_RMS, "norm": "layer", "norm_bias": False, "parallel": True, "rotary_neighbors": True,
        "logit_scale": 0.4,
    },
    "parallel, two norms": {
        "family": "gpt_neox", "positions": "rotary", "rope_base": 50.0, "parallel": True, "qkv_by_head": True,
        "rotary_width": 2, "tied": False,
    },
    "multipliers": {
        "family": "granite", **PLAIN_RMS, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 0.7,
        "attention_scale": 0.3,
    },
    "multipliers, no rotation": {"residual_scale": 1.7, "logit_cap": 2.0, "logit_scale": 1.3, "embedding_scale": 0.5},
    "parallel with multipliers": {
        "family": "cohere", **PLAIN_RMS, "parallel": True, "residual_scale": 0.6, "embedding_scale": 2.0, "logit_cap": 3.0,
        "rotary_neighbors": True, "rotary_width": 2,
    },
    "one norm before, a gain 1 + w": {"family": "gemma", **PLAIN_RMS, "gain_offset": 1.0, "embedding_scale": 2.0},
    "a LayerNorm of gain 1 + w": {
        "family": "nemotron", **PLAIN_RMS, "norm": "layer", "gated": False, "activation": "relu2", "gain_offset": 1.0,
    },
    "longrope": {
        "family": "phi3", **PLAIN_RMS, "rotary_width": 2,
        "rope_scaling": Scaling("longrope", 2.0, 8, short_factor=(1.5,), long_factor=(4.0,)),
    },
}  # fmt: skip
LENGTHS = [9, 1, 4]


def model_of(form: str, seed: int = 0, n_blocks: int = 2, **more: Any) -> hg.GPT:
    """A model of random odd sizes with this form, its norms not 1 and its biases not 0."""
    generator = torch.Generator().manual_seed(seed)

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    heads, width = size(2, 3), 4
    chosen = {"n_blocks": n_blocks, **FORMS[form], **more}
    shared = "qkv_by_head" not in chosen and FAMILIES[chosen.get("family", "gpt2")].stored == "out_in"
    config = ModelConfig(
        n_vocab=size(7, 13), n_context=16, d_model=heads * width, n_heads=heads, d_hidden=size(5, 9), eps=1e-3,
        **({"n_kv_heads": 1} if shared else {}), **chosen,
    )  # fmt: skip
    model = hg.GPT(config, seed=seed, dtype=torch.float64)
    perturb(model, seed)
    return model


def gradients(model: hg.GPT, batch: tuple[Tensor, Tensor], **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model.loss_and_grads(*batch, LENGTHS, **options)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    largest = max(x.abs().max().item() for x in expected.values())
    for name, x in expected.items():
        assert relative_error(found[name], x, floor=1e-4 * largest) <= 1e-10, name


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.some_cases(8)
def test_everything_verify_checks(form: str, seed: int) -> None:
    model = model_of(form, seed)
    lengths = [7, 1, 4]  # within the context after which longrope has other frequencies, also for keys in a cache
    report = hg.verify(model, *make_batch(model, lengths, seed), lengths)
    assert report.passed, [(c.id, c.error, c.note) for c in report.failed]
    ids = {c.id for c in report}
    assert {f"blocks.0.{name}" for step in model.blocks[0].steps() for name in step.outputs} <= ids
    assert {name for name, _ in model.named_parameters()} <= ids


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.some_cases(3)
def test_code_paths_give_the_same_gradients(form: str) -> None:
    model = model_of(form, 2)
    tokens, targets = make_batch(model, LENGTHS, ignored=0.0)
    few = torch.full_like(targets, -100)  # in the last block only rows with a target are computed
    few[[3, 12]] = targets[[3, 12]]
    for batch in ((tokens, targets), (tokens, few)):
        trace = hg.trace(model, *batch, LENGTHS)  # computes every row
        expected = gradients(model, batch)
        for options in ({"recompute": "blocks"}, {"tokens_at_once": 9}):
            assert_equal(gradients(model, batch, **options), expected)
        assert trace.loss == pytest.approx(model.loss_and_grads(*batch, LENGTHS), rel=1e-12)
    alone = []
    for t, y in zip(tokens.split(LENGTHS), few.split(LENGTHS), strict=True):
        if (y != -100).any():
            model.zero_grad()
            model.loss_and_grads(t, y)
            alone.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert_equal({n: sum(g[n] for g in alone) / len(alone) for n in alone[0]}, gradients(model, (tokens, few)))  # type: ignore[misc]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.some_cases(3)
def test_an_edit_of_every_activation_is_an_added_constant(form: str) -> None:
    """The loss moves as Δ of the edited tensor says, also where only some forms have it: a_4_norm, a_9_norm, skip_10."""
    model = model_of(form, 4)
    batch = make_batch(model, [6])
    plain = hg.trace(model, *batch, edit={})
    steps = model.blocks[0].steps()
    for name in [*(n for step in steps for n in step.outputs), *(step.name for step in steps if step.kind == "add")]:
        delta = plain[f"blocks.0.delta_{name.removeprefix('a_')}"]
        direction = torch.randn(delta.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        losses = [
            hg.trace(model, *batch, edit={f"blocks.0.{name}": lambda x, by=s * direction: x + by}).loss  # type: ignore[misc]
            for s in (1e-5, -1e-5)
        ]
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx((delta * direction).sum().item(), rel=1e-5, abs=1e-8), (
            name
        )


def test_generation_beside_longer_sequences() -> None:
    """Every sequence of a step has the frequencies of its own length."""
    model = model_of("longrope")
    prompts = [[1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5], [6, 5, 4]]
    both = hg.generate(model, prompts, max_new_tokens=3)
    alone = [hg.generate(model, [prompt], max_new_tokens=3)[0] for prompt in prompts]
    assert [list(map(int, x)) for x in both] == [list(map(int, x)) for x in alone]
    assert int(alone[0][0]) == model.logits(torch.tensor([prompts[0]]))[0, -1].argmax().item()


# ── broken formulas ─────────────────────────────────────────────────────────────────────────────────────────────────


def unscaled(self: Residual, *given: Any, **options: Any) -> Tensor:
    return RESIDUAL_BACKWARD(self._replace(scale=1.0), *given, **options)


def past_the_norm(self: Branch, delta: Tensor, saved: Any, a: Any, run: Any) -> Tensor | None:
    return self.layers.backward(
        run.at(f"delta_{self.output[2:]}", run.at(f"delta_{self.added[2:]}", delta)), saved.layers, a, run
    )


def one_branch(self: Path, delta: Tensor, saved: Any, run: Any, needed: bool) -> Tensor | None:
    if len(self.branches) == 1:
        return PATH_BACKWARD(self, delta, saved, run, needed)
    return PATH_BACKWARD(
        self._replace(branches=self.branches[:1]), delta, saved._replace(branches=saved.branches[:1]), run, needed
    )


def swapped_norms(self: Residual, delta: Tensor, saved: Any, run: Any, needed: bool = True) -> Tensor:
    first, second = self.paths
    paths = first._replace(norm=second.norm), second._replace(norm=first.norm)
    return RESIDUAL_BACKWARD(self._replace(paths=paths), delta, saved, run, needed)


def ungained(self: RMSNorm, delta: Tensor, a_bar: Tensor, saved: Any, run: Any = None) -> Tensor:
    self.weight.grad = rmsnorm.grad_w(delta, a_bar, self.weight.grad)
    return rmsnorm.backward(delta, a_bar, saved.inv_rms, self.weight)


def unscaled_embedding(self: Embedding, *given: Any, **options: Any) -> Any:
    scale, self.scale = self.scale, 1.0
    try:
        return EMBEDDING(self, *given, **options)
    finally:
        self.scale = scale


def whole(x: Tensor, cos: Tensor, sin: Tensor, into: Tensor | None = None, neighbors: bool = False) -> Tensor:
    return ROTARY(x, cos, sin, into, not neighbors)


RESIDUAL_BACKWARD, PATH_BACKWARD = Residual.backward, Path.backward
EMBEDDING, ROTARY = Embedding.backward, rotary.backward
BREAKS: dict[str, tuple[str, object, str, Callable[..., Any]]] = {
    "a multiplier of branches forgotten": ("multipliers", Residual, "backward", unscaled),
    "a norm after the branch skipped": ("norms on both sides", Branch, "backward", past_the_norm),
    "the only norm skipped": ("norms after branches", Branch, "backward", past_the_norm),
    "one parallel branch of two": ("parallel, one norm", Path, "backward", one_branch),
    "the norms of two branches swapped": ("parallel, two norms", Residual, "backward", swapped_norms),
    "a weight for the gain": ("one norm before, a gain 1 + w", RMSNorm, "backward", ungained),
    "a multiplier of embeddings forgotten": ("multipliers", Embedding, "backward", unscaled_embedding),
    "the cap of logits not in Δ": ("norms on both sides", LogitMap, "backward", lambda self, delta, y: delta),
    "the scale of logits not in Δ": ("parallel, one norm", LogitMap, "backward", lambda self, delta, y: delta),
    "the other planes in the backward pass": ("parallel, one norm", rotary, "backward", whole),
    "a LayerNorm that does not subtract the mean": (
        "parallel, one norm", layernorm, "backward", rmsnorm.backward,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.some_cases(6)
def test_a_broken_formula_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, where, attribute, broken = BREAKS[name]
    model = model_of(form)
    batch = make_batch(model, [7, 3])
    monkeypatch.setattr(where, attribute, broken)
    report = hg.verify(model, *batch, [7, 3])
    assert report.failed and any(c.id in dict(model.named_parameters()) for c in report.failed)


def test_a_scale_forgotten_in_both_passes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward agree with each other, and finite differences with both: only the reference knows better."""
    model = model_of("multipliers")
    batch = make_batch(model, [7, 3])
    forward = Residual.forward
    monkeypatch.setattr(Residual, "backward", unscaled)
    monkeypatch.setattr(Residual, "forward", lambda self, *given: forward(self._replace(scale=1.0), *given))
    failed = {c.id for c in hg.verify(model, *batch, [7, 3]).failed}
    assert {"blocks.0.a_5", "blocks.1.a_10"} <= failed
