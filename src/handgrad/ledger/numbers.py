"""Section 7: the numbers. Each printed count is compared with `plan` and with the tensors of a real model."""

import torch

from ..model.config import ModelConfig, preset
from ..model.gpt import GPT
from ..model.names import without_block
from ..paper import transformer
from ..plan.estimate import make_plan
from ..plan.outline import linear_layers
from ..plan.parameters import adapter_parameters, target_ranks
from ..proof.oracles import relative_error
from .check import AUTOGRAD, EXACT, IDENTITY, RandomInputs, check, mismatch
from .transformer import cases

NUMBERS = 11
COMPLETE = ModelConfig(tied=False, logits_bias=True)  # the paper's "complete GPT-2" (R13)


def tensors(config: ModelConfig) -> int:
    """The number of parameters of a real model, built on the meta device."""
    return sum(p.numel() for p in GPT(config, device="meta").parameters())


@check("N-config", NUMBERS, "", EXACT)
def configuration(rng: RandomInputs) -> float:
    """d = 768, n_context = 1024, n_vocab = 50,257; n_h is not stated, GPT-2 small has 12 heads of width 64"""
    c = preset("paper")
    return mismatch(
        ((c.d_model, c.n_context, c.n_vocab), (768, 1024, 50257)),
        ((c.n_heads, c.value_width), (12, 64)),
        (c.n_blocks, 1),
    )


@check("N-params-block", NUMBERS, "", EXACT)
def block(rng: RandomInputs) -> float:
    """a block has 2d + 4(d² + d) + 2d + (4d² + 4d) + (4d² + d) = 12d² + 13d parameters: 7,087,872"""
    d = 768
    term_by_term = 2 * d + 4 * (d * d + d) + 2 * d + (4 * d * d + 4 * d) + (4 * d * d + d)
    counted = make_plan(preset("paper")).per_block
    real = sum(p.numel() for p in GPT(preset("paper"), device="meta").blocks[0].parameters())
    return mismatch((counted, 7_087_872), (term_by_term, counted), (12 * d * d + 13 * d, counted), (real, counted))


@check("N-params-total", NUMBERS, "", EXACT)
def total(rng: RandomInputs) -> float:
    """n_vocab d + n_context d + n_blocks(12d² + 13d) + 2d + (d n_vocab + n_vocab), for any sizes"""
    heads = rng.size(1, 4)
    d, v, n, b = heads * rng.size(2, 9), rng.size(2, 99), rng.size(1, 50), rng.size(1, 5)
    config = ModelConfig(v, n, d, heads, b, tied=False, logits_bias=True)
    formula = v * d + n * d + b * (12 * d * d + 13 * d) + 2 * d + (d * v + v)
    return mismatch((make_plan(config).total, formula), (tensors(config), formula))


@check("N-params-minimal", NUMBERS, "", EXACT)
def minimal(rng: RandomInputs) -> float:
    """the minimal transformer, one block, has 85,120,849 parameters: the sum of Table 3"""
    return mismatch((make_plan(preset("paper")).total, 85_120_849), (tensors(preset("paper")), 85_120_849))


@check("N-params-gpt2", NUMBERS, "", EXACT)
def complete_network(rng: RandomInputs) -> float:
    """with 12 blocks 163,087,441, untied and with a logits bias, unlike GPT-2 (R13)"""
    return mismatch((make_plan(COMPLETE).total, 163_087_441), (tensors(COMPLETE), 163_087_441))


@check("N-ratio", NUMBERS, "", EXACT)
def ratio(rng: RandomInputs) -> tuple[float, str]:
    """twelve blocks are "about twice" one block: 1.916 to three decimals"""
    found = make_plan(COMPLETE).total / make_plan(preset("paper")).total
    return mismatch((round(found, 3), 1.916)), f"{found:.4f}"


@check("N-emb-39M", NUMBERS, "", EXACT)
def embedding(rng: RandomInputs) -> float:
    """the token embedding has n_vocab d ≈ 39M entries: 38,597,376"""
    (w_tok,) = GPT(preset("paper"), device="meta").embed.parameters()
    return mismatch((w_tok.numel(), 38_597_376), (round(w_tok.numel() / 1e6), 39))


@check("N-tied", NUMBERS, "", EXACT)
def tied(rng: RandomInputs) -> float:
    """tied, without w_11 and b_11, 124,439,808 ≈ 124M remain"""
    found = make_plan(preset("gpt2")).total
    return mismatch((found, 124_439_808), (tensors(preset("gpt2")), found), (round(found / 1e6), 124))


@check("N-tied-pct", NUMBERS, "", EXACT)
def tied_saving(rng: RandomInputs) -> tuple[float, str]:
    """tying saves ≈ 24 %: 23.70 % of the complete network, 45.4 % of the minimal one"""
    complete, minimal = make_plan(COMPLETE).total, make_plan(preset("paper")).total
    minimal_tied = make_plan(preset("paper", tied=True, logits_bias=False)).total
    saving, of_minimal = 100 * (1 - make_plan(preset("gpt2")).total / complete), 100 * (1 - minimal_tied / minimal)
    wrong = mismatch((round(saving, 2), 23.70), (round(saving), 24), (round(of_minimal, 1), 45.4))
    return wrong + mismatch((minimal_tied, 46_473_216)), f"{saving:.2f} %"


@check("N-logits", NUMBERS, "", EXACT)
def logits(rng: RandomInputs) -> float:
    """the logits layer has d n_vocab + n_vocab = 38,647,633 parameters"""
    head = GPT(preset("paper"), device="meta").head
    real = sum(p.numel() for p in head.parameters())
    return mismatch((make_plan(preset("paper")).logits, 38_647_633), (real, 38_647_633))


@check("N-lora-logits", NUMBERS, "", EXACT)
def adapter_of_the_logits(rng: RandomInputs) -> float:
    """an adapter of rank 16 on the logits layer has r(d + n_vocab) = 816,400"""
    return mismatch((make_plan(preset("paper"), rank=16, targets="lm_head").trainable, 816_400))


@check("N-lora-logits-pct", NUMBERS, "", EXACT)
def adapter_of_the_logits_share(rng: RandomInputs) -> tuple[float, str]:
    """≈ 2 % of the logits layer: 2.112 %"""
    share = 100 * make_plan(preset("paper"), rank=16, targets="lm_head").trainable / make_plan(preset("paper")).logits
    return mismatch((round(share, 3), 2.112), (round(share), 2)), f"{share:.3f} %"


@check("N-lora-all", NUMBERS, "", EXACT)
def all_adapters(rng: RandomInputs) -> float:
    """on every matrix n_blocks[4r(2d) + r5d + r5d] + r(d + n_vocab) = 3,470,608, a pair for each of q, k and v"""
    d, b, r, v = 768, 12, 16, 50257
    ranks = target_ranks(COMPLETE, r, "paper")
    found = adapter_parameters(COMPLETE, ranks)
    formula = b * (4 * r * 2 * d + r * 5 * d + r * 5 * d) + r * (d + v)
    short = r * (18 * d * b + d + v)
    layers = linear_layers(COMPLETE)
    shapes = [(layers[without_block(name)], rank) for name, rank in ranks.items()]
    factors = [
        torch.empty(s, device="meta") for layer, rank in shapes for s in ((layer.f_in, rank), (rank, layer.f_out))
    ]
    real = sum(x.numel() for x in factors)
    return mismatch((found, 3_470_608), (formula, found), (short, found), (real, found))


@check("N-lora-pct", NUMBERS, "", EXACT)
def adapters_share(rng: RandomInputs) -> tuple[float, str]:
    """≈ 98 % fewer parameters to train: 97.87 % of the untied network, 97.21 % of the tied one (stored ones rise, R26)"""
    adapters = make_plan(COMPLETE, rank=16, targets="paper").trainable
    less = 100 * (1 - adapters / make_plan(COMPLETE).total)
    less_tied = 100 * (1 - adapters / make_plan(preset("gpt2")).total)
    wrong = mismatch((round(less, 2), 97.87), (round(less), 98), (round(less_tied, 2), 97.21))
    return wrong, f"{less:.2f} %"


@check("E-lora-logits-fwd", NUMBERS, "43", AUTOGRAD)
def adapted_logits(rng: RandomInputs) -> float:
    """a_12 = FC_frozen(a_11) + scale a_11 d_11 u_11, forward and backward"""
    errors = []
    for c in cases(rng):
        if c.p.adapter is None or c.p.w_11 is None or c.p.b_11 is None:
            continue
        a_11 = c.expected.values["a_11"]
        errors.append(relative_error(transformer.forward_logits(a_11, c.p), c.expected.values["a_12"]))
        errors.append(
            relative_error(
                transformer.delta_before_logits(c.expected.deltas["delta_12"], c.p), c.expected.deltas["delta_11"]
            )
        )
    return max(errors)


@check("P-sampling", NUMBERS, "", IDENTITY)
def sampling(rng: RandomInputs) -> float:
    """rows of y_pred sum to 1 and can be sampled from; the method is not specified, so any token with p > 0 is allowed"""
    worst = 0.0
    for c in cases(rng):
        worst = max(worst, (c.f.y_pred.sum(1) - 1).abs().max().item())
        sampled = torch.multinomial(c.f.y_pred, 1, generator=rng.generator)
        worst += float((c.f.y_pred.gather(1, sampled) <= 0).sum())
    return worst
