"""The ledger is complete, passes for new seeds, and detects mistakes: a broken formula fails exactly its own checks."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from handgrad.errors import HandgradError
from handgrad.ledger import CHECKS, run, select
from handgrad.ledger.check import BEYOND, SECTIONS, Check, RandomInputs
from handgrad.paper import (
    activation,
    attention,
    blocks,
    embedding,
    experts,
    gated,
    grouped_query,
    kv_cache,
    layernorm,
    linear,
    logits,
    lora,
    loss,
    per_example,
    preference,
    rmsnorm,
    rotary,
    scores,
    short_conv,
    transformer,
)

IDS = (Path(__file__).parent.parent / "data" / "ledger-ids.txt").read_text().split()
ERRATA = [f"R{i}" for i in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 36)]


SHARED = RandomInputs.shared
LARGEST_TOLERANCE = {"exact": 0.0, "op count": 0.0, "identity": 1e-12, "autograd": 1e-10, "Monte Carlo": 0.05}


def test_every_line_of_the_paper_has_exactly_one_check() -> None:
    assert len(IDS) == len(set(IDS)) == 205
    report = json.loads(run(0).to_json())
    of_the_paper = [c["id"] for c in report["checks"] if c["section"] != SECTIONS[BEYOND]]
    assert sorted(of_the_paper) == sorted([*IDS, *ERRATA])
    assert report["passed"] == len(report["checks"]) and report["failed"] == 0


def test_checks_beyond_the_paper_have_ids_of_their_own() -> None:
    """L-<layer>-<what>, at least forward and backward of each layer, counted apart from the paper's"""
    beyond = {c.id for c in CHECKS.values() if c.section == BEYOND}
    assert beyond == {id for id in CHECKS if id.startswith("L-")}
    assert not any(CHECKS[id].equation for id in beyond), "a check with an equation number is the paper's"
    for layer in {id.split("-")[1] for id in beyond}:
        assert {f"L-{layer}-fwd", f"L-{layer}-bwd"} <= beyond
    assert f": 1 of the paper, {len(beyond)} beyond it" in run(5, "E-act,L-*").title
    assert "beyond" not in run(5, "E-act").title


def test_an_activation_without_a_check_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "NAMES", (*activation.NAMES, "new"))
    assert [c.id for c in run(0, "E-act").failed] == ["E-act"]


def test_a_gate_without_a_check_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "NAMES", (*gated.NAMES, "new"))
    assert [c.id for c in run(0, "L-gate-*").failed] == ["L-gate-fwd"]


def test_every_check_has_a_statement_and_a_tolerance_of_its_oracle() -> None:
    for c in CHECKS.values():
        assert len(c.statement) >= 10, c.id
        assert 0 <= c.tolerance <= LARGEST_TOLERANCE[c.oracle], c.id


@pytest.mark.parametrize("seed", [1, 2, 3, 12345, 999_999])
@pytest.mark.some_cases(3)
def test_all_pass_for_new_seeds(seed: int) -> None:
    report = run(seed)
    assert report.passed, [(c.id, c.error, c.note) for c in report.failed]


def test_the_same_seed_gives_the_same_errors() -> None:
    first, second, other = (run(seed, "E-*") for seed in (7, 7, 8))
    assert [c.error for c in first] == [c.error for c in second]
    assert [c.error for c in first] != [c.error for c in other]


def test_a_check_does_not_depend_on_other_checks() -> None:
    assert run(3, "E-ln-dx")["E-ln-dx"].error == run(3)["E-ln-dx"].error


def test_selection() -> None:
    assert {c.id for c in select("T2-D*")} == {f"T2-D{i}" for i in range(1, 13)}
    assert {c.id for c in select("r1, e-ln-dx")} == {"R1", "E-ln-dx"}
    with pytest.raises(HandgradError, match="no check matches 'nonsense'"):
        select("nonsense")


# ── broken formulas ─────────────────────────────────────────────────────────────────────────────────────────────────

# An error propagates through the tables: every check after it in the order of computation fails, and none before it.
FORWARD = {f"T2-a{i}" for i in range(1, 13)} | {"T2-soft"}
BLOCK = "w1 b1 wq bq wk wv bv w3 b3 w5 b5 w6 b6 w8 b8"
BLOCK_GRADIENTS = {f"T3-{x}" for x in ("wtok", "wpos", *BLOCK.split())}
FROM_10 = {f"T2-D{i}" for i in range(1, 11)} | BLOCK_GRADIENTS  # Δ_10 and everything computed from it
FROM_11 = FROM_10 | {"T2-D11", "T3-w10", "T3-b10"}
FROM_12 = FROM_11 | {"T2-D12", "T3-w11", "T3-b11", "T3-d11", "T3-u11"}
EXPERTS = {f"L-moe-{what}" for what in ("fwd", "bwd", "router", "expert", "shared")}
RMS, QK = ({f"L-{layer}-{what}" for what in ("fwd", "bwd", "grad")} for layer in ("rms", "qknorm"))
ORDERS = {"L-post-fwd", "L-post-bwd", "L-post-grad", "L-parallel-fwd", "L-parallel-bwd", "L-branch-fwd", "L-branch-bwd"}
SCORES = {"E-draw", "E-dq", "E-dk", "E-dwq", "E-dwk", "E-dbq", "E-head-dx", "E-mha-dx", "P-mha-compose", "D-table1"}


def with_a_wrong_sign(delta: torch.Tensor, a_bar: torch.Tensor, sigma: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    g = delta * w
    return (g - g.mean(1, keepdim=True) + a_bar * (g * a_bar).mean(1, keepdim=True)) / sigma[:, None]


def embedding_part_only(
    delta_1: torch.Tensor, delta_12: torch.Tensor, f: transformer.Forward, p: transformer.Network
) -> torch.Tensor:
    return embedding.grad_w(delta_1, f.a_0, len(p.w_tok))


def adapter_path_only(delta_12: torch.Tensor, p: transformer.Network) -> torch.Tensor:
    return (
        linear.delta_prev(delta_12, transformer.head_weight(p))
        if p.adapter is None
        else lora.delta_prev(delta_12, *p.adapter)
    )


CHOOSE, DELTA_SIGMOID = experts.choose, experts.delta_sigmoid
DELTA_INPUT, DELTA_GATE = experts.delta_input, experts.delta_gate
DELTA_BALANCE, DELTA_Z = experts.delta_balance, experts.delta_z_loss
DELTA_CLAMPED, CLAMPED = gated.delta_clamped, gated.clamped
DELTA_PREFERENCE, ATTEND, PREFIX_SIGNALS = preference.delta_logits, preference.attend, preference.prefix_signals
DPO, DPO_C, IPO, IPO_C = preference.dpo, preference.dpo_c, preference.ipo, preference.ipo_c
SIMPO, SIMPO_C, ORPO_C = preference.simpo, preference.simpo_c, preference.orpo_c
KTO, KTO_C, KL, KL_C = preference.kto, preference.kto_c, preference.kl, preference.kl_c
Activation = Callable[[torch.Tensor, str], torch.Tensor]


def but_for(which: str, right: Activation, wrong: Callable[[torch.Tensor], torch.Tensor]) -> Activation:
    """`right`, but for one name."""
    return lambda x, name: wrong(x) if name == which else right(x, name)


with_relu2, with_silu = partial(but_for, "relu2"), partial(but_for, "silu")


def with_eps_outside(a: torch.Tensor, w: torch.Tensor, eps: float) -> rmsnorm.Forward:
    rms = (a * a).mean(1).sqrt() + eps
    a_bar = a / rms[:, None]
    return rmsnorm.Forward(rms, a_bar, a_bar * w)


def without_the_gain(right: Callable[..., rmsnorm.Forward]) -> Callable[..., rmsnorm.Forward]:
    return lambda a, w, eps: right(a, torch.ones_like(w), eps)


def from_the_first_head(
    deltas: Sequence[torch.Tensor], heads: Sequence[rmsnorm.Forward], w: torch.Tensor
) -> list[torch.Tensor]:
    return [rmsnorm.delta_prev(delta, heads[0].a_bar, heads[0].rms, w) for delta in deltas]


def over_all_heads(q: Sequence[torch.Tensor], w: torch.Tensor, eps: float) -> list[rmsnorm.Forward]:
    f = rmsnorm.forward(torch.cat(tuple(q), 1), w.repeat(len(q)), eps)
    return [rmsnorm.Forward(f.rms, *x) for x in zip(f.a_bar.chunk(len(q), 1), f.a.chunk(len(q), 1), strict=True)]


def reflection(angle: float) -> torch.Tensor:
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, s], [s, -c]], dtype=torch.float64)


def other_planes(d_rho: int, interleaved: bool) -> list[tuple[int, int]]:
    """The planes of the other form."""
    half = d_rho // 2
    return [(i, i + half) if interleaved else (2 * i, 2 * i + 1) for i in range(half)]


def with_a_power_of_the_position(
    x: torch.Tensor, positions: torch.Tensor, theta: torch.Tensor, interleaved: bool, factor: float = 1.0
) -> torch.Tensor:
    return torch.stack(
        [rotary.rotation(t**2, theta, interleaved) @ row for t, row in zip(positions.tolist(), x, strict=True)]
    )


def overwriting(delta: torch.Tensor, ids: torch.Tensor, n_rows: int) -> torch.Tensor:
    return delta.new_zeros(n_rows, delta.shape[1]).index_copy_(0, ids, delta)


def of_the_last_head(x: Sequence[torch.Tensor], n_kv: int) -> list[torch.Tensor]:
    repeat = len(x) // n_kv
    return list(x[repeat - 1 :: repeat])


def through_the_last(deltas: Sequence[torch.Tensor]) -> torch.Tensor:
    return deltas[-1]


# a broken one is made from the right one
DYNAMIC, LONGROPE_FACTOR, PARTIAL = rotary.dynamic_base, rotary.longrope_attention_factor, rotary.forward_partial
LOGITS, DELTA_LOGITS = logits.forward, logits.delta_prev
ROTATE, PERMUTATION, YARN_SHARE = rotary.forward, rotary.permutation, rotary.yarn_share
WINDOW, SUM_OVER_GROUP = grouped_query.mask, grouped_query.sum_over_group
CONV, CONV_GRAD, CONTINUED = short_conv.conv, short_conv.grad_w, short_conv.continued
PRODUCT_M, PRODUCT_U = per_example.product_m, per_example.product_u

BREAKS: dict[str, tuple[object, str, Callable[..., object], set[str]]] = {
    "the mask as printed": (attention, "mask", lambda scaled: scaled.tril(), FORWARD | FROM_12 | {
        "E-mask", "E-out-tri", "E-rho", "E-attn-fwd", "E-compose", "E-weighted-1", "E-weighted-2", "E-weighted-3",
        "E-dbk-zero", "E-dscaled", "E-mha-fwd", "P-bk-impotent", "P-swap-bq", "P-drho-free", "P-linmix-causal",
        "P-kv-lastcol", "P-kv-oldrows", "P-mha-compose", "D-gen-loop", "D-table1",
        "X-first-row", "X-last-dead", "X-renorm", "X-stack", "R1", "R2", "R16", "R17", "L-gqa-heads",
    }),
    "a missing 1/√d_ρ": (attention, "scale", lambda raw, d_rho: raw, FORWARD | FROM_12 | SCORES | {
        "E-scaled", "E-attn-fwd", "E-compose", "E-mha-fwd", "P-var-drho", "P-drho-free", "D-gen-loop", "X-stack",
        "L-gqa-heads",
    }),
    "a missing 1/√d_ρ in the cache": (kv_cache, "scale", lambda raw, d_rho: raw, {
        "E-kv-rho", "E-kv-out", "P-qv-cache", "D-gen-loop", "R4",
    }),
    "a dropped softmax correction": (attention, "delta_causal", lambda delta_rho, rho: delta_rho * rho, FROM_10 | SCORES | {
        "E-attn-dcausal", "P-dcausal-rowsum", "E-softmax-diff", "E-dbk-zero", "P-drho-free", "P-identity",
        "X-first-row", "X-stack", "R2", "R18", "L-gqa-heads",
    }),
    "a wrong sign in LayerNorm": (layernorm, "delta_prev", with_a_wrong_sign, FROM_10 | {
        "E-ln-dx", "X-ln-rowsum", "X-stack", "R8", "R19", "L-center-bwd",
    }),
    "a loss on the last row": (loss, "delta_logits", lambda y_pred, targets: (
        y_pred - loss.y_gt(targets, y_pred.shape[1], y_pred.dtype)
    ), FROM_12 | {
        "E-dlogits", "X-last-dead", "X-logit-rowsum", "X-stack", "R5",
    }),
    "a missing tied contribution": (transformer, "grad_w_tok", embedding_part_only, {"T3-wtok", "R9"}),
    "a blocked frozen path": (transformer, "delta_before_logits", adapter_path_only, FROM_11 | {
        "E-lora-logits-fwd", "R3",
    }),
    "a dropped scale": (lora, "grad_u", lambda delta, a, d, scale: (a @ d).t() @ delta, {"E-lora-du", "T3-u11"}),
    "a wrong activation slope": (activation, "g_prime", lambda x, name: (x > 0).to(x.dtype), FROM_10 | {
        "E-act", "X-stack", "L-relu2-bwd", "L-gate-bwd", "L-gate-branches",
    }),
    "a squared ReLU without its 2": (activation, "g_prime", with_relu2(activation.g_prime, torch.relu), {"L-relu2-bwd"}),
    "a squared ReLU without its square": (activation, "g", with_relu2(activation.g, torch.relu), {"L-relu2-fwd"}),
    "an RMSNorm with ε outside the root": (rmsnorm, "forward", with_eps_outside, RMS | QK | ORDERS | {
        "L-post-orthogonal", "L-gain-fwd", "L-gain-bwd", "L-center-fwd", "L-center-bwd", "L-joint-fwd", "L-joint-bwd",
    }),
    "an RMSNorm without its gain": (rmsnorm, "forward", without_the_gain(rmsnorm.forward), QK | ORDERS | {
        "L-rms-fwd", "L-gain-fwd", "L-center-fwd", "L-joint-fwd",
    }),
    "an RMSNorm with LayerNorm's backward pass": (rmsnorm, "delta_prev", layernorm.delta_prev, {
        "L-rms-bwd", "L-qknorm-bwd", "L-branch-bwd", "L-gain-bwd", "L-joint-bwd", "L-parallel-bwd", "L-post-bwd",
        "L-post-grad", "L-post-orthogonal",
    }),
    "a mean instead of a sum in RMSNorm": (rmsnorm, "grad_w", lambda delta, a_bar: (a_bar * delta).mean(0), {
        "L-rms-grad", "L-qknorm-grad", "L-gain-bwd", "L-joint-bwd", "L-parallel-bwd", "L-post-grad",
    }),
    "a q/k norm over all heads together": (rmsnorm, "forward_heads", over_all_heads, QK),
    "a q/k norm with the statistics of one head": (rmsnorm, "delta_prev_heads", from_the_first_head, {"L-qknorm-bwd"}),
    "a q/k gradient of one head": (
        rmsnorm, "grad_w_heads", lambda deltas, heads: rmsnorm.grad_w(deltas[0], heads[0].a_bar), {"L-qknorm-grad"},
    ),
    "a mean instead of a sum": (linear, "grad_b", lambda delta: delta.mean(0), {
        "E-fc-bwd", "E-val-branch", "T3-b3", "T3-b6", "T3-b8", "T3-b11", "X-bv-b3",
    }),
    "a rotation forward in the backward pass": (rotary, "delta_prev", rotary.forward, {"L-rope-bwd", "L-partial-bwd"}),
    "a reflection instead of a rotation": (rotary, "plane_rotation", reflection, {
        "L-rope-fwd", "L-rope-bwd", "L-rope-orthogonal", "L-rope-relative", "L-rope-scaling",
        "L-rope-longrope", "L-partial-fwd", "L-partial-bwd",
    }),
    "the planes of the other form": (rotary, "planes", other_planes, {
        "L-rope-fwd", "L-rope-bwd", "L-rope-forms", "L-rope-scaling", "L-rope-longrope", "L-partial-fwd", "L-partial-bwd",
    }),
    "the square of the position": (rotary, "forward", with_a_power_of_the_position, {
        "L-rope-fwd", "L-rope-relative", "L-rope-scaling", "L-rope-longrope", "L-partial-fwd",
    }),
    "a rotation without its attention factor": (
        rotary, "forward", lambda x, positions, theta, form, m=1.0: ROTATE(x, positions, theta, form), {"L-rope-fwd"},
    ),
    "frequencies without the 2": (rotary, "frequencies", lambda d_rho, base: torch.tensor(
        [base ** (-i / d_rho) for i in range(d_rho // 2)], dtype=torch.float64,
    ), {"L-rope-fwd", "L-rope-scaling", "L-rope-dynamic"}),
    "the permutation in the other direction": (
        rotary, "permutation", lambda d_rho: PERMUTATION(d_rho).t(), {"L-rope-forms"},
    ),
    "a factor that multiplies": (rotary, "linear", lambda theta, factor: theta * factor, {
        "L-rope-scaling", "L-rope-longrope",
    }),
    "llama3 without its ramp": (rotary, "llama3_share", lambda theta, low, high, n: [
        float(n * t / (2 * math.pi) > high) for t in theta.tolist()
    ], {"L-rope-scaling"}),
    "yarn with its ramp reversed": (
        rotary, "yarn_share", lambda *arguments, **options: YARN_SHARE(*arguments, **options)[::-1], {"L-rope-scaling"},
    ),
    "yarn without its attention factor": (rotary, "yarn_attention_factor", lambda f, *scales: 1.0, {"L-rope-scaling"}),
    "a SiLU slope without its second term": (gated, "g_prime", with_silu(gated.g_prime, torch.sigmoid), {
        "L-silu-bwd", "L-gate-bwd", "L-gate-branches", "L-moe-bwd",
    }),
    "a SiLU without its x": (gated, "g", with_silu(gated.g, torch.sigmoid), {
        "L-silu-fwd", "L-gate-fwd", "L-gate-bwd", "L-gate-branches", *EXPERTS,
    }),
    "experts by their smallest scores": (experts, "choose", lambda s, k: CHOOSE(-s, k), {
        "L-moe-fwd", "L-moe-bwd", "L-moe-router", "L-moe-expert", "L-moe-groups", "L-moe-balance",
    }),
    "groups that do not matter": (
        experts, "choose_in_groups", lambda s, k, groups, kept: CHOOSE(s, k), {"L-moe-groups"},
    ),
    "a softmax of the gates": (experts, "gates_normalized", lambda s, chosen: experts.softmax(experts.softmax(s)[chosen]), {
        "L-moe-fwd", "L-moe-bwd", "L-moe-router", "L-moe-expert", "L-moe-normalized",
    }),
    "gates that are not normalized": (experts, "gates_normalized", lambda s, chosen: experts.softmax(s)[chosen], {
        "L-moe-fwd", "L-moe-bwd", "L-moe-router", "L-moe-expert", "L-moe-normalized",
    }),
    "gates of the softmax, normalized": (
        experts, "gates_softmax", lambda s, chosen: experts.gates_normalized(s, chosen), {"L-moe-softmax"},
    ),
    "a softmax whose others get nothing": (
        experts, "delta_softmax", lambda delta, s, chosen: experts.delta_normalized(delta, s, chosen), {"L-moe-softmax"},
    ),
    "normalized gates without ⟨g, Δ_g⟩": (
        experts, "delta_normalized",
        lambda delta, s, chosen: experts.spread(experts.gates_normalized(s, chosen) * delta, chosen, len(s)),
        {"L-moe-bwd", "L-moe-router", "L-moe-normalized"},
    ),
    "a sigmoid without τ": (
        experts, "delta_sigmoid", lambda delta, s, chosen, tau, normalized: DELTA_SIGMOID(delta, s, chosen, 1.0, normalized),
        {"L-moe-sigmoid"},
    ),
    "an expert with all of Δ_9": (
        experts, "delta_input", lambda delta, a, g, expert, name: DELTA_INPUT(delta, a, torch.ones_like(g), expert, name),
        {"L-moe-bwd"},
    ),
    "an expert's gradient without its gate": (
        experts, "grad_down", lambda delta, a, g, expert, name: torch.outer(experts.hidden(a, expert, name), delta),
        {"L-moe-expert"},
    ),
    "a router that forgets the bias of its experts": (
        experts, "delta_gate",
        lambda delta, a, expert, name: DELTA_GATE(delta, a, expert._replace(b_down=0 * expert.b_down), name),
        {"L-moe-bwd", "L-moe-router", "L-moe-shared"},
    ),
    "a shared expert with its gate's slope forgotten": (
        experts, "delta_shared_gate", lambda delta, a, v, expert, name: experts.delta_gate(delta, a, expert, name),
        {"L-moe-shared"},
    ),
    "a balance loss of all layers' rows without E": (
        experts, "delta_balance", lambda s, k: DELTA_BALANCE(s, k) / s.shape[1], {"L-moe-balance"},
    ),
    "a z-loss without lse": (experts, "delta_z_loss", lambda s: DELTA_Z(s) / torch.logsumexp(s, 1)[:, None], {"L-moe-z"}),
    "a clamp that passes everything on": (gated, "delta_clamped", lambda delta, gate, up: (
        DELTA_CLAMPED(delta, gate.clamp(max=gated.LIMIT), up.clamp(-gated.LIMIT, gated.LIMIT))
    ), {"L-moe-clamp"}),
    "a clamped gate without the 1": (
        gated, "clamped", lambda gate, up: CLAMPED(gate, up) - CLAMPED(gate, 0 * up), {"L-moe-clamp"},
    ),
    "a gate on the wrong branch": (gated, "forward", lambda gate, up, name: gated.g(up, name) * gate, {
        "L-gate-fwd", *EXPERTS,
    }),
    "a gate that forgets up": (gated, "delta_gate", lambda delta, gate, up, name: delta * gated.g_prime(gate, name), {
        "L-gate-bwd", "L-gate-branches", "L-moe-bwd",
    }),
    "a gate that passes Δ_8 to up": (gated, "delta_up", lambda delta, gate, name: delta, {
        "L-gate-bwd", "L-gate-branches", "L-moe-bwd",
    }),
    "one branch of two": (gated, "delta_prev", lambda d_gate, d_up, w_gate, w_up: d_up @ w_up.t(), {"L-gate-branches"}),
    "a convolution with its taps reversed": (short_conv, "conv", lambda z, w, b: CONV(z, w.flip(0), b), {
        "L-conv-fwd", "L-conv-cache",
    }),
    "a convolution that wraps around": (short_conv, "conv", lambda z, w, b: sum(
        w[j] * z.roll(j, 0) for j in range(len(w))
    ) + (0 if b is None else b), {"L-conv-fwd", "L-conv-causal"}),
    "a convolution without its bias": (short_conv, "conv", lambda z, w, b: CONV(z, w, None), {
        "L-conv-fwd", "L-conv-cache",
    }),
    "an error signal that goes forward": (short_conv, "delta_z", lambda delta, w: CONV(delta, w, None), {"L-conv-bwd"}),
    "an output gate that passes Δ_y": (short_conv, "delta_c", lambda delta_y, c_gate: delta_y, {
        "L-conv-bwd", "L-conv-grad",
    }),
    "an output gate with the error of its input": (short_conv, "delta_c_gate", lambda delta_y, c: delta_y, {"L-conv-bwd"}),
    "an input gate with its own value": (short_conv, "delta_x", lambda signal, b_gate: signal, {"L-conv-bwd"}),
    "a convolution's B with the error of z": (short_conv, "delta_b_gate", lambda signal, x: signal, {"L-conv-bwd"}),
    "taps with the tokens after": (short_conv, "grad_w", lambda delta, z, taps: CONV_GRAD(z, delta, taps), {"L-conv-grad"}),
    "a bias of the convolution's mean": (short_conv, "grad_b", lambda delta: delta.mean(0), {"L-conv-grad"}),
    "a state with one row less": (short_conv, "continued", lambda state, z, w, b: CONTINUED(
        torch.cat([torch.zeros_like(state[:1]), state[1:]]), z, w, b
    ), {"L-conv-cache"}),
    "key heads assigned in turn": (grouped_query, "group", lambda i, n_heads, n_kv: i % n_kv, {
        "L-gqa-fwd", "L-gqa-bwd", "L-gqa-sum",
    }),
    "the keys of the first group for all": (
        grouped_query, "delta_q", lambda deltas, k: [delta @ k[0] for delta in deltas], {"L-gqa-bwd", "L-gqa-heads"},
    ),
    "a shared key with the error signal of one head": (grouped_query, "sum_over_group", of_the_last_head, {"L-gqa-sum"}),
    "a mean over the group": (grouped_query, "sum_over_group", lambda x, n_kv: [
        total / (len(x) // n_kv) for total in SUM_OVER_GROUP(x, n_kv)
    ], {"L-gqa-sum"}),
    "a missing 1/√d_ρ in a group": (grouped_query, "scale", lambda raw, d_rho: raw, {
        "L-gqa-fwd", "L-gqa-bwd", "L-gqa-sum", "L-gqa-heads", "L-window-fwd", "L-window-bwd",
    }),
    "a window with one key more": (grouped_query, "mask", lambda scaled, window: (
        WINDOW(scaled, None if window is None else window + 1)
    ), {"L-window-fwd", "L-window-bwd"}),
    "a scale of 1": (scores, "scale", lambda raw, sigma: raw, {
        "L-scale-fwd", "L-scale-bwd", "L-cap-fwd", "L-cap-bwd", "L-sink-fwd", "L-sink-bwd", "L-sink-grad",
    }),
    "a cap that divides by nothing": (
        scores, "cap", lambda s, c: c * torch.tanh(s), {"L-cap-fwd", "L-cap-bwd"},
    ),
    "a cap without a slope": (scores, "delta_scaled", lambda delta, s, c: delta, {"L-cap-bwd"}),
    "a sink that takes nothing": (
        scores, "softmax_with_sink", lambda s, b: (torch.softmax(s, 1), torch.zeros(len(s)).double()),
        {"L-sink-fwd", "L-sink-lse", "L-sink-bwd", "L-sink-grad"},
    ),
    "a sink with the sign of a key": (
        scores, "grad_sink", lambda delta, a, rho_sink: (rho_sink * (delta * a).sum(1)).sum(), {"L-sink-grad"},
    ),
    "a batch that averages examples": (
        per_example, "batch_loss", lambda losses, counts: sum(losses) / len(losses), {"L-example-fwd"},
    ),
    "an example with the batch's number of targets": (
        per_example, "grad_w", lambda a, delta, count, total: a.t() @ delta, {"L-example-bwd"},
    ),
    "products of examples without Δ": (
        per_example, "product_w", lambda a_i, delta_i, a_j, delta_j: (a_i @ a_j.t()).sum(),
        {"L-example-linear", "L-example-table", "L-example-tied", "L-example-lora"},
    ),
    "a bias of the mean over tokens": (
        per_example, "product_b", lambda d_i, d_j: d_i.mean(0) @ d_j.mean(0), {"L-example-bias"},
    ),
    "a gain without ā": (per_example, "product_gain", lambda d_i, bar_i, d_j, bar_j: d_i.sum(0) @ d_j.sum(0), {
        "L-example-gain",
    }),
    "a tied matrix without its cross terms": (per_example, "product_table_head", lambda *given: torch.zeros(()), {
        "L-example-tied",
    }),
    "a magnitude without 1/c": (
        per_example, "product_m", lambda delta, z, c: PRODUCT_M(delta, z, torch.ones_like(c)), {"L-example-magnitude"},
    ),
    "adapter products with one scale": (
        per_example, "product_u", lambda a, delta, d, scale: PRODUCT_U(a, delta, d, 1.0) * scale, {"L-example-lora"},
    ),
    "a given gradient transposed": (
        per_example, "product_with", lambda a, delta, q: (a @ q).sum(), {"L-example-with"},
    ),
    "a norm after the branch that Δ does not see": (blocks, "delta_of_branch", lambda delta, branch, saved: delta, {
        "L-post-bwd", "L-post-grad", "L-post-orthogonal",
    }),
    "a norm before the branches that Δ does not see": (blocks, "delta_of_path", lambda delta_a, path, saved: delta_a, {
        "L-post-bwd", "L-parallel-bwd", "L-branch-bwd",
    }),
    "one path of two": (blocks, "total", through_the_last, {
        "L-parallel-fwd", "L-parallel-bwd", "L-parallel-sum",
    }),
    "branches without their multiplier": (blocks, "scaled", lambda x, s: x, {"L-branch-fwd", "L-branch-bwd"}),
    "a norm after the branch that is left out": (
        blocks, "forward_branch", lambda a, branch, eps: blocks.BranchForward(branch.f(a), None, branch.f(a)), {
            "L-post-fwd", "L-post-bwd", "L-post-grad", "L-post-orthogonal",
        },
    ),
    "a gain of w": (rmsnorm, "gain", lambda w, offset=1.0: w, {"L-gain-fwd", "L-gain-bwd"}),
    "an embedding without its multiplier": (embedding, "forward_scaled", lambda ids, w, s: embedding.forward(ids, w), {
        "L-embed-fwd", "L-embed-bwd",
    }),
    "an embedding's gradient without its multiplier": (
        embedding, "grad_w_scaled", lambda delta, ids, n, s: embedding.grad_w(delta, ids, n), {"L-embed-bwd"},
    ),
    "logits without their scale": (logits, "forward", lambda a, s, c=None: LOGITS(a, 1.0, c), {
        "L-logits-fwd", "L-logits-bwd",
    }),
    "a Δ of logits without their scale": (logits, "delta_prev", lambda delta, y, s, c=None: DELTA_LOGITS(delta, y, 1.0, c), {
        "L-logits-bwd", "L-logits-rowsum",
    }),
    "a cap of logits without a slope": (logits, "slope", lambda y, c: torch.ones_like(y), {
        "L-logits-bwd", "L-logits-rowsum",
    }),
    "a norm of each head instead of all": (
        rmsnorm, "forward_joint", lambda q, w, eps: (
            [rmsnorm.forward(x, g, eps).a for x, g in zip(q, w.chunk(len(q)), strict=True)],
            rmsnorm.forward(torch.cat(tuple(q), 1), w, eps),
        ), {"L-joint-fwd"},
    ),
    "a Δ of each head instead of all": (
        rmsnorm, "delta_prev_joint", lambda deltas, f, w: [
            rmsnorm.delta_prev(*x) for x in zip(
                deltas, f.a_bar.chunk(len(deltas), 1), [f.rms] * len(deltas), w.chunk(len(deltas)), strict=True,
            )
        ], {"L-joint-bwd"},
    ),
    "the last features rotated instead of the first": (
        rotary, "forward_partial", lambda x, t, theta, form: PARTIAL(x.flip(1), t, theta, form).flip(1), {
            "L-partial-fwd", "L-rope-longrope",
        },
    ),
    "a Δ rotated whole": (rotary, "delta_prev_partial", lambda delta, t, theta, form: (
        PARTIAL(delta, t, theta, form)
    ), {"L-partial-bwd"}),
    "factors of longrope that multiply": (rotary, "longrope", lambda theta, factors: theta * theta.new_tensor(factors), {
        "L-rope-longrope",
    }),
    "longrope with yarn's attention factor": (
        rotary, "longrope_attention_factor", lambda f, n: rotary.yarn_attention_factor(f), {"L-rope-longrope"},
    ),
    "a dynamic base that shrinks within the context": (
        rotary, "dynamic_base", lambda d_rho, base, f, context, n: base * (f * n / context - f + 1) ** (d_rho / (d_rho - 2))
        if n > context else base / f, {"L-rope-dynamic"},
    ),
    "a norm that does not center": (layernorm, "delta_prev", lambda delta, a_bar, sigma, w: (
        rmsnorm.delta_prev(delta, a_bar, sigma, w)
    ), FROM_10 | {"E-ln-dx", "X-ln-rowsum", "X-stack", "X-stream-rowsum", "R8", "R19", "L-center-bwd"}),
    "a coefficient that is left out": (preference, "delta_logits", lambda y_pred, targets, c: (
        DELTA_PREFERENCE(y_pred, targets, torch.ones_like(c))
    ), {f"L-{loss}-bwd" for loss in ("dpo", "ipo", "simpo", "orpo", "kto", "grpo", "kl")}),
    "a margin without the reference": (preference, "dpo", lambda s, ref, beta, smoothing=0.0: (
        DPO(s, (0 * ref[0], 0 * ref[1]), beta, smoothing)
    ), {"L-dpo-fwd", "L-dpo-bwd"}),
    "a rejected answer that is chosen": (preference, "dpo_c", lambda *given: (DPO_C(*given)[0],) * 2, {"L-dpo-bwd"}),
    "a margin of 1/β": (preference, "ipo", lambda m, ref, beta: IPO(m, ref, beta / 2), {"L-ipo-fwd", "L-ipo-bwd"}),
    "a mean whose coefficient is that of a sum": (preference, "ipo_c", lambda m, ref, beta, n: IPO_C(m, ref, beta, (1, 1)), {
        "L-ipo-bwd",
    }),
    "a target margin of the wrong sign": (preference, "simpo", lambda m, beta, gamma: SIMPO(m, beta, -gamma), {
        "L-simpo-fwd", "L-simpo-bwd",
    }),
    "both answers with the length of the chosen one": (
        preference, "simpo_c", lambda m, beta, gamma, n: SIMPO_C(m, beta, gamma, (n[0], n[0])), {"L-simpo-bwd"},
    ),
    "probabilities instead of odds": (preference, "odds", torch.exp, {"L-orpo-fwd", "L-orpo-bwd"}),
    "odds whose slope is that of p": (preference, "orpo_c", lambda m, beta, n: tuple(
        c * (1 - torch.exp(x)) for c, x in zip(ORPO_C(m, beta, n), m, strict=True)
    ), {"L-orpo-bwd"}),
    "a reference that is added": (preference, "kto", lambda s, ref, z, *given: KTO(s, -ref, z, *given), {
        "L-kto-fwd", "L-kto-bwd",
    }),
    "an undesirable answer that is desired": (preference, "kto_c", lambda *given: KTO_C(*given).abs(), {"L-kto-bwd"}),
    "a ratio without bounds": (preference, "grpo", lambda ell, old, a, clip: -a * torch.exp(ell - old), {
        "L-grpo-fwd", "L-grpo-bwd",
    }),
    "bounds that stop every ratio outside": (preference, "grpo_c", lambda ell, old, a, clip: torch.where(
        ((r := torch.exp(ell - old)) > 1 + clip[1]) | (r < 1 - clip[0]), 0 * r, r * a
    ), {"L-grpo-bwd"}),
    "a divergence of the reference from the model": (preference, "kl", lambda ell, ref, beta: KL(ref, ell, beta), {
        "L-kl-fwd", "L-kl-bwd",
    }),
    "a divergence without the ratio": (preference, "corrected_kl", lambda ell, old, ref, beta: KL(ell, ref, beta), {
        "L-kl-fwd", "L-kl-bwd",
    }),
    "a corrected divergence whose ratio is a constant": (
        preference, "corrected_kl_c", lambda ell, old, ref, beta: torch.exp(ell - old) * KL_C(ell, ref, beta), {"L-kl-bwd"},
    ),
    "a branch that does not see its prefix": (preference, "attend", lambda q, k, v: ATTEND(q, k[-len(q):], v[-len(q):]), {
        "L-prefix-fwd", "L-prefix-bwd",
    }),
    "a prefix with the signals of one branch": (
        preference, "prefix_signals", lambda p, signals: PREFIX_SIGNALS(p, signals[-1:]), {"L-prefix-bwd"},
    ),
    "an overwriting scatter": (embedding, "grad_w", overwriting, {"E-embed-dw", "T3-wtok", "R9", "L-embed-bwd"}),
}  # fmt: skip


def test_every_check_beyond_the_paper_is_broken_on_purpose() -> None:
    """A check that no mistake makes fail may be one that cannot fail."""
    broken = set().union(*(expected for *_, expected in BREAKS.values()))
    never = {id for id in CHECKS if id.startswith("L-")} - broken
    assert not never, f"add to BREAKS a wrong formula that fails {', '.join(sorted(never))}"
    assert not broken - set(CHECKS), (
        f"BREAKS expects checks that do not exist: {', '.join(sorted(broken - set(CHECKS)))}"
    )


@cache
def callers_of_formulas(seed: int) -> dict[tuple[ModuleType, str], list[str]]:
    """The checks that call each formula that is broken here; to the others it makes no difference. What an input that
    checks share calls is called by each of them, though it is made once."""
    found: dict[tuple[ModuleType, str], list[str]] = {(module, name): [] for module, name, *_ in BREAKS.values()}
    called: set[tuple[ModuleType, str]] = set()
    by_input: dict[str, set[tuple[ModuleType, str]]] = {}

    def record(*given: Any, at: tuple[ModuleType, str], right: Callable[..., Any], **options: Any) -> Any:
        called.add(at)
        return right(*given, **options)

    def shared(self: RandomInputs, key: str, make: Callable[[RandomInputs], Any]) -> Any:
        before = called.copy()
        called.clear()
        made = SHARED(self, key, make)
        called.update(before, by_input.setdefault(key, called.copy()))
        return made

    def watch(checks: Sequence[Check]) -> Iterator[Check]:
        for check in checks:
            called.clear()
            yield check
            for at in called:
                found[at].append(check.id)

    with pytest.MonkeyPatch.context() as patch:
        for module, name in found:
            patch.setattr(module, name, partial(record, at=(module, name), right=getattr(module, name)))
        patch.setattr(RandomInputs, "shared", shared)
        run(seed, watch=watch)
    return found


@pytest.mark.parametrize("seed", range(int(os.environ.get("HANDGRAD_SEEDS", "1"))))  # make long: 3
@pytest.mark.parametrize("name", BREAKS)
def test_exactly_the_affected_checks_fail(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, broken, expected = BREAKS[name]
    callers = callers_of_formulas(seed)[module, attribute]
    monkeypatch.setattr(module, attribute, broken)
    report = run(seed, ",".join(callers))
    assert not report.passed
    assert {c.id for c in report.failed} == expected
