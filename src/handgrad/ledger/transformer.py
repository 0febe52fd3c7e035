"""Section 7: the minimal transformer. Every row of Table 2 and of Table 3, on several networks at once.

The networks differ in activation, ε, widths of the heads (d_ρ ≠ d_h, different from head to head, Σ d_h ≠ d), number
of blocks, tied or untied head, and an adapter on the logits layer. A row's error is the largest over all networks.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ..model.config import preset
from ..paper import loss, transformer
from ..paper.attention import Head
from ..paper.transformer import Backward, Block, Forward, Network, Options
from ..plan.outline import linear_layers
from ..plan.parameters import parameters
from ..proof.oracles import directional_error, relative_error
from ..proof.reference import Choices, Reference, network_reference, reference_loss, weights_of_network
from ..tolerances import FINITE_DIFFERENCE_TOLERANCE
from .check import AUTOGRAD, EXACT, IDENTITY, RandomInputs, check, mismatch, shortfall

TABLE_2, TABLE_3 = 9, 10


class Case(NamedTuple):
    """A network, the results of the paper's formulas, and those of the reference."""

    p: Network
    o: Options
    ids: Tensor
    targets: Tensor
    f: Forward
    b: Backward
    expected: Reference
    grads: Network


def cases(rng: RandomInputs) -> list[Case]:
    return rng.shared("minimal transformers", _inputs)


def _inputs(rng: RandomInputs) -> list[Case]:
    made = []
    for g, eps, heads, n_blocks, tied, rank in (
        ("relu", 1e-5, [(3, 4), (3, 4)], 1, False, 0),
        ("gelu", 0.0, [(3, 2), (5, 2), (1, 4)], 1, False, 2),
        ("gelu_tanh", 1e-5, [(2, 3), (4, 4), (1, 6)], 3, False, 0),  # Σ d_h = 13 ≠ d
        ("gelu_tanh", 1e-5, [(4, 4), (4, 4)], 2, True, 0),
    ):
        n, n_vocab = rng.size(4, 7), rng.size(8, 11)
        p = rng.network(n_vocab, n + 2, 8, heads, n_blocks, tied, rank)
        o = Options(g, eps)
        ids = rng.ids(n, n_vocab)
        targets = loss.next_tokens(ids)
        f = transformer.forward(ids, p, o)
        b = transformer.backward(targets, p, f, o)
        expected, grads = network_reference(p, o, ids, targets)
        made.append(Case(p, o, ids, targets, f, b, expected, grads))
    return made


# ── Table 2 ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_FORWARD = {
    1: "a_1 = ohe(a_0) w_tok + ohe(1:n_T) w_pos ∈ (n_T, d)",
    2: "a_2 = ā_1 diag(w_1) + b_1~ ∈ (n_T, d)",
    3: "a_3 = MHA a_2 ∈ (n_T, Σd_h)",
    4: "a_4 = a_3 w_3 + b_3~ ∈ (n_T, d)",
    5: "a_5 = a_1 + a_4 ∈ (n_T, d)",
    6: "a_6 = ā_5 diag(w_5) + b_5~ ∈ (n_T, d)",
    7: "a_7 = a_6 w_6 + b_6~ ∈ (n_T, 4d)",
    8: "a_8 = g(a_7) ∈ (n_T, 4d)",
    9: "a_9 = a_8 w_8 + b_8~ ∈ (n_T, d)",
    10: "a_10 = a_5 + a_9 ∈ (n_T, d)",
    11: "a_11 = ā_10 diag(w_10) + b_10~ ∈ (n_T, d)",
    12: "a_12 = a_11 w_11 + b_11~ (+ scale a_11 d_11 u_11) ∈ (n_T, n_vocab), the logits",
}
_BACKWARD = {
    12: "Δ_12 = y_pred − y_gt, one-hot; the row without a target is 0",
    11: "Δ_11 = Δ_12 w_11ᵗ (+ scale Δ_12 (d_11 u_11)ᵗ with an adapter)",
    10: "Δ_10 = LN-back(10)(Δ_11); if another block follows, that block's Δ_1",
    9: "Δ_9 = Δ_10: the skip connection passes it unchanged",
    8: "Δ_8 = Δ_10 w_8ᵗ",
    7: "Δ_7 = Δ_8 ∘ g'(a_7)",
    6: "Δ_6 = Δ_7 w_6ᵗ",
    5: "Δ_5 = Δ_10 + LN-back(5)(Δ_6)",
    4: "Δ_4 = Δ_5: the skip connection passes it unchanged",
    3: "Δ_3 = Δ_5 w_3ᵗ, then split into heads",
    2: "Δ_2 = Σ_h (ρᵗ Δ_3^h w_vᵗ + Δ_raw k w_qᵗ + Δ_rawᵗ q w_kᵗ)",
    1: "Δ_1 = Δ_5 + LN-back(1)(Δ_2), and the error signal of the one-hot input, Δ_1 w_tokᵗ",
}


def _worst(ours: Forward | Backward, name: str, expected: dict[str, Tensor], number: int) -> float:
    """The largest error of a_number or delta_number over the blocks of one network."""
    if number > 10:
        return relative_error(getattr(ours, f"{name}_{number}"), expected[f"{name}_{number}"])
    return max(
        relative_error(getattr(block, f"{name}_{number}"), expected[f"blocks.{i}.{name}_{number}"])
        for i, block in enumerate(ours.blocks)
    )


def _forward_error(number: int, rng: RandomInputs) -> float:
    return max(_worst(c.f, "a", c.expected.values, number) for c in cases(rng))


def _backward_error(number: int, rng: RandomInputs) -> float:
    worst = max(_worst(c.b, "delta", c.expected.deltas, number) for c in cases(rng))
    if number == 1:  # also Δ of the one-hot input
        one_hot = [(c.b.delta_0, c.expected.deltas["blocks.0.delta_1"] @ c.p.w_tok.t()) for c in cases(rng)]
        worst = max(worst, *(relative_error(x, y) for x, y in one_hot))
    return worst


@check("T2-a0", TABLE_2, "Table 2", EXACT)
def ids(rng: RandomInputs) -> float:
    """a_0 ∈ ℕ^{n_T}: integers below n_vocab, which the network does not change"""
    wrong = 0.0
    for c in cases(rng):
        wrong += mismatch((c.f.a_0.tolist(), c.ids.tolist()), (c.f.a_0.is_floating_point(), False))
        wrong += float(((c.ids < 0) | (c.ids >= len(c.p.w_tok))).sum())
    return wrong


for _number, _statement in _FORWARD.items():
    check(f"T2-a{_number}", TABLE_2, "Table 2", IDENTITY, _statement)(partial(_forward_error, _number))


@check("T2-soft", TABLE_2, "Table 2", IDENTITY)
def softmax(rng: RandomInputs) -> float:
    """y_pred = softmax a_12 ∈ (n_T, n_vocab), each row a distribution"""
    worst = 0.0
    for c in cases(rng):
        worst = max(worst, relative_error(c.f.y_pred, c.expected.values["a_12"].softmax(1)))
        worst = max(worst, (c.f.y_pred.sum(1) - 1).abs().max().item(), shortfall(c.f.y_pred.min().item(), 0.0))
    return worst


for _number, _statement in _BACKWARD.items():
    check(f"T2-D{_number}", TABLE_2, "Table 2", AUTOGRAD, _statement)(partial(_backward_error, _number))

# ── Table 3 ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# id, symbol, the size the paper prints for d = 768, n_context = 1024, n_vocab = 50,257, r = 16, and the gradient.
# The sizes of the heads' parameters are those of all n_h heads together.
_GRADIENTS = [
    ("T3-wtok", "w_tok", 38_597_376, "∂w_tok = ohe(a_0)ᵗ Δ_1 (+ Δ_12ᵗ a_11 if tied) ∈ (n_vocab, d)"),
    ("T3-wpos", "w_pos", 786_432, "∂w_pos = ohe(1:n_T)ᵗ Δ_1 ∈ (n_context, d)"),
    ("T3-w1", "w_1", 768, "∂w_1 = diag(ā_1ᵗ Δ_2) ∈ (d)"),
    ("T3-b1", "b_1", 768, "∂b_1 = Σ_tok Δ_2 ∈ (d)"),
    ("T3-wq", "w_q", 589_824, "∂w_q = a_2ᵗ Δ_raw k ∈ (d, d_ρ) per head"),
    ("T3-bq", "b_q", 768, "∂b_q = Σ_tok Δ_raw k ∈ (d_ρ) per head"),
    ("T3-wk", "w_k", 589_824, "∂w_k = (Δ_raw a_2)ᵗ q ∈ (d, d_ρ) per head"),
    ("T3-bk", "b_k", 768, "∂b_k = 0 ∈ (d_ρ) per head; autograd finds rounding, below 1e-10 of ∂b_q"),
    ("T3-wv", "w_v", 589_824, "∂w_v = (ρ a_2)ᵗ Δ_3^h ∈ (d, d_h) per head"),
    ("T3-bv", "b_v", 768, "∂b_v = Σ_tok Δ_3^h ∈ (d_h) per head"),
    ("T3-w3", "w_3", 589_824, "∂w_3 = a_3ᵗ Δ_5 ∈ (Σd_h, d)"),
    ("T3-b3", "b_3", 768, "∂b_3 = Σ_tok Δ_5 ∈ (d)"),
    ("T3-w5", "w_5", 768, "∂w_5 = diag(ā_5ᵗ Δ_6) ∈ (d)"),
    ("T3-b5", "b_5", 768, "∂b_5 = Σ_tok Δ_6 ∈ (d)"),
    ("T3-w6", "w_6", 2_359_296, "∂w_6 = a_6ᵗ Δ_7 ∈ (d, 4d)"),
    ("T3-b6", "b_6", 3072, "∂b_6 = Σ_tok Δ_7 ∈ (4d)"),
    ("T3-w8", "w_8", 2_359_296, "∂w_8 = a_8ᵗ Δ_10 ∈ (4d, d)"),
    ("T3-b8", "b_8", 768, "∂b_8 = Σ_tok Δ_10 ∈ (d)"),
    ("T3-w10", "w_10", 768, "∂w_10 = diag(ā_10ᵗ Δ_11) ∈ (d)"),
    ("T3-b10", "b_10", 768, "∂b_10 = Σ_tok Δ_11 ∈ (d)"),
    ("T3-w11", "w_11", 38_597_376, "∂w_11 = a_11ᵗ Δ_12 ∈ (d, n_vocab)"),
    ("T3-b11", "b_11", 50_257, "∂b_11 = Σ_tok Δ_12 ∈ (n_vocab)"),
    ("T3-d11", "d_11", 12_288, "∂d_11 = scale a_11ᵗ Δ_12 u_11ᵗ ∈ (d, r)"),
    ("T3-u11", "u_11", 804_112, "∂u_11 = scale (a_11 d_11)ᵗ Δ_12 ∈ (r, n_vocab)"),
]


def printed_size(symbol: str) -> int:
    """The number of entries that `plan` counts for a parameter of the paper's network, r = 16."""
    config = preset("paper")
    head = linear_layers(config)["lm_head"]
    sizes = {p.symbol: p.count for p in parameters(config)} | {"d_11": head.f_in * 16, "u_11": 16 * head.f_out}
    return sizes[symbol]


def of_network(p: Network, symbol: str) -> list[Tensor]:
    """All tensors of that symbol: one for the network, or one per block, or one per head of each block."""
    if symbol in ("d_11", "u_11"):
        return [] if p.adapter is None else [getattr(p.adapter, symbol)]
    if symbol in Network._fields:
        found = getattr(p, symbol)
        return [] if found is None else [found]
    if symbol in Block._fields:
        return [getattr(block, symbol) for block in p.blocks]
    assert symbol in Head._fields
    return [getattr(head, symbol) for block in p.blocks for head in block.heads]


def _loss_as_function_of(c: Case, target: Tensor) -> Callable[[Tensor], float]:
    """The reference loss as a function of one tensor of the network."""

    def f(x: Tensor) -> float:
        before = target.clone()
        target.copy_(x)
        network = weights_of_network(c.p)
        total = reference_loss(network, Choices(*c.o), c.ids, c.targets, lambda name, value: value).item()
        target.copy_(before)
        return float(total)

    return f


def _gradient_error(symbol: str, size: int, rng: RandomInputs) -> tuple[float, str]:
    worst, seen = 0.0, 0
    for c in cases(rng):
        ours, expected = of_network(c.b.grads, symbol), of_network(c.grads, symbol)
        scale = of_network(c.grads, "b_q") if symbol == "b_k" else expected  # the expected about b_k is 0
        for x, y, z in zip(ours, expected, scale, strict=True):
            worst = max(worst, relative_error(x, y, floor=z.abs().max().item()))
            seen += 1
    # finite differences as a second oracle, on a smooth network that has the symbol
    c = next(c for c in reversed(cases(rng)) if of_network(c.p, symbol))
    x = of_network(c.p, symbol)[0]
    floor = of_network(c.grads, "b_q" if symbol == "b_k" else symbol)[0].norm().item()
    f = _loss_as_function_of(c, x)
    differences = directional_error(f, x.clone(), of_network(c.b.grads, symbol)[0], rng.generator, floor)
    disagree = 0.0 if differences < FINITE_DIFFERENCE_TOLERANCE else differences
    count = mismatch((printed_size(symbol), size)) + shortfall(seen, 1)
    return worst + disagree + count, f"finite differences: {differences:.0e}; {size:,} entries"


for _id, _symbol, _size, _statement in _GRADIENTS:
    check(_id, TABLE_3, "Table 3", AUTOGRAD, _statement)(partial(_gradient_error, _symbol, _size))
