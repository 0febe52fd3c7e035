"""The reference: the same network in torch's own functions, so that autograd can differentiate it.

It is written independently of `model/`, and knows the steps of a block by itself: a block with another list is refused.
`reference_model.py` runs it on the weights of a model.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import HandgradError
from ..model.block import Block
from ..model.config import ModelConfig
from ..model.layers.linear import Affine
from ..model.layers.norms import Norm
from ..model.layers.taps import Taps
from ..model.passes.objective import LogitDifference, MeanLoss, Objective, PositionLoss
from ..model.steps import require_block, signal
from ..paper import rotary
from ..paper.transformer import Network, Options

Hook = Callable[[str, Tensor], Tensor]  # the name of an activation, and the activation → the one to go on with
Change = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor | None]  # weight (f_in, f_out) and bias
Weights = dict[str, Any]  # pairs by the paper's number or letter; for q, k and v a list of pairs, one per head

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
GATES = {**ACTIVATIONS, "silu": F.silu}


class Choices(NamedTuple):
    """What the reference has to know besides the weights."""

    g: str
    eps: float
    causal: bool
    norm: str = "layer"
    gated: bool = False
    theta: Tensor | None = None  # (d_ρ/2) frequencies of rotary positions
    factor: float = 1.0  # the attention factor of rotary positions
    rotated: tuple[bool, ...] = ()  # per block
    windows: tuple[int | None, ...] = ()  # per block


def choices_of(config: ModelConfig) -> Choices:
    """The choices of a model."""
    theta, factor = _frequencies(config) if config.positions == "rotary" else (None, 1.0)
    blocks = range(config.n_blocks)
    return Choices(
        config.activation, config.eps, config.causal, config.norm, config.gated, theta, factor,
        tuple(map(config.rotated_block, blocks)), tuple(map(config.window_of, blocks)),
    )  # fmt: skip


def _frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """θ (d_ρ/2) and the attention factor m, by the paper's forms."""
    d, base, x = config.query_width, config.rope_base, config.rope_scaling
    theta, n = rotary.frequencies(d, base), x.original_max_position_embeddings or 0
    if x.rope_type == "linear":
        return rotary.linear(theta, x.factor), 1.0
    if x.rope_type == "llama3":
        return rotary.blend(theta, x.factor, rotary.llama3_share(theta, x.low_freq_factor, x.high_freq_factor, n)), 1.0
    if x.rope_type == "yarn":
        share = rotary.yarn_share(d, base, x.beta_fast or 32, x.beta_slow or 1, n, x.truncate)
        m = rotary.yarn_attention_factor(x.factor, x.mscale, x.mscale_all_dim)
        return rotary.blend(theta, x.factor, share), m if x.attention_factor is None else x.attention_factor
    if x.rope_type != "default":
        raise HandgradError(f"the reference does not know the rotary frequencies {x.rope_type!r}")
    return theta, 1.0


def block_weights(block: Block, config: ModelConfig) -> Weights:
    """The parameters of one block; raises if the reference does not know one of its steps."""
    require_block(block.steps(), "the reference")
    pairs: Weights = {}
    for number, layer in block.numbered().items():
        w, b = weight_and_bias(layer)
        parts = layer.plain().parts if isinstance(layer, Affine) else {}
        if parts:
            widths = list(parts.values())
            biases = [None] * len(widths) if b is None else torch.split(b, widths)
            pairs |= dict(zip(parts, zip(torch.split(w, widths, 1), biases, strict=True), strict=True))
        else:
            pairs[number] = (w, b)
    if "conv" in pairs:
        return pairs
    for letter, heads in (("q", config.n_heads), ("k", config.kv_heads), ("v", config.kv_heads)):
        w, b = pairs[letter]
        biases = [None] * heads if b is None else b.chunk(heads)
        pairs[letter] = list(zip(w.chunk(heads, 1), biases, strict=True))
    return pairs


def weight_and_bias(layer: Affine | Norm | Taps) -> Pair:
    """What multiplies and what is added, as a function of the layer's parameters. DoRA's column norms are constants."""
    if isinstance(layer, Affine):
        return layer.effective_weight(), layer.plain().added_bias()
    return layer.weight, getattr(layer, "bias", None)


def weights_of_network(p: Network) -> tuple[Weights, list[Weights]]:
    """The same of a network in the paper's form."""
    w_11 = p.w_tok.T if p.w_11 is None else p.w_11
    outside: Weights = {"w_tok": (p.w_tok, None), "w_pos": (p.w_pos, None), "10": (p.w_10, p.b_10)}
    outside |= {"11": (w_11, p.b_11), "adapter": p.adapter}
    blocks: list[Weights] = []
    for block in p.blocks:
        pairs: Weights = {n: (getattr(block, f"w_{n}"), getattr(block, f"b_{n}")) for n in "13568"}
        for letter in "qkv":
            pairs[letter] = [(getattr(head, f"w_{letter}"), getattr(head, f"b_{letter}")) for head in block.heads]
        blocks.append(pairs)
    return outside, blocks


def reference_loss(
    weights: tuple[Weights, list[Weights]], c: Choices, ids: Tensor, targets: Tensor, hook: Hook
) -> Tensor:
    """The loss of one sequence, summed over its targets. Every activation is replaced by hook(name, activation), which may
    record or change it."""
    outside, blocks = weights
    a = F.embedding(ids, outside["w_tok"][0]) + outside["w_pos"][0][: len(ids)]
    for i, block in enumerate(blocks):
        a = reference_block(block, c, i, a, hook)
    a_11 = hook("a_11", reference_norm(a, outside["10"], c.norm, c.eps))
    logits = affine(a_11, outside["11"])
    if outside["adapter"] is not None:
        d_11, u_11, scale = outside["adapter"]
        logits = logits + scale * (a_11 @ d_11 @ u_11)
    return F.cross_entropy(hook("a_12", logits), targets, reduction="sum")


def reference_objective(objective: Objective, targets: Tensor) -> Change:
    """The logits (n, V) → what is differentiated. Raises if the reference does not know it; it knows no subclasses."""
    if type(objective) is MeanLoss:
        return lambda logits: F.cross_entropy(logits, targets)  # torch ignores −100 too
    if type(objective) is PositionLoss:
        t = objective.position
        return lambda logits: F.cross_entropy(logits[t], targets[t])
    if type(objective) is LogitDifference:
        t, token, against = objective.position, objective.token, objective.against
        return lambda logits: logits[t, token] - logits[t, against]
    raise HandgradError(
        f"the reference does not know the objective {type(objective).__name__}, so it cannot judge its gradients; it"
        " knows the mean loss, PositionLoss and LogitDifference"
    )


def reference_block(block: Weights, c: Choices, i: int, a: Tensor, hook: Hook, inside: Change | None = None) -> Tensor:
    """a_1 → a_10 of block i for one sequence. `inside` changes the centered input within a norm, queries, keys and values,
    and the sum within softmax."""

    def at(name: str, x: Tensor) -> Tensor:
        return hook(f"blocks.{i}.a_{name}", x)

    def norm(a: Tensor, pair: Pair) -> Tensor:
        return reference_norm(a, pair, c.norm, c.eps, inside)

    a_1 = at("1", a)
    a_2 = at("2", norm(a_1, block["1"]))
    a_3 = at("3", _convolution(block, a_2, at) if "conv" in block else _attention(block, c, i, a_2, at, inside))
    a_4 = at("4", affine(a_3, block["3"]))
    a_5 = at("5", a_1 + a_4)
    a_6 = at("6", norm(a_5, block["5"]))
    if c.gated:
        gate, up = (at(name, affine(a_6, block[name])) for name in ("gate", "up"))
        a_8 = at("8", GATES[c.g](gate) * up)
    else:
        a_8 = at("8", ACTIVATIONS[c.g](at("7", affine(a_6, block["6"]))))
    a_9 = at("9", affine(a_8, block["8"]))
    return at("10", a_5 + a_9)


def _attention(block: Weights, c: Choices, i: int, a_2: Tensor, at: Hook, inside: Change | None) -> Tensor:
    """a_2 → a_3 of block i"""
    q, k, v = ([affine(a_2, pair) for pair in block[letter]] for letter in "qkv")
    q, k = (turned(x, block.get(f"{letter}_norm"), c, i, inside) for letter, x in (("q", q), ("k", k)))
    if inside is not None:
        q, k, v = ([inside(x) for x in heads] for heads in (q, k, v))
    seen = scores(q, k, c, i, at)
    if inside is None:
        rho = F.softmax(seen, -1)
    else:  # the sum that its backward pass subtracts cancels where softmax saturates
        rho = torch.exp(seen - inside(torch.logsumexp(seen, -1, keepdim=True)))
    return weighted(rho, v)


def _convolution(block: Weights, a_2: Tensor, at: Hook) -> Tensor:
    """a_2 → B, C, x → a_3"""
    b_gate, c_gate, x = (at(letter, affine(a_2, block[letter])) for letter in ("B", "C", "x"))
    return c_gate * at("conv", convolved(at("z", b_gate * x), block["conv"]))


def convolved(z: Tensor, pair: Pair) -> Tensor:
    """z (n, d) → c, by torch's convolution with a group for each feature"""
    w, b = pair
    return F.conv1d(F.pad(z.T[None], (w.shape[2] - 1, 0)), w, b, groups=len(w))[0].T


def turned(heads: list[Tensor], gain: Pair | None, c: Choices, i: int, inside: Change | None = None) -> list[Tensor]:
    """The queries or the keys of every head of block i, normalized if there is a gain, and rotated"""
    if gain is not None:
        heads = [reference_norm(x, gain, "rms", c.eps, inside) for x in heads]
    return [_rotate(x, c) for x in heads] if c.rotated and c.rotated[i] else heads


def scores(q: list[Tensor], k: list[Tensor], c: Choices, i: int, at: Hook) -> Tensor:
    """q kᵗ/√d_ρ of every head, −∞ where a query does not see a key. (h, n, n)"""
    group = len(q) // len(k)  # queries that share a key and a value
    raw = at("raw", torch.stack([x @ k[h // group].T for h, x in enumerate(q)]))
    scaled = at("causal", torch.stack([x / math.sqrt(y.shape[1]) for x, y in zip(raw, q, strict=True)]))
    return scaled.masked_fill(_hidden(scaled.shape[1], c, i, scaled.device), -math.inf)


def weighted(rho: Tensor, v: list[Tensor]) -> Tensor:
    """ρ v of every head, side by side"""
    return torch.cat([r @ v[h // (len(rho) // len(v))] for h, r in enumerate(rho)], 1)


def affine(a: Tensor, pair: Pair) -> Tensor:
    """a w + b"""
    w, b = pair
    return a @ w if b is None else a @ w + b


def reference_norm(a: Tensor, pair: Pair, kind: str, eps: float, inside: Change | None = None) -> Tensor:
    """LayerNorm ("layer") or RMSNorm of every row"""
    w, b = pair
    if inside is not None:
        centered = a - a.mean(-1, keepdim=True) if kind == "layer" else a
        a_bar = inside(centered) * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
        return a_bar * w if b is None else a_bar * w + b
    return F.layer_norm(a, w.shape, w, b, eps) if kind == "layer" else F.rms_norm(a, w.shape, w, eps)


def _rotate(x: Tensor, c: Choices) -> Tensor:
    """Features i and i + d_ρ/2 as a complex number, times m e^(iθt)"""
    assert c.theta is not None
    angle = torch.arange(len(x), dtype=torch.float64, device=x.device)[:, None] * c.theta.to(x.device)
    turned = torch.complex(*x.chunk(2, 1)) * torch.polar(torch.full_like(angle, c.factor), angle)
    return torch.cat([turned.real, turned.imag], 1)


def _hidden(n: int, c: Choices, i: int, device: torch.device) -> Tensor:
    """True where a query must not see a key."""
    everything = torch.ones(n, n, dtype=torch.bool, device=device)
    hidden = everything.triu(1) if c.causal else ~everything
    window = c.windows[i] if c.windows else None
    return hidden if window is None else hidden | everything.tril(-window)


class Reference(NamedTuple):
    """What the reference model and autograd compute."""

    loss: float
    values: dict[str, Tensor]  # activations by name
    deltas: dict[str, Tensor]  # error signals by name
    grads: dict[str, Tensor]  # by parameter name


def network_reference(p: Network, o: Options, ids: Tensor, targets: Tensor) -> tuple[Reference, Network]:
    """Autograd on a network in the paper's form: values and Δ by name, and the gradients as a Network."""
    flat, shape = tree_flatten(p)
    leaves = [x.detach().clone().requires_grad_() if isinstance(x, Tensor) else x for x in flat]
    seen: dict[str, Tensor] = {}

    def visit(name: str, x: Tensor) -> Tensor:
        seen[name] = x
        return x

    with torch.enable_grad():
        network = weights_of_network(tree_unflatten(leaves, shape))
        loss = reference_loss(network, Choices(*o), ids, targets, visit)
        parameters = [x for x in leaves if isinstance(x, Tensor)]
        wanted = [*seen.values(), *parameters]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    found = iter([torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)])
    values = {name: x.detach() for name, x in seen.items()}
    reference = Reference(loss.item(), values, {signal(name): next(found) for name in seen}, {})
    return reference, tree_unflatten([next(found) if isinstance(x, Tensor) else x for x in leaves], shape)
