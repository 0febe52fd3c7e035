"""The reference: the same network in torch's own functions, so that autograd can differentiate it.

It shares no formula with `model/`. It computes the steps that a block lists, by its own rule for each kind of step, and
refuses a kind that it does not know. `reference_model.py` runs it on the weights of a model.
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
from ..model.config import ModelConfig, RotaryTable
from ..model.layers.experts import Experts
from ..model.layers.linear import Affine
from ..model.layers.sinks import Sinks
from ..model.layers.taps import Taps
from ..model.passes.objective import LogitDifference, MeanLoss, Objective, PositionLoss, RowObjective
from ..model.steps import Layer, Step, require, signal
from ..paper import rotary
from ..paper.transformer import Network, Options
from .reference_experts import MIXTURE_RULES, gated, mixture_of
from .reference_preferences import reference_preference

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


class Turn(NamedTuple):
    """The rotation of one block's queries and keys."""

    theta: Tensor  # (w/2) frequencies, of the first w features of a head
    factor: float = 1.0  # by which cos and sin are multiplied
    neighbors: bool = False  # planes are the features 2i and 2i + 1, not i and i + w/2
    beyond: tuple[int, Tensor] | None = None  # other frequencies of sequences longer than this


class Choices(NamedTuple):
    """What the reference has to know besides the weights."""

    g: str
    eps: float
    causal: bool
    norm: str = "layer"
    turns: tuple[Turn | None, ...] = ()  # per block; None: it does not rotate
    windows: tuple[int | None, ...] = ()  # per block
    logit_scale: float = 1.0
    logit_cap: float | None = None
    scale: float | None = None  # of scores; None: 1/√d_ρ
    cap: float | None = None  # of scores


def choices_of(config: ModelConfig) -> Choices:
    """The choices of a model."""
    blocks, tables = range(config.n_blocks), [_turn(config, table) for table in config.rotary_tables()]
    turns = (tables[config.rotary_table_of(i)] if config.rotated_block(i) else None for i in blocks)
    return Choices(
        config.activation, config.eps, config.causal, config.norm, (*turns,), tuple(map(config.window_of, blocks)),
        config.logit_scale, config.logit_cap, config.attention_scale, config.score_cap,
    )  # fmt: skip


def _turn(config: ModelConfig, table: RotaryTable) -> Turn:
    """The rotation with these frequencies, by the paper's forms."""
    d, base, x = config.rotary_width_of_head, table.base, table.scaling
    theta, n = rotary.frequencies(d, base), x.original_max_position_embeddings or 0
    plain = Turn(theta, neighbors=config.rotary_neighbors)
    if x.rope_type in ("default", "dynamic"):
        return plain
    if x.rope_type == "linear":
        return plain._replace(theta=rotary.linear(theta, x.factor))
    if x.rope_type == "llama3":
        share = rotary.llama3_share(theta, x.low_freq_factor, x.high_freq_factor, n)
        return plain._replace(theta=rotary.blend(theta, x.factor, share))
    if x.rope_type == "yarn":
        share = rotary.yarn_share(d, base, x.beta_fast or 32, x.beta_slow or 1, n, x.truncate)
        m = rotary.yarn_attention_factor(x.factor, x.mscale, x.mscale_all_dim)
        theta = rotary.blend(theta, x.factor, share)
        return plain._replace(theta=theta, factor=m if x.attention_factor is None else x.attention_factor)
    if x.rope_type == "longrope":
        short, long = (rotary.longrope(theta, [*(factors or ())]) for factors in (x.short_factor, x.long_factor))
        m = rotary.longrope_attention_factor(x.factor, n) if x.attention_factor is None else x.attention_factor
        return plain._replace(theta=short, factor=m, beyond=(n, long))
    raise HandgradError(f"the reference does not know the rotary frequencies {x.rope_type!r}")


class Rule(NamedTuple):
    """A step as the reference reads it."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    letters: tuple[str, ...] = ()  # of its parameters, those of a fused layer one by one
    scale: float = 1.0


# the block of the paper's Table 2
PAPER_RULES = (
    Rule("norm", ("a_1",), ("a_2",), ("1",)),
    Rule("attention", ("a_2",), ("a_3",)),
    Rule("linear", ("a_3",), ("a_4",), ("3",)),
    Rule("add", ("a_1", "a_4"), ("a_5",)),
    Rule("norm", ("a_5",), ("a_6",), ("5",)),
    Rule("linear", ("a_6",), ("a_7",), ("6",)),
    Rule("activation", ("a_7",), ("a_8",)),
    Rule("linear", ("a_8",), ("a_9",), ("8",)),
    Rule("add", ("a_5", "a_9"), ("a_10",)),
)


def block_weights(block: Block, config: ModelConfig) -> Weights:
    """The parameters of one block, and its steps; raises if the reference does not know one of them."""
    require(block.steps(), RULES, "the reference")
    pairs: Weights = {"rules": [_rule(step) for step in block.steps()]}
    if isinstance(block.mlp, Experts):
        pairs["mixture"] = mixture_of(block.mlp)
    for number, layer in block.numbered().items():
        w, b = weight_and_bias(layer)
        parts = layer.plain().parts if isinstance(layer, Affine) else {}
        if isinstance(layer, Affine) and parts:
            biases = [None] * len(parts) if b is None else [x.flatten() for x in layer.plain().split(b)]
            columns = [x.flatten(1) for x in layer.plain().split(w)]
            pairs |= dict(zip(parts, zip(columns, biases, strict=True), strict=True))
        else:
            pairs[number] = (w, b)
    for letter, heads in (("q", config.n_heads), ("k", config.kv_heads), ("v", config.kv_heads)):
        if letter in pairs:
            w, b = pairs[letter]
            biases = [None] * heads if b is None else b.chunk(heads)
            pairs[letter] = list(zip(w.chunk(heads, 1), biases, strict=True))
    return pairs


def _rule(step: Step) -> Rule:
    letters: list[str] = []
    for number, layer in step.layers.items():
        letters += [*layer.plain().parts] if isinstance(layer, Affine) and layer.plain().parts else [number]
    return Rule(step.kind, step.inputs, step.outputs, tuple(letters), step.scale)


def weight_and_bias(layer: Layer) -> Pair:
    """What multiplies and what is added, as a function of the layer's parameters. DoRA's column norms are constants."""
    if isinstance(layer, Affine):
        return layer.effective_weight(), layer.plain().added_bias()
    if isinstance(layer, Taps):
        return layer.weight, layer.bias
    return layer.weight if isinstance(layer, Sinks) else layer.weight + layer.offset, getattr(layer, "bias", None)


def weights_of_network(p: Network) -> tuple[Weights, list[Weights]]:
    """The same of a network in the paper's form."""
    w_11 = p.w_tok.T if p.w_11 is None else p.w_11
    outside: Weights = {"w_tok": (p.w_tok, None), "w_pos": (p.w_pos, None), "10": (p.w_10, p.b_10)}
    outside |= {"11": (w_11, p.b_11), "adapter": p.adapter}
    blocks: list[Weights] = []
    for block in p.blocks:
        pairs: Weights = {n: (getattr(block, f"w_{n}"), getattr(block, f"b_{n}")) for n in "13568"}
        pairs["rules"] = PAPER_RULES
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


def reference_objective(objective: Objective, targets: Tensor, lengths: tuple[int, ...]) -> Change:
    """The logits (n, V) → what is differentiated. Raises if the reference does not know it; it knows no subclasses."""
    if type(objective) is MeanLoss:
        return lambda logits: F.cross_entropy(logits, targets)  # torch ignores −100 too
    if type(objective) is PositionLoss:
        t = objective.position
        return lambda logits: F.cross_entropy(logits[t], targets[t])
    if type(objective) is LogitDifference:
        t, token, against = objective.position, objective.token, objective.against
        return lambda logits: logits[t, token] - logits[t, against]
    if isinstance(objective, RowObjective) and (found := reference_preference(objective, targets, lengths)) is not None:
        return found
    raise HandgradError(
        f"the reference does not know the objective {type(objective).__name__}, so it cannot judge its gradients; it"
        " knows the mean loss, PositionLoss, LogitDifference, and the losses of preferences and rewards"
    )


class At(NamedTuple):
    """Where a step is computed."""

    block: Weights
    choices: Choices
    i: int
    hook: Hook  # sees, and may change, an activation of the block
    inside: Change | None = None


def reference_block(block: Weights, c: Choices, i: int, a: Tensor, hook: Hook, inside: Change | None = None) -> Tensor:
    """a_1 → a_10 of block i for one sequence. `inside` changes the centered input within a norm, queries, keys and values,
    and the sum within softmax."""
    at = At(block, c, i, lambda name, x: hook(f"blocks.{i}.{name}", x), inside)
    found = {"a_1": at.hook("a_1", a)}
    for rule in block["rules"]:
        if missing := [name for name in rule.inputs if name not in found]:
            raise HandgradError(f"block {i} lists a step that reads {missing[0]} before another one computes it")
        results = RULES[rule.kind](rule, [found[name] for name in rule.inputs], at)
        found |= {name: at.hook(name, x) for name, x in zip(rule.outputs, results, strict=True)}
    return found["a_10"]


def _norm(rule: Rule, given: list[Tensor], at: At) -> list[Tensor]:
    return [reference_norm(given[0], at.block[rule.letters[0]], at.choices.norm, at.choices.eps, at.inside)]


def _attention(rule: Rule, given: list[Tensor], at: At) -> list[Tensor]:
    block, c, inside = at.block, at.choices, at.inside
    q, k, v = ([affine(given[0], pair) for pair in block[letter]] for letter in "qkv")
    q, k = (turned(x, block.get(f"{letter}_norm"), c, at.i, inside) for letter, x in (("q", q), ("k", k)))
    if inside is not None:
        q, k, v = ([inside(x) for x in heads] for heads in (q, k, v))
    seen = scores(q, k, c, at.i, lambda name, x: at.hook(f"a_{name}", x))
    every = with_sink(seen, block.get("sink"))
    if inside is None:
        rho = F.softmax(every, -1)[..., : len(given[0])]
    else:  # the sum that its backward pass subtracts cancels where softmax saturates
        rho = torch.exp(seen - inside(torch.logsumexp(every, -1, keepdim=True)))
    return [weighted(rho, v)]


def _convolution(rule: Rule, given: list[Tensor], at: At) -> list[Tensor]:
    b_gate, c_gate, x = given
    z = at.hook("a_z", b_gate * x)
    return [c_gate * at.hook("a_conv", convolved(z, at.block[rule.letters[0]]))]


def convolved(z: Tensor, pair: Pair) -> Tensor:
    """z (n, d) → c, by torch's convolution with a group for each feature"""
    w, b = pair
    return F.conv1d(F.pad(z.T[None], (w.shape[2] - 1, 0)), w, b, groups=len(w))[0].T


def _linear(rule: Rule, given: list[Tensor], at: At) -> list[Tensor]:
    return [affine(given[0], at.block[letter]) for letter in rule.letters]


def _activation(rule: Rule, given: list[Tensor], at: At) -> list[Tensor]:
    return [ACTIVATIONS[at.choices.g](given[0])]


def _gated(rule: Rule, given: list[Tensor], at: At) -> list[Tensor]:
    return [gated(at.choices.g, *given)]


def _add(rule: Rule, given: list[Tensor], at: At) -> list[Tensor]:
    stream, *branches = given
    return [stream + rule.scale * torch.stack(branches).sum(0)]


# what the reference knows: a rule for each kind of step
RULES: dict[str, Callable[[Rule, list[Tensor], At], list[Tensor]]] = {
    "norm": _norm, "attention": _attention, "convolution": _convolution, "linear": _linear, "activation": _activation,
    "gated": _gated, "add": _add,
    **MIXTURE_RULES,
}  # fmt: skip


def reference_logits(a_12: Tensor, c: Choices) -> Tensor:
    """What the softmax reads: s a_12, or c tanh(s a_12/c)"""
    scaled = a_12 * c.logit_scale
    return scaled if c.logit_cap is None else c.logit_cap * torch.tanh(scaled / c.logit_cap)


def turned(heads: list[Tensor], gain: Pair | None, c: Choices, i: int, inside: Change | None = None) -> list[Tensor]:
    """The queries or the keys of every head of block i, normalized if there is a gain, and rotated"""
    if gain is not None and len(gain[0]) > heads[0].shape[1]:  # over all heads together
        width = heads[0].shape[1]
        heads = [*torch.split(reference_norm(torch.cat(heads, 1), gain, "rms", c.eps, inside), width, 1)]
    elif gain is not None:
        heads = [reference_norm(x, gain, "rms", c.eps, inside) for x in heads]
    turn = c.turns[i] if c.turns else None
    return heads if turn is None else [_rotate(x, turn) for x in heads]


def scores(q: list[Tensor], k: list[Tensor], c: Choices, i: int, at: Hook) -> Tensor:
    """q kᵗ/√d_ρ of every head, scaled and capped as the model does, −∞ where a query does not see a key. (h, n, n)"""
    group = len(q) // len(k)  # queries that share a key and a value
    raw = at("raw", torch.stack([x @ k[h // group].T for h, x in enumerate(q)]))
    roots = [math.sqrt(x.shape[1]) if c.scale is None else 1 / c.scale for x in q]  # heads of the paper may differ
    scaled = torch.stack([x / root for x, root in zip(raw, roots, strict=True)])
    capped = at("causal", scaled if c.cap is None else c.cap * torch.tanh(scaled / c.cap))
    return capped.masked_fill(_hidden(capped.shape[1], c, i, capped.device), -math.inf)


def with_sink(seen: Tensor, sink: Pair | None) -> Tensor:
    """The scores, and as a last column every head's sink if it has one. (h, n, n + 1)"""
    return seen if sink is None else torch.cat([seen, sink[0][:, None, None].expand(*seen.shape[:2], 1)], -1)


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


def _rotate(x: Tensor, turn: Turn) -> Tensor:
    """The two features of a plane as a complex number, times m e^(iθt)"""
    theta = turn.theta if turn.beyond is None or len(x) <= turn.beyond[0] else turn.beyond[1]
    angle = torch.arange(len(x), dtype=torch.float64, device=x.device)[:, None] * theta.to(x.device)
    x, rest = torch.split(x, [2 * len(theta), x.shape[1] - 2 * len(theta)], 1)
    first, second = (x[:, 0::2], x[:, 1::2]) if turn.neighbors else x.chunk(2, 1)
    z = torch.complex(first.contiguous(), second.contiguous()) * torch.polar(torch.full_like(angle, turn.factor), angle)
    planes = torch.stack([z.real, z.imag], 2).flatten(1) if turn.neighbors else torch.cat([z.real, z.imag], 1)
    return torch.cat([planes, rest], 1)


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
