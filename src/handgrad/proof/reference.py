"""The reference model: the same network in torch's own functions, differentiated by autograd."""

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..adapters.injection import adapters_of
from ..adapters.lora import LoRA
from ..errors import HandgradError
from ..model.config import GPTConfig
from ..model.gpt import GPT
from ..model.layers import Affine
from ..paper.attention import Head
from ..paper.transformer import Block, Network, Options


def options_of(config: GPTConfig) -> Options:
    return Options(config.activation, config.eps, config.causal)


def network_of(model: GPT) -> Network:
    """The model's parameters in the paper's form, head by head: views and sums of the model's tensors."""

    def weight_and_bias(layer: Affine) -> tuple[Tensor, Tensor]:
        bias = layer.plain().bias
        if bias is None:
            raise HandgradError("cannot verify a block whose linear layers have no bias: give every Linear a bias")
        return layer.effective_weight(), bias

    def heads(layer: Affine) -> list[Head]:
        h, d_rho, d_h = model.config.n_heads, model.config.query_width, model.config.value_width
        widths = [h * d_rho, h * d_rho, h * d_h]
        weight, bias = weight_and_bias(layer)
        w = [x.chunk(h, 1) for x in torch.split(weight, widths, 1)]
        if model.config.key_bias:
            b = [x.chunk(h) for x in torch.split(bias, widths)]
        else:
            b = [x.chunk(h) for x in torch.split(bias, [h * d_rho, h * d_h])]
            b.insert(1, (None,) * h)  # type: ignore[arg-type]
        return [Head(w[0][i], b[0][i], w[1][i], b[1][i], w[2][i], b[2][i]) for i in range(h)]

    t = model.transformer
    blocks = []
    for block in model.blocks:
        w_3, b_3 = weight_and_bias(block.attn.c_proj)
        w_6, b_6 = weight_and_bias(block.mlp.c_fc)
        w_8, b_8 = weight_and_bias(block.mlp.c_proj)
        blocks.append(
            Block(
                block.ln_1.weight, block.ln_1.bias, heads(block.attn.c_attn), w_3, b_3,
                block.ln_2.weight, block.ln_2.bias, w_6, b_6, w_8, b_8,
            )
        )  # fmt: skip
    tied = model.config.tied and not model.lm_head.adapted
    w_11 = None if tied else model.lm_head.effective_weight()
    b_11 = model.lm_head.plain().bias
    return Network(t.wte.weight, t.wpe.weight, blocks, t.ln_f.weight, t.ln_f.bias, w_11, b_11)


Hook = Callable[[str, Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def reference_loss(p: Network, o: Options, ids: Tensor, targets: Tensor, hook: Hook) -> Tensor:
    """The loss of one sequence, summed over its targets, with torch's own functions. Every intermediate is replaced by
    hook(name of its Δ, intermediate), which may record or change it."""
    n = len(ids)
    future = torch.ones(n, n, dtype=torch.bool, device=ids.device).triu(1)
    a = F.embedding(ids, p.w_tok) + p.w_pos[:n]
    for i, block in enumerate(p.blocks):

        def at(name: str, x: Tensor, i: int = i) -> Tensor:
            return hook(f"blocks.{i}.delta_{name}", x)

        a_1 = at("1", a)
        a_2 = at("2", F.layer_norm(a_1, block.w_1.shape, block.w_1, block.b_1, o.eps))
        q = [a_2 @ head.w_q + head.b_q for head in block.heads]
        k = [a_2 @ head.w_k + (0 if head.b_k is None else head.b_k) for head in block.heads]
        v = [a_2 @ head.w_v + head.b_v for head in block.heads]
        raw = at("raw", torch.stack([x @ y.T for x, y in zip(q, k, strict=True)]))
        scaled = at("causal", torch.stack([x / math.sqrt(y.shape[1]) for x, y in zip(raw, q, strict=True)]))
        rho = F.softmax(scaled.masked_fill(future, -math.inf) if o.causal else scaled, -1)
        a_3 = at("3", torch.cat([r @ x for r, x in zip(rho, v, strict=True)], 1))
        a_4 = at("4", a_3 @ block.w_3 + block.b_3)
        a_5 = at("5", a_1 + a_4)
        a_6 = at("6", F.layer_norm(a_5, block.w_5.shape, block.w_5, block.b_5, o.eps))
        a_7 = at("7", a_6 @ block.w_6 + block.b_6)
        a_8 = at("8", ACTIVATIONS[o.g](a_7))
        a_9 = at("9", a_8 @ block.w_8 + block.b_8)
        a = at("10", a_5 + a_9)
    a_11 = hook("delta_11", F.layer_norm(a, p.w_10.shape, p.w_10, p.b_10, o.eps))
    logits = a_11 @ (p.w_tok.T if p.w_11 is None else p.w_11)
    if p.adapter is not None:
        logits = logits + p.adapter.scale * (a_11 @ p.adapter.d_11 @ p.adapter.u_11)
    a_12 = hook("delta_12", logits if p.b_11 is None else logits + p.b_11)
    return F.cross_entropy(a_12, targets, reduction="sum")  # torch ignores −100 too


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
        loss = reference_loss(tree_unflatten(leaves, shape), o, ids, targets, visit)
        parameters = [x for x in leaves if isinstance(x, Tensor)]
        wanted = [*seen.values(), *parameters]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    found = iter([torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)])
    values = {name: x.detach() for name, x in seen.items()}
    reference = Reference(loss.item(), values, {name: next(found) for name in seen}, {})
    return reference, tree_unflatten([next(found) if isinstance(x, Tensor) else x for x in leaves], shape)


class ReferenceModel:
    """The reference for a model on a packed batch: its loss, and by autograd every Δ and every parameter's gradient."""

    def __init__(self, model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None):
        self.model = model
        batch = model.pack(tokens, lengths)
        self.lengths, self.ids = batch.lengths, batch.ids
        self.targets = targets.reshape(-1).to(self.ids)
        self.n_targets = int((self.targets != -100).sum())
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        self.pause: Callable[[], None] = lambda: None

    def loss(self, visit: Callable[[int, str, Tensor], Tensor]) -> Tensor:
        """The mean loss. `visit(start, name, x)` replaces each intermediate of the sequence that begins in row `start`."""
        network, options = network_of(self.model), options_of(self.model.config)
        total = self.ids.new_zeros((), dtype=torch.float64)
        for start, n in zip(self.starts, self.lengths, strict=True):
            rows = slice(start, start + n)

            def hook(name: str, x: Tensor, start: int = start) -> Tensor:
                self.pause()
                return visit(start, name, x)

            total = total + reference_loss(network, options, self.ids[rows], self.targets[rows], hook)
        return total / self.n_targets

    def differentiate(self) -> Reference:
        """Every value, Δ and gradient of the batch."""
        seen: dict[str, list[Tensor]] = {}

        def visit(start: int, name: str, x: Tensor) -> Tensor:
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
            _hold_norms(adapter)
    return model


def _hold_norms(layer: LoRA) -> None:
    """DoRA treats its column norms as constants: keep them fixed while finite differences change a factor."""
    norms = layer.column_norms()
    layer.column_norms = lambda: norms  # type: ignore[method-assign]
