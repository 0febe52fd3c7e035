"""The reference model: the same network in torch's own functions, differentiated by autograd."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..adapters.injection import adapters_of
from ..adapters.lora import LoRA
from ..model.block import Block
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..model.layers import Affine
from ..model.norms import Norm
from ..model.objective import MEAN_LOSS, LogitDifference, Objective
from ..ops import rotary
from ..paper.transformer import Network, Options

Hook = Callable[[str, Tensor], Tensor]
Inside = Callable[[Tensor], Tensor]
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
    theta, factor = None, 1.0
    if config.positions == "rotary":
        theta, factor = rotary.frequencies(config.query_width, config.rope_base, config.rope_scaling, torch.float64)
    blocks = range(config.n_blocks)
    return Choices(
        config.activation, config.eps, config.causal, config.norm, config.gated, theta, factor,
        tuple(map(config.rotated_block, blocks)), tuple(map(config.window_of, blocks)),
    )  # fmt: skip


def weights_of(model: GPT) -> tuple[Weights, list[Weights]]:
    """The model's parameters outside the blocks and of every block: views and sums of the model's tensors."""
    outside: Weights = {name: (table.w, None) for name, table in model.tables().items()}
    outside |= {"10": _pair(model.final_norm), "11": _pair(model.head)}
    return outside, [block_weights(block, model.config) for block in model.blocks]


def block_weights(block: Block, config: ModelConfig) -> Weights:
    """The parameters of one block."""
    pairs: Weights = {}
    for number, layer in block.numbered().items():
        w, b = _pair(layer)
        parts = layer.plain().parts if isinstance(layer, Affine) else {}
        if parts:
            widths = list(parts.values())
            biases = [None] * len(widths) if b is None else torch.split(b, widths)
            pairs |= dict(zip(parts, zip(torch.split(w, widths, 1), biases, strict=True), strict=True))
        else:
            pairs[number] = (w, b)
    for letter, heads in (("q", config.n_heads), ("k", config.kv_heads), ("v", config.kv_heads)):
        w, b = pairs[letter]
        biases = [None] * heads if b is None else b.chunk(heads)
        pairs[letter] = list(zip(w.chunk(heads, 1), biases, strict=True))
    return pairs


def _pair(layer: Affine | Norm) -> Pair:
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
    weights: tuple[Weights, list[Weights]],
    c: Choices,
    ids: Tensor,
    targets: Tensor,
    hook: Hook,
    objective: Objective = MEAN_LOSS,
    inside: Inside | None = None,
) -> Tensor:
    """The loss of one sequence, summed over its targets, or another objective, with torch's own functions. Every
    intermediate is replaced by hook(name of its Δ, intermediate), which may record or change it; `inside` changes the
    centred input within a norm, queries, keys and values, and the sum within softmax."""
    outside, blocks = weights
    a = F.embedding(ids, outside["w_tok"][0])
    if "w_pos" in outside:
        a = a + outside["w_pos"][0][: len(ids)]
    for i, block in enumerate(blocks):
        a = reference_block(block, c, i, a, hook, inside)
    a_11 = hook("delta_11", reference_norm(a, outside["10"], c.norm, c.eps, inside))
    logits = _affine(a_11, outside["11"])
    if outside.get("adapter") is not None:
        d_11, u_11, scale = outside["adapter"]
        logits = logits + scale * (a_11 @ d_11 @ u_11)
    return reference_objective(hook("delta_12", logits), targets, objective)


def reference_objective(logits: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """The loss summed over the targets, or another objective."""
    if isinstance(objective, LogitDifference):
        chosen = logits[targets >= 0]
        return (chosen[:, objective.token] - chosen[:, objective.against]).sum()
    return F.cross_entropy(logits, targets, reduction="sum")  # torch ignores −100 too


def reference_block(block: Weights, c: Choices, i: int, a: Tensor, hook: Hook, inside: Inside | None = None) -> Tensor:
    """a_1 → a_10 of block i for one sequence."""
    n = len(a)

    def at(name: str, x: Tensor) -> Tensor:
        return hook(f"blocks.{i}.delta_{name}", x)

    def norm(a: Tensor, pair: Pair, kind: str = c.norm) -> Tensor:
        return reference_norm(a, pair, kind, c.eps, inside)

    a_1 = at("1", a)
    a_2 = at("2", norm(a_1, block["1"]))
    q, k, v = ([_affine(a_2, pair) for pair in block[letter]] for letter in "qkv")
    if "q_norm" in block:
        q, k = ([norm(x, block[f"{letter}_norm"], "rms") for x in heads] for letter, heads in (("q", q), ("k", k)))
    if c.rotated and c.rotated[i]:
        q, k = ([_rotate(x, c) for x in heads] for heads in (q, k))
    if inside is not None:
        q, k, v = ([inside(x) for x in heads] for heads in (q, k, v))
    group = len(q) // len(k)  # queries that share a key and a value
    raw = at("raw", torch.stack([x @ k[h // group].T for h, x in enumerate(q)]))
    scaled = at("causal", torch.stack([x / math.sqrt(y.shape[1]) for x, y in zip(raw, q, strict=True)]))
    seen = scaled.masked_fill(_hidden(n, c, i, a.device), -math.inf)
    if inside is None:
        rho = F.softmax(seen, -1)
    else:  # the sum that its backward pass subtracts cancels where softmax saturates
        rho = torch.exp(seen - inside(torch.logsumexp(seen, -1, keepdim=True)))
    a_3 = at("3", torch.cat([r @ v[h // group] for h, r in enumerate(rho)], 1))
    a_4 = at("4", _affine(a_3, block["3"]))
    a_5 = at("5", a_1 + a_4)
    a_6 = at("6", norm(a_5, block["5"]))
    if c.gated:
        gate, up = (at(name, _affine(a_6, block[name])) for name in ("gate", "up"))
        a_8 = at("8", GATES[c.g](gate) * up)
    else:
        a_8 = at("8", ACTIVATIONS[c.g](at("7", _affine(a_6, block["6"]))))
    a_9 = at("9", _affine(a_8, block["8"]))
    return at("10", a_5 + a_9)


def _affine(a: Tensor, pair: Pair) -> Tensor:
    w, b = pair
    return a @ w if b is None else a @ w + b


def reference_norm(a: Tensor, pair: Pair, kind: str, eps: float, inside: Inside | None = None) -> Tensor:
    w, b = pair
    if inside is not None:
        centred = a - a.mean(-1, keepdim=True) if kind == "layer" else a
        a_bar = inside(centred) * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
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
    values: dict[str, Tensor]  # activations, by the name of their Δ
    deltas: dict[str, Tensor]
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
    reference = Reference(loss.item(), values, {name: next(found) for name in seen}, {})
    return reference, tree_unflatten([next(found) if isinstance(x, Tensor) else x for x in leaves], shape)


class Part(NamedTuple):
    """What autograd computes of one part of a network, given the error signal of its output."""

    out: Tensor
    values: dict[str, Tensor]  # intermediates, by the name of their Δ
    deltas: dict[str, Tensor]
    delta: Tensor  # of the input
    grads: list[Tensor]


def differentiate_part(
    f: Callable[[Tensor, Hook], Tensor],
    a: Tensor,
    parameters: Sequence[Tensor] = (),
    upstream: Tensor | None = None,
) -> Part:
    """Autograd through f(a, hook) and its parameters, from the Δ of its output; None for a scalar."""
    seen: dict[str, Tensor] = {}

    def visit(name: str, x: Tensor) -> Tensor:
        seen[name] = x
        return x

    for p in parameters:
        p.requires_grad_(True)
    with torch.enable_grad():
        leaf = a.detach().clone().requires_grad_()
        out = f(leaf, visit)
        total = out if upstream is None else (out * upstream).sum()
        wanted = [*seen.values(), leaf, *parameters]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
    values = {name: x.detach() for name, x in seen.items()}
    n = len(seen)
    return Part(out.detach(), values, dict(zip(seen, found, strict=False)), found[n], found[n + 1 :])


class ReferenceModel:
    """The reference for a model on a packed batch: its loss, and by autograd every Δ and every parameter's gradient."""

    def __init__(
        self,
        model: GPT,
        tokens: Tensor,
        targets: Tensor,
        lengths: list[int] | None,
        objective: Objective = MEAN_LOSS,
    ):
        self.model, self.objective = model, objective
        targets = objective.select(targets, model.config.n_vocab)
        batch = model.pack(tokens, lengths)
        self.lengths, self.ids = batch.lengths, batch.ids
        self.targets = targets.reshape(-1).to(self.ids)
        self.n_targets = int((self.targets != -100).sum())
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        self.pause: Callable[[], None] = lambda: None
        self.inside: Inside | None = None  # applied within norms and attention, whose terms may cancel

    def loss(self, visit: Callable[[int, str, Tensor], Tensor]) -> Tensor:
        """The mean loss, or the objective. `visit(start, name, x)` replaces each intermediate of the sequence that begins
        in row `start`."""
        weights, choices = weights_of(self.model), choices_of(self.model.config)
        total = self.ids.new_zeros((), dtype=torch.float64)
        for start, n in zip(self.starts, self.lengths, strict=True):
            rows = slice(start, start + n)

            def hook(name: str, x: Tensor, start: int = start) -> Tensor:
                self.pause()
                return visit(start, name, x)

            ids, wanted = self.ids[rows], self.targets[rows]
            total = total + reference_loss(weights, choices, ids, wanted, hook, self.objective, self.inside)
        return total / self.n_targets

    def differentiate(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> Reference:
        """Every value, Δ and gradient of the batch. `change` is applied to every intermediate: it may round."""
        seen: dict[str, list[Tensor]] = {}

        def visit(start: int, name: str, x: Tensor) -> Tensor:
            x = x if x.requires_grad else x.detach().requires_grad_()  # nothing below it is a parameter: packed weights
            x = change(x)
            seen.setdefault(name, []).append(x)
            return x

        parameters = dict(self.model.named_parameters())
        frozen = [p for p in parameters.values() if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)  # so that every intermediate is on the graph
        with torch.enable_grad():
            loss = self.loss(visit)
            flat = [x for parts in seen.values() for x in parts]
            wanted = [*flat, *parameters.values()]
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        for p in frozen:
            p.requires_grad_(False)
        found = iter([torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)])
        values = {name: self._assemble(parts) for name, parts in seen.items()}
        deltas = {name: self._assemble([next(found) for _ in parts]) for name, parts in seen.items()}
        return Reference(loss.item(), values, deltas, {name: next(found) for name in parameters})

    def loss_with(self, name: str, change: Tensor) -> float:
        """The loss with `change` added to the intermediate of that name; an empty name changes nothing."""

        def visit(start: int, here: str, x: Tensor) -> Tensor:
            if here != name:
                return x
            rows = slice(start, start + x.shape[-2])
            return x + (change[:, rows, rows] if x.ndim == 3 else change[rows])

        with torch.no_grad():
            return self.loss(visit).item()

    def plain_loss(self) -> float:
        return self.loss_with("", self.ids)

    def _assemble(self, parts: list[Tensor]) -> Tensor:
        """Join the sequences: rows (n, d) are concatenated, maps (h, n, n) are put on the diagonal of one map."""
        parts = [x.detach() for x in parts]
        if parts[0].ndim == 2:
            return torch.cat(parts)
        n = sum(self.lengths)
        joined = parts[0].new_zeros(parts[0].shape[0], n, n)
        for start, x in zip(self.starts, parts, strict=True):
            rows = slice(start, start + x.shape[-1])
            joined[:, rows, rows] = x
        return joined


def float64_copy(model: GPT) -> GPT:
    """A copy of the model in float64, without dropout."""
    return in_float64(copy.deepcopy(model))


def in_float64(model: GPT) -> GPT:
    """Convert the model itself to float64, switch dropout off, and hold DoRA's column norms constant."""
    model = model.double().eval()
    for adapter in adapters_of(model).values():
        if adapter.magnitude is not None:
            hold_norms(adapter)
    return model


def hold_norms(layer: LoRA, norms: Tensor | None = None) -> None:
    """DoRA treats its column norms as constants: keep them fixed while finite differences change a factor."""
    held = layer.column_norms() if norms is None else norms
    layer.column_norms = lambda: held  # type: ignore[method-assign]
