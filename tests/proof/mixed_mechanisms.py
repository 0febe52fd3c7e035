"""Models with mechanisms that only some families have, and wrong formulas of these in mixed precision: experts, short
convolutions, capped scores, sinks, partial rotation and its scalings. Those that fail at different places share a pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from wrong_formulas import Wrong, after, before, frequencies_with

from handgrad.families import FAMILIES
from handgrad.inference.conv_state import ConvState
from handgrad.kernels import calls
from handgrad.model.layers import short_conv as conv_layer
from handgrad.model.layers.linear import Linear
from handgrad.model.layers.mlp import MLP
from handgrad.model.layers.short_conv import ShortConv
from handgrad.ops import attention, experts, linear, rotary, short_conv
from handgrad.ops.rope_scaling import Scaling
from handgrad.ops.routing import Routing


def member(family: str, **changes: Any) -> dict[str, Any]:
    return {"family": family, **FAMILIES[family].fixed, **changes}


MIXTURE = {"n_experts": 4, "experts_per_token": 2, "d_expert": 16}
MECHANISMS: dict[str, dict[str, Any]] = {
    "mixtral": member("mixtral", **MIXTURE, balance_loss=0.5, z_loss=0.25),
    "olmoe": member("olmoe", **MIXTURE, normalized_gates=False, n_kv_heads=4),
    "qwen2_moe": member("qwen2_moe", **MIXTURE, d_shared=16),
    "gpt_oss": member("gpt_oss", **MIXTURE),
    "dots1": member(
        "dots1", **MIXTURE, expert_groups=2, groups_per_token=1, gate_scale=2.5, d_shared=16, n_kv_heads=4
    ),
    "lfm2": member("lfm2", conv_blocks=(0,), conv_bias=True, n_blocks=2),
    "gemma2": member("gemma2", attention_scale=0.3, score_cap=0.3, embedding_scale=5.0),
    "partial": member("stablelm", rotary_width=4),
    "longrope": {"family": "phi3", "rope_scaling": Scaling(
        "longrope", factor=4.0, original_max_position_embeddings=16, short_factor=(1.0, 1.5, 2.0, 3.0),
        long_factor=(2.0, 3.0, 4.0, 5.0))},
    "dynamic": {"rope_scaling": Scaling("dynamic", factor=3.0)},
}  # fmt: skip


class Group(NamedTuple):
    """Wrong formulas that are made at once."""

    model: str
    wrong: tuple[Wrong, ...]
    places: dict[str, set[str]]  # what fails of each

    @property
    def all_places(self) -> set[str]:
        return set().union(*self.places.values())


# ── experts ─────────────────────────────────────────────────────────────────────────────────────────────────────────

GATED, ACCUMULATE = MLP.backward_gated, Linear.accumulate


def routed(name: str, **changes: Any) -> Wrong:
    """A function with another routing."""

    def change(*given: Any) -> tuple[Any, ...]:
        return tuple(x._replace(**changes) if isinstance(x, Routing) else x for x in given)

    return before(experts, name, change)


def normalized_without_product(delta_g: Tensor, s: Tensor, chosen: Tensor, r: Routing) -> Tensor:
    g = torch.softmax(s.float().gather(1, chosen), 1)
    return torch.zeros_like(s.float()).scatter_(1, chosen, g * delta_g).to(s.dtype)


def all_of_delta_9(self: MLP, delta_9: Tensor, own: Any, a: Any, run: Any, gate: Any = None) -> Any:
    return GATED(self, delta_9, own, a, run, None if gate is None else torch.ones_like(gate))


def contraction_without_gate(self: MLP, delta_9: Tensor, own: Any, a: Any, run: Any, gate: Any = None) -> Any:
    def accumulate(layer: Linear, delta: Tensor, *given: Any) -> None:
        ACCUMULATE(layer, delta_9 if layer is self.contract else delta, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "accumulate", accumulate)
        return GATED(self, delta_9, own, a, run, gate)


def gates_with(change: Callable[..., Tensor]) -> Wrong:
    """Δ_g of an expert becomes change(Δ_g, expert, Δ_9, gates)."""

    def backward(self: MLP, delta_9: Tensor, own: Any, a: Any, run: Any, gate: Any = None) -> Any:
        signal, delta_g = GATED(self, delta_9, own, a, run, gate)
        return signal, None if gate is None else change(delta_g, self, delta_9, gate)

    return MLP, "backward_gated", backward


def of_experts(where: str, names: tuple[str, ...]) -> set[str]:
    return {f"{where}.experts.{e}.{name}.weight" for e in range(MIXTURE["n_experts"]) for name in names}


ALL_OF_MIXTRAL = of_experts("block_sparse_moe", ("w1", "w2", "w3"))
OTHER_EXPERTS = {"a_gates", "a_experts", "delta_6", "delta_scores"}
EXPERTS = [
    Group("mixtral", (before(experts, "choose", lambda s, *x: (-s, *x)),), {
        "experts by their smallest scores": OTHER_EXPERTS | ALL_OF_MIXTRAL,
    }),
    Group("mixtral", (
        after(experts, "gates", lambda g, *_: g.softmax(1)), (experts, "backward", normalized_without_product),
        (MLP, "backward_gated", contraction_without_gate),
    ), {
        "a softmax of the gates": {"a_gates"},
        "normalized gates without ⟨g, Δ_g⟩": {"delta_scores"},
        "an expert's gradient without its gate": of_experts("block_sparse_moe", ("w2",)),
    }),
    Group("mixtral", (
        routed("gates", normalized=False), after(experts, "delta_balance", lambda y, s, *_: y / s.shape[1]),
        (MLP, "backward_gated", all_of_delta_9),
    ), {
        "gates that are not normalized": {"a_gates"},
        "a balance loss of all layers' rows without E": {"delta_scores"},
        "an expert with all of Δ_9": {"delta_6"} | ALL_OF_MIXTRAL,
    }),
    Group("mixtral", (after(experts, "delta_z_loss", lambda y, s, *_: y / torch.logsumexp(s, 1, keepdim=True)),), {
        "a z-loss without lse": {"delta_scores"},
    }),
    Group("olmoe", (routed("gates", normalized=True), routed("backward", normalized=True)), {
        "gates of the softmax, normalized": {"a_gates"},
        "a softmax whose others get nothing": {"delta_scores"},
    }),
    Group("dots1", (routed("choose", kept=2),), {
        "groups that do not matter": OTHER_EXPERTS | of_experts("mlp", ("gate_proj", "up_proj", "down_proj")),
    }),
    Group("dots1", (routed("backward", scale=1.0),), {"a sigmoid without τ": {"delta_scores"}}),
    Group("qwen2_moe", (gates_with(
        lambda delta_g, mlp, delta, sigma: delta_g / (sigma * (1 - sigma)) if mlp.output == "a_shared" else delta_g
    ),), {"a shared expert with its gate's slope forgotten": {"delta_shared_gate"}}),
]  # fmt: skip


# ── short convolutions ──────────────────────────────────────────────────────────────────────────────────────────────

CONV, CONV_BACKWARD = short_conv.forward, ShortConv.backward


def wrapping_around(z: Tensor, weight: Tensor, b: Tensor, borders: Any) -> Tensor:
    taps = weight[:, 0].flip(1).t()
    return (sum(w * z.float().roll(j, 0) for j, w in enumerate(taps)) + b).to(z.dtype)


def products_without_their_second_factor(self: ShortConv, delta_4: Tensor, saved: Any, a_2: Any, run: Any) -> Any:
    """Δ_c, Δ_B, Δ_C and Δ_x"""
    computed = saved.computed or self._compute(saved.gates, run._replace(observer=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_layer, "product", lambda x, y, dtype: x.to(dtype))
        return CONV_BACKWARD(self, delta_4, saved._replace(computed=computed), a_2, run)


def one_row_less(rows: Tensor, *_: Any) -> None:
    rows[:1] = 0


CONVOLUTIONS = [
    Group("lfm2", (
        before(short_conv, "forward", lambda z, w, *x: (z, w.flip(2), *x)),
        (short_conv, "backward", lambda delta, w, borders: CONV(delta, w, None, borders)),
        (ShortConv, "backward", products_without_their_second_factor),
        before(short_conv, "grad_w", lambda delta, z, *x: (z, delta, *x)),
        before(linear, "grad_b", lambda delta, *x: (delta / len(delta), *x)),
    ), {
        "a convolution with its taps reversed": {"a_conv"},
        "an error signal that goes forward": {"delta_z"},
        "an output gate that passes Δ_y": {"delta_conv"},
        "an output gate with the error of its input": {"delta_C"},
        "an input gate with its own value": {"delta_x"},
        "a convolution's B with the error of z": {"delta_B"},
        "taps with the tokens after": {"conv.conv.weight"},
        "a bias of the convolution's mean": {f"conv.{x}.bias" for x in ("conv", "in_proj", "out_proj")},
    }),
    Group("lfm2", ((short_conv, "forward", wrapping_around),), {"a convolution that wraps around": {"a_conv"}}),
    Group("lfm2", (before(short_conv, "forward", lambda z, w, b, borders: (z, w, None, borders)),), {
        "a convolution without its bias": {"a_conv"},
    }),
    Group("lfm2", (after(ConvState, "extend", one_row_less),), {"a state with one row less": {
        f"log-probabilities, {x}" for x in ("one token at a time", "prompts in parts")
    }}),
]  # fmt: skip


# ── scores and positions ────────────────────────────────────────────────────────────────────────────────────────────


def undivided(found: tuple[list[float], list[int]], *_: Any) -> None:
    """c tanh(s): a kernel divides by c what it multiplies by the scale."""
    shape, cap = found[0], MECHANISMS["gemma2"]["score_cap"]
    assert shape[9:11] == [MECHANISMS["gemma2"]["attention_scale"], cap]
    shape[9] *= cap


ROTATE = rotary._rotate


def last_features(x: Tensor, cos: Tensor, sin: Tensor, sign: int, into: Tensor | None, neighbors: bool) -> Tensor:
    if x.shape[-1] == 2 * cos.shape[1]:
        return ROTATE(x, cos, sin, sign, into, neighbors)
    found = ROTATE(x.flip(2).contiguous(), cos, sin, sign, None, neighbors).flip(2)
    return found if into is None else into.copy_(found)


def delta_whole(x: Tensor, cos: Tensor, sin: Tensor, sign: int, into: Tensor | None, neighbors: bool) -> Tensor:
    if sign < 0:
        count = x.shape[-1] // (2 * cos.shape[1])
        cos, sin = (table.repeat(1, count).contiguous() for table in (cos, sin))
    return ROTATE(x, cos, sin, sign, into, neighbors)


ERRORS = {"delta_x_q", "delta_x_k"}
ROTATED, SEEN = {"q", "k", *ERRORS}, {"a_3", "delta_v", *ERRORS}
SCORES = [
    Group("gemma2", (before(attention, "forward", lambda q, k, v, spans, scores, *x: (
        q, k, v, spans, scores._replace(scale=1.0), *x
    )),), {"a scale of 1": SEEN}),
    Group("gemma2", (after(calls, "_attention", undivided),), {"a cap that divides by nothing": SEEN}),
    Group("gemma2", (
        (attention, "_backward_by_kernel", lambda *_: False), after(attention, "rho_tile", lambda y, *_: (y[0], None)),
    ), {"a cap without a slope": ERRORS}),
    Group("gpt_oss", (
        before(attention, "forward", lambda *x: (*x[:5], torch.full_like(x[5], -60.0))),
        gates_with(lambda delta_g, mlp, delta, _: delta_g - delta @ mlp.contract.bias),
    ), {
        "a sink that takes nothing": SEEN | {"self_attn.sinks"},
        "a router that forgets the bias of its experts": {"delta_gates"},
    }),
    Group("gpt_oss", (after(attention, "sink_signals", lambda y, *_: -y),), {
        "a sink with the sign of a key": {"self_attn.sinks"},
    }),
]  # fmt: skip
POSITIONS = [
    Group("partial", ((rotary, "_rotate", last_features),), {
        "the last features rotated instead of the first": ROTATED,
    }),
    Group("partial", ((rotary, "_rotate", delta_whole),), {"a Δ rotated whole": ERRORS}),
    Group("longrope", (after(rotary, "frequencies", lambda y, d_rho, base, scaling, *_: (
        y[0] * y[0].new_tensor(scaling.short_factor) ** 2, y[1]
    )),), {"factors of longrope that multiply": ROTATED}),
    Group("longrope", (frequencies_with(_longrope_factor=lambda scaling, n: rotary._attention_factor(scaling)),), {
        "longrope with yarn's attention factor": ROTATED,
    }),
    Group("dynamic", (before(rotary, "frequencies", lambda d_rho, base, scaling, *x: (
        d_rho, base / scaling.factor, scaling, *x
    )),), {"a dynamic base that shrinks within the context": ROTATED}),
]  # fmt: skip

SHARED = [*EXPERTS, *CONVOLUTIONS, *SCORES, *POSITIONS]
