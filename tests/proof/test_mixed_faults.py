"""Wrong formulas in mixed precision: those with which the ledger's checks are tested, made in what training runs, and others
that are as small as what is rounded. Exactly the checks of the broken step fail."""

import math
import re
import runpy
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from mixed_mechanisms import MECHANISMS, SHARED, Group
from torch import Tensor
from wrong_formulas import Wrong, after, before, frequencies_with

import handgrad as hg
from conftest import make_batch, perturb
from handgrad.inference.kv_cache import BlockCache
from handgrad.kernels import calls, library
from handgrad.lora.layer import LoRA
from handgrad.model.gpt import Work
from handgrad.model.layers.linear import Linear
from handgrad.model.layers.norms import Norm
from handgrad.model.passes.example_gradients import ExampleGradients, ExamplePairs
from handgrad.model.passes.objective import MEAN_LOSS, MeanLoss
from handgrad.ops import (
    activation,
    attention,
    embedding,
    gated,
    layernorm,
    linear,
    lora,
    loss,
    per_example,
    rmsnorm,
    rotary,
)
from handgrad.ops.rope_scaling import Scaling
from handgrad.proof.check_report import Result, run_check
from handgrad.proof.mixed import mixed_paths
from handgrad.proof.paths import Batch
from handgrad.proof.reference_model import ReferenceModel
from handgrad.proof.wide_layers import in_one_dtype, shared_copy

pytestmark = pytest.mark.skipif(
    library.why_not(torch.bfloat16) is not None, reason="LEFT OUT: this machine does not multiply bfloat16"
)
ROOT = Path(__file__).parents[2]
LENGTHS = [10, 1, 7]  # more rows than products that round nothing
SHAPE = {"n_vocab": 37, "n_context": 16, "d_model": 32, "n_heads": 4, "n_blocks": 1}
LLAMA = {"n_kv_heads": 2, "d_hidden": 48}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("nano", {}),
    "relu2": ("nano", {"activation": "relu2"}),
    "LoRA": ("nano", {}),
    "DoRA": ("nano", {}),
    "llama": ("nano-llama", LLAMA),
    "qwen3": ("nano-llama", {**LLAMA, "family": "qwen3", "qk_norm": True}),
    "mistral": ("nano-llama", {**LLAMA, "family": "mistral", "window": 4}),
    "linear": ("nano-llama", {**LLAMA, "rope_scaling": Scaling("linear", factor=2.0)}),
    "llama3": ("nano-llama", {**LLAMA, "rope_base": 40.0, "rope_scaling": Scaling(
        "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)}),
    "yarn": ("nano-llama", {**LLAMA, "rope_base": 40.0, "rope_scaling": Scaling(
        "yarn", factor=4.0, original_max_position_embeddings=16)}),
} | {name: ("nano-llama", LLAMA | changes) for name, changes in MECHANISMS.items()}  # fmt: skip


@cache
def model_of(kind: str) -> hg.GPT:
    preset, changes = MODELS[kind]
    model = hg.GPT(hg.preset(preset, **SHAPE | changes), seed=3)
    perturb(model, scale=0.05)  # biases and gains that are not 0 and 1
    if kind in ("LoRA", "DoRA"):
        hg.lora.inject(model, 2, 3.0, targets="all-linear", dora=kind == "DoRA")
        perturb(model, seed=2, scale=0.1)
    model.precision = "mixed"
    return model


def failed(kind: str) -> list[Result]:
    """The checks in mixed precision that fail, of the first section in which any does."""
    model = model_of(kind)
    batch = Batch(*make_batch(model, LENGTHS), LENGTHS, MEAN_LOSS)
    reference = ReferenceModel(in_one_dtype(shared_copy(model)), *batch)
    found: list[Result] = []
    for x in mixed_paths(shared_copy(model), batch, reference, seed=0):
        if found and x.section != found[-1].section:
            break
        check = run_check(x.id, x.section, "", x.statement, x.oracle, x.limit, x.measure)
        found += [] if check.passed else [check]
    return found


def places(checks: list[Result]) -> set[str]:
    """Their tensors, without the name of the block, or code paths."""
    names = (c.id.removesuffix(", its step").removesuffix(", mixed") for c in checks)
    return {re.sub(r"^(blocks|transformer\.h|model\.layers)\.\d+\.", "", name) for name in names}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.some_cases(3)
def test_right_formulas_pass(kind: str) -> None:
    assert [(c.id, c.error, c.tolerance, c.note) for c in failed(kind)] == []


# ── wrong formulas ──────────────────────────────────────────────────────────────────────────────────────────────────


def printed_mask(s: calls.Sequences, _: Any, q: Tensor, k: Tensor, v: Tensor, sinks: None, *out: Tensor) -> None:
    """Scores of 0 instead of −∞ where a query must not see a key."""
    for first, end, start, stop in s.rows.tolist():
        queries, keys, values = (x.float().transpose(0, 1) for x in (q[start:stop], k[first:end], v[first:end]))
        keys, values = (x.repeat_interleave(len(queries) // len(x), 0) for x in (keys, values))
        scores = (queries @ keys.mT / math.sqrt(q.shape[2])).tril()
        out[0][start:stop] = (scores.softmax(2) @ values).transpose(0, 1)
        out[1][start:stop] = scores.logsumexp(2).T


def without_scale(found: tuple[list[float], list[int]], *_: Any) -> None:
    shape = found[0]  # of a kernel of attention: … d_ρ, d_h, scale, cap, causal, window
    assert shape[9] == shape[7] ** -0.5
    shape[9] = 1.0


def heads_in_turn(*given: Any) -> None:
    """Head i reads key head i % 2 instead of i // 2."""
    *first, q, k, v, sinks, a, lse = given
    order, out = [0, 2, 1, 3], (torch.empty_like(a), torch.empty_like(lse))
    FORWARD(*first, q[:, order], k, v, sinks, *out)
    a.copy_(out[0][:, order])
    lse.copy_(out[1][:, order])


def keys_of_the_first_group(
    _: None, delta: Tensor, saved: attention.Saved, spans: Any, into: Any, scores: calls.Scores
) -> None:
    lengths = tuple(x.length for x in spans)
    raw = attention.maps(delta, saved, lengths, scores)[2]
    into[0].copy_((raw @ saved.k[:, 0].float()).transpose(0, 1))


def every_row_has_a_target(work: Work, *_: Any) -> Work:
    pieces = []
    for piece in work.pieces:
        targets = torch.zeros_like(piece.ids).index_copy_(0, piece.rows, piece.targets)
        pieces.append(piece._replace(rows=torch.arange(len(targets)), targets=targets))
    return work._replace(pieces=pieces)


def mean_of_examples(self: MeanLoss, logits: Tensor, at: Any, weight: float) -> tuple[Tensor, Tensor]:
    """The mean of the examples' means, instead of the mean over all targets."""
    example = torch.repeat_interleave(torch.tensor(LENGTHS))[at.rows]
    counts = torch.bincount(example)
    factor = len(at.rows) / (counts[example] * (counts > 0).sum())
    losses = torch.nn.functional.cross_entropy(logits, at.targets, reduction="none")
    return (losses * factor).sum(), LOSS(logits, at.targets, weight)[1] * factor[:, None]


def accumulate_but_the_head(self: Linear, delta: Tensor, a: Tensor, run: Any) -> None:
    if delta.shape[1] != SHAPE["n_vocab"]:
        ACCUMULATE(self, delta, a, run)


def adapter_path_only(
    self: LoRA, delta: Tensor, run: Any, into: Any = None, upstream: Any = None, dtype: Any = None
) -> Any:
    out = torch.zeros(len(delta), self.down.shape[0]) if into is None else into
    lora.backward((upstream or self.upstream(delta, run)).h.to(out.dtype), self.down, into=out)
    return out if dtype is None else out.to(dtype)


def wrong_sign(delta: Tensor, a_bar: Tensor, inv_sigma: Tensor, w: Tensor) -> Tensor:
    g = delta * w
    return (g - g.mean(1, keepdim=True) + a_bar * (g * a_bar).mean(1, keepdim=True)) * inv_sigma


def centered(delta: Tensor, a_bar: Tensor, inv: Tensor, w: Tensor) -> Tensor:
    g = delta * w
    return (g - g.mean(-1, keepdim=True) - a_bar * (g * a_bar).mean(-1, keepdim=True)) * inv


def eps_outside(a: Tensor, w: Tensor, eps: float, dtype: Any = None) -> tuple[Tensor, rmsnorm.Saved]:
    inv = 1 / (a.square().mean(-1, keepdim=True).sqrt() + eps)
    return (a * inv * w).to(dtype or a.dtype), rmsnorm.Saved(a, inv)


def over_all_heads(a: Tensor, w: Tensor, eps: float, dtype: Any = None) -> tuple[Tensor, rmsnorm.Saved]:
    if a.ndim == 2:
        return RMS_FORWARD(a, w, eps, dtype)
    inv = a.square().mean((1, 2), keepdim=True).add(eps).rsqrt().expand(*a.shape[:2], 1).contiguous()
    return a * inv * w, rmsnorm.Saved(a, inv)


def of_the_first_head(delta: Tensor, a_bar: Tensor, inv: Tensor, w: Tensor) -> Tensor:
    if delta.ndim == 2:
        return RMS_BACKWARD(delta, a_bar, inv, w)
    return RMS_BACKWARD(delta, a_bar[:, :1].expand_as(a_bar).contiguous(), inv[:, :1].expand_as(inv).contiguous(), w)


def reflection(x: Tensor, cos: Tensor, sin: Tensor, sign: int, into: Tensor | None, neighbors: bool) -> Tensor:
    x_i, x_j = x.float().chunk(2, 2)
    c, s = cos[:, None], sin[:, None]
    found = torch.cat([x_i * c + x_j * s, x_i * s - x_j * c], 2)
    return found.to(x.dtype) if into is None else into.copy_(found)


def neighboring_planes(x: Tensor, cos: Tensor, sin: Tensor, sign: int, into: Tensor | None, neighbors: bool) -> Tensor:
    x_i, x_j = x.float()[..., 0::2], x.float()[..., 1::2]
    c, s = cos[:, None], sign * sin[:, None]
    found = torch.stack([x_i * c - x_j * s, x_j * c + x_i * s], 3).flatten(2)
    return found.to(x.dtype) if into is None else into.copy_(found)


def gate_without(part: str) -> Wrong:
    def backward(delta: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        d_gate, d_up, a_8 = GATED_BACKWARD(delta, gate, up, name)
        x, u, sigma = gate.float(), up.float(), gate.float().sigmoid()
        if part == "the slope's second term":
            d_gate = (delta * u * sigma).bfloat16()
        elif part == "x":
            d_up, a_8 = (delta * sigma).bfloat16(), (sigma * u).bfloat16()
        elif part == "up":
            d_gate = (delta * (sigma + x * sigma * (1 - sigma))).bfloat16()
        else:
            d_up = delta.bfloat16()
        return d_gate, d_up, a_8

    return gated, "backward", backward


def examples_with(name: str, value: Callable[[LoRA], Any]) -> Wrong:
    """Adapters measure examples with another attribute."""

    def measure(self: LoRA, *given: Any) -> None:
        right = self.__dict__.get(name)
        setattr(self, name, value(self))
        MEASURE(self, *given)
        delattr(self, name) if right is None else setattr(self, name, right)

    return LoRA, "_measure", measure


def gains_without_a_bar(self: Norm, examples: Any, delta: Tensor, a_bar: Tensor) -> None:
    MEASURE_NORM(self, examples, delta, torch.ones_like(a_bar))


def batch_scale(_: None, self: ExampleGradients, *given: Any) -> None:
    self.scale = (self.scale > 0).double()


def overwriting(delta: Tensor, ids: Tensor, w: Tensor, into: Tensor | None) -> Tensor:
    found = torch.zeros_like(w).index_copy_(0, ids, delta)
    return found if into is None else into.add_(found)


def changed_heads(*heads: tuple[int, slice, float]) -> Wrong:
    """Error signals of q (0), k (1) or v (2) from attention, some heads multiplied by a factor."""

    def change(_: None, *given: Any) -> None:
        for i, which, factor in heads:
            given[-1][i][:, which].mul_(factor)

    return after(calls, "backward_attention", change)


FORWARD, LOSS, ACCUMULATE = calls.forward_attention, loss.forward_and_delta, Linear.accumulate_weight
RMS_FORWARD, RMS_BACKWARD = rmsnorm.forward, rmsnorm.backward
GATED_BACKWARD, MEASURE, MEASURE_NORM = gated.backward, LoRA._measure, Norm._measure
YARN_SHARE = rotary._yarn_share


class Fault(NamedTuple):
    model: str
    wrong: tuple[Wrong, ...]
    places: set[str]  # what fails


NORMS = {"delta_1", "delta_5", "delta_10"}
HEADS, TURNED = ({"a_3", f"delta_{x}q", f"delta_{x}k", "delta_v"} for x in ("", "x_"))
ROTATED = {"q", "k", "delta_x_q", "delta_x_k"}
RMS_GAINS = {"input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"}
UPS = {f"{x}.up" for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
LINEAR = {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight", "transformer.wte.weight"}
EXAMPLES, MEASURED = {"norms and products of examples"}, "gradients, with norms of examples"

LEDGER: dict[str, Fault] = {
    "the mask as printed": Fault("gpt2", ((calls, "forward_attention", printed_mask),), HEADS),
    "a missing 1/√d_ρ": Fault("gpt2", (after(calls, "_attention", without_scale),), HEADS),
    "a missing 1/√d_ρ in the cache": Fault(
        "gpt2", (before(BlockCache, "attend", lambda self, q, *x: (self, q * math.sqrt(q.shape[2]), *x)),),
        {f"log-probabilities, {x}" for x in ("prompts at once", "prompts in parts", "one token at a time")},
    ),
    "a dropped softmax correction": Fault(
        "gpt2", (before(calls, "backward_attention", lambda *x: (*x[:6], torch.zeros_like(x[6]), *x[7:])),),
        {"delta_q", "delta_k"},
    ),
    "a wrong sign in LayerNorm": Fault("gpt2", ((layernorm, "backward", wrong_sign),), NORMS),
    "a loss on the last row": Fault("gpt2", (after(hg.GPT, "prepare", every_row_has_a_target),), {"loss", "delta_12"}),
    "a missing tied contribution": Fault(
        "gpt2", ((Linear, "accumulate_weight", accumulate_but_the_head),), {"transformer.wte.weight"},
    ),
    "a blocked frozen path": Fault(
        "LoRA", ((LoRA, "backward", adapter_path_only),), {"delta_2", "delta_3", "delta_6", "delta_8"},
    ),
    "a dropped scale": Fault(
        "LoRA", (before(lora, "grad_u", lambda delta, h, *x: (delta, h / 1.5, *x)),), UPS,
    ),
    "a wrong activation slope": Fault(
        "gpt2", (after(activation, "backward", lambda y, d, x, name: ((d * (x > 0)).to(x.dtype), y[1])),), {"delta_7"},
    ),
    "a squared ReLU without its 2": Fault(
        "relu2", (after(activation, "backward", lambda y, *_: (y[0] / 2, y[1])),), {"delta_7"},
    ),
    "a squared ReLU without its square": Fault(
        "relu2", (after(activation, "forward", lambda y, x, name: x.relu()),), {"a_8"},
    ),
    "an RMSNorm with ε outside the root": Fault("llama", ((rmsnorm, "forward", eps_outside),), {
        "a_2", "a_6", "a_11", *NORMS, *RMS_GAINS,
    }),
    "an RMSNorm without its gain": Fault(
        "llama", (before(rmsnorm, "forward", lambda a, w, *x: (a, torch.ones_like(w), *x)),),
        {"a_2", "a_6", "a_11"},
    ),
    "an RMSNorm with LayerNorm's backward pass": Fault("llama", ((rmsnorm, "backward", centered),), NORMS),
    "a mean instead of a sum in RMSNorm": Fault(
        "llama", (before(rmsnorm, "grad_w", lambda d, *x: (d / len(d), *x)),), RMS_GAINS,
    ),
    "a q/k norm over all heads together": Fault("qwen3", ((rmsnorm, "forward", over_all_heads),), {
        "q", "k", "delta_x_q", "delta_x_k", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    }),
    "a q/k norm with the statistics of one head": Fault(
        "qwen3", ((rmsnorm, "backward", of_the_first_head),), {"delta_x_q", "delta_x_k"},
    ),
    "a q/k gradient of one head": Fault(
        "qwen3", (before(rmsnorm, "grad_w", lambda d, a, *x: (
            (d, a, *x) if d.ndim == 2 else (d[:, :1].contiguous(), a[:, :1].contiguous(), *x)
        )),), {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
    ),
    "a mean instead of a sum": Fault(
        "gpt2", (before(linear, "grad_b", lambda d, *x: (d / len(d), *x)),),
        {"attn.c_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias"},
    ),
    "a rotation forward in the backward pass": Fault(
        "llama", ((rotary, "backward", rotary.forward),), {"delta_x_q", "delta_x_k"},
    ),
    "a reflection instead of a rotation": Fault("llama", ((rotary, "_rotate", reflection),), ROTATED),
    "the planes of the other form": Fault("llama", ((rotary, "_rotate", neighboring_planes),), ROTATED),
    "the square of the position": Fault("llama", (before(rotary, "angles", lambda t, *x: (t**2, *x)),), ROTATED),
    "a rotation without its attention factor": Fault(
        "yarn", (before(rotary, "angles", lambda t, theta, m: (t, theta)),), ROTATED,
    ),
    "frequencies without the 2": Fault("llama", (after(rotary, "frequencies", lambda y, *_: (y[0].sqrt(), y[1])),), ROTATED),
    "a factor that multiplies": Fault("linear", (after(rotary, "frequencies", lambda y, *_: (y[0] * 4, y[1])),), ROTATED),
    "llama3 without its ramp": Fault("llama3", (frequencies_with(_llama3_share=lambda theta, x, n: (
        (n * theta / (2 * math.pi) > x.high_freq_factor).float()
    )),), ROTATED),
    "yarn with its ramp reversed": Fault(
        "yarn", (frequencies_with(_yarn_share=lambda *x: YARN_SHARE(*x).flip(0)),), ROTATED,
    ),
    "yarn without its attention factor": Fault("yarn", (frequencies_with(_attention_factor=lambda x: 1.0),), ROTATED),
    "a SiLU slope without its second term": Fault("llama", (gate_without("the slope's second term"),), {"delta_gate"}),
    "a SiLU without its x": Fault("llama", (
        gate_without("x"), after(gated, "forward", lambda y, gate, up, name: (gate.float().sigmoid() * up).bfloat16()),
    ), {"a_8", "delta_up"}),
    "a gate on the wrong branch": Fault(
        "llama", (before(gated, "forward", lambda gate, up, name: (up, gate, name)),), {"a_8"},
    ),
    "a gate that forgets up": Fault("llama", (gate_without("up"),), {"delta_gate"}),
    "a gate that passes Δ_8 to up": Fault("llama", (gate_without("g"),), {"delta_up"}),
    "one branch of two": Fault("llama", (before(linear, "backward", lambda d, w, into, *x: (
        (d, w, into, *x) if into is None else (0 * d, w, into, *x)
    )),), {"delta_2", "delta_6"}),
    "key heads assigned in turn": Fault("llama", ((calls, "forward_attention", heads_in_turn),), TURNED),
    "the keys of the first group for all": Fault(
        "llama", (after(attention, "backward", lambda y, *x: keys_of_the_first_group(y, *x[:5])),), {"delta_x_q"},
    ),
    "a shared key with the error signal of one head": Fault(
        "llama", (changed_heads((1, slice(0, None, 2), 0.0), (2, slice(0, None, 2), 0.0)),), {"delta_x_k", "delta_v"},
    ),
    "a mean over the group": Fault(
        "llama", (changed_heads((1, slice(None), 0.5), (2, slice(None), 0.5)),), {"delta_x_k", "delta_v"},
    ),
    "a missing 1/√d_ρ in a group": Fault("llama", (after(calls, "_attention", without_scale),), TURNED),
    "a window with one key more": Fault("mistral", (before(calls, "_attention", lambda s, scores, *x: (
        s, scores._replace(window=scores.window + 1), *x
    )),), TURNED),
    "a batch that averages examples": Fault(
        "gpt2", ((MeanLoss, "forward_and_delta", mean_of_examples),), {"loss", "delta_12"},
    ),
    "an example with the batch's number of targets": Fault(
        "gpt2", (after(ExampleGradients, "begin", batch_scale),), EXAMPLES,
    ),
    "products of examples without Δ": Fault(
        "gpt2", (before(per_example, "products", lambda a, d, *x: (a, torch.ones_like(d), *x)),), EXAMPLES,
    ),
    "a bias of the mean over tokens": Fault("gpt2", (before(ExamplePairs, "sums", lambda self, p, x, rows: (
        self, p, x / torch.tensor(rows.lengths).repeat_interleave(torch.tensor(rows.lengths))[:, None], rows
    )),), EXAMPLES),
    "a gain without ā": Fault("gpt2", ((Norm, "_measure", gains_without_a_bar),), {MEASURED}),
    "a tied matrix without its cross terms": Fault(
        "gpt2", tuple(after(per_example, x, lambda y, *_: 0 * y) for x in ("table_head", "table_head_products")), EXAMPLES,
    ),
    "a magnitude without 1/c": Fault(
        "DoRA", (examples_with("column_norms", lambda self: lambda *_: torch.ones_like(self.magnitude)),),
        {*EXAMPLES, MEASURED},
    ),
    "adapter products with one scale": Fault(
        "LoRA", (examples_with("scale", lambda self: math.sqrt(self.scale)),), {*EXAMPLES, MEASURED},
    ),
    "a given gradient transposed": Fault(
        "gpt2", (before(per_example, "products_with", lambda a, d, *x: (a, torch.ones_like(d), *x)),), EXAMPLES,
    ),
    "an overwriting scatter": Fault(
        "gpt2", ((embedding, "grad_w", overwriting),), {"transformer.wte.weight", "transformer.wpe.weight"},
    ),
}  # fmt: skip
NOT_IN_A_MODEL = {"the permutation in the other direction": "weights are permuted while they are read from a file"}
# Breaks of these modules' formulas are made in float64 alone: mechanisms that no model of this file has, or other objectives
NOT_MADE = {"gated": 2, "blocks": 5, "rmsnorm": 3, "embedding": 2, "logits": 3, "layernorm": 1, "preference": 18}


# As small as what is rounded, or in one place of many.
SIGNALS = {"delta_11", "delta_8", "delta_6", "delta_3", "delta_2"}  # of the inputs of linear layers
HIDDEN: dict[str, Fault] = {
    "1.02 times Δ wᵗ": Fault("gpt2", (after(linear, "backward", lambda y, *_: y.mul_(1.02)),), SIGNALS),
    "1.02 times ∂w": Fault(
        "gpt2", (after(Linear, "accumulate_weight", lambda y, self, *_: (self.weight.grad.mul_(1.02), None)[1]),), LINEAR,
    ),
    "1.02 times what is stored in bfloat16": Fault("gpt2", (after(activation, "forward", lambda y, *_: y * 1.02),), {"a_8"}),
    "1.02 times Δ_k": Fault("gpt2", (changed_heads((1, slice(None), 1.02)),), {"delta_k"}),
    "1.05 times an adapter's h": Fault(
        "LoRA", (after(lora, "project", lambda y, *_: y * 1.05),), {"q", "k", "v", "a_4", "a_7", "a_9", *UPS},
    ),
    "one row of Δ wᵗ": Fault("gpt2", (after(linear, "backward", lambda y, *_: (y[5].mul_(0.9), None)[1]),), SIGNALS),
    "∂w without its last token": Fault(
        "gpt2", (before(linear, "grad_w", lambda d, a, *x: (d[:-1], a[:-1], *x)),), LINEAR,
    ),
    "Δ_v of one head of four": Fault("gpt2", (changed_heads((2, slice(3, 4), 0.0)),), {"delta_v"}),
    "a bias that is not added": Fault(
        "gpt2", (before(linear, "forward", lambda a, w, b, *x: (a, w, None, *x)),), {"q", "k", "v", "a_4", "a_7", "a_9"},
    ),
    "DoRA's Δ without m/c": Fault(
        "DoRA", (after(LoRA, "upstream", lambda y, self, delta, *_: y._replace(z=delta)),),
        {"delta_2", "delta_3", "delta_6", "delta_8", *UPS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*LEDGER, *HIDDEN])
@pytest.mark.some_cases(8)
def test_a_wrong_formula_fails_at_its_own_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = LEDGER.get(name) or HIDDEN[name]
    for owner, attribute, wrong in fault.wrong:
        monkeypatch.setattr(owner, attribute, wrong)
    assert places(failed(fault.model)) == fault.places


@pytest.mark.parametrize("group", SHARED, ids=lambda group: ", ".join(group.places))
def test_wrong_formulas_of_a_mechanism(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass, because a step is checked from what it read: each fails where it is."""
    for owner, attribute, wrong in group.wrong:
        monkeypatch.setattr(owner, attribute, wrong)
    assert sum(map(len, group.places.values())) == len(group.all_places), "a place belongs to one of them"
    assert places(failed(group.model)) == group.all_places


def test_how_many_of_the_ledgers_wrong_formulas_fail_in_mixed_precision() -> None:
    ledger = runpy.run_path(str(ROOT / "tests" / "ledger" / "test_ledger.py"))["BREAKS"]
    made = {*LEDGER, *(name for group in SHARED for name in group.places)}
    not_made = [name for name in ledger if name not in made and name not in NOT_IN_A_MODEL]
    assert Counter(ledger[name][0].__name__.rpartition(".")[2] for name in not_made) == NOT_MADE
    assert made | {*NOT_IN_A_MODEL} <= {*ledger}
    figure = f"{len(made)} of {len(ledger)}"
    print(f"wrong formulas of the ledger that fail in mixed precision: {figure}; not:", *NOT_IN_A_MODEL.items())
    assert f"{figure} fail in mixed precision" in (ROOT / "docs" / "proven.md").read_text()
