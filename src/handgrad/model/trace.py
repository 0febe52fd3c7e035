"""One forward and backward pass with everything recorded: each a_i, Δ_i, ρ and gradient under the name it has in the paper.

    trace["a_0"], trace["blocks.0.a_5"], trace["blocks.0.rho"], trace["blocks.0.delta_raw"], trace["delta_11"],
    trace["grad_w_tok"], trace["blocks.0.grad_w_q"] …

Rows are tokens, all sequences end to end; maps between tokens are (heads, n, n), zero between sequences.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

import torch
from torch import Tensor

from .gpt import GPT
from .layers import Affine, LayerNorm
from .trace_html import trace_html


class Trace(Mapping[str, Tensor]):
    """The tensors of one pass by name. `loss` is the mean over the targets."""

    def __init__(self, values: dict[str, Tensor], loss: float, lengths: tuple[int, ...]):
        self._values = values
        self.loss = loss
        self.lengths = lengths

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            near = get_close_matches(name, self._values, 3) or list(self._values)[:3]
            raise KeyError(f"the trace has no {name!r}; it has {', '.join(near)} …")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        rows = [f"  {name:<24} {tuple(x.shape)!s:<20} ‖·‖ {x.double().norm():.3e}" for name, x in self.items()]
        return "\n".join([f"Trace: loss {self.loss:.6f}, {len(self)} tensors", *rows])

    def _repr_html_(self) -> str:
        return trace_html(self._values, self.loss)


def trace(model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None) -> Trace:
    """Run the model forward and backward once and record everything. Parameters keep the `.grad` they had."""
    values: dict[str, Tensor] = {}
    before = {p: p.grad for p in model.parameters()}
    try:
        for p in before:
            p.grad = None
        loss = model.loss_and_grads(tokens, targets, lengths, record=values.__setitem__, all_signals=True)
        values |= gradients(model)
    finally:
        for p, grad in before.items():
            p.grad = grad
    return Trace(values, loss, model.pack(tokens, lengths).lengths)


def gradients(model: GPT) -> dict[str, Tensor]:
    """Every parameter's `.grad` under the paper's name; w_q, w_k and w_v hold all heads side by side."""
    named: dict[str, Tensor] = {}

    def keep(name: str, p: Tensor | None) -> None:
        if p is not None and p.grad is not None:
            named[name] = p.grad

    def keep_layer(prefix: str, number: int, layer: Affine | LayerNorm) -> None:
        for symbol, p in layer.named_symbols().items():
            keep(f"{prefix}grad_{symbol}_{number}", p)

    t = model.transformer
    keep("grad_w_tok", t.wte.weight)
    keep("grad_w_pos", t.wpe.weight)
    for i, block in enumerate(model.blocks):
        prefix = f"blocks.{i}."
        keep_layer(prefix, 1, block.ln_1)
        keep_layer(prefix, 2, block.attn.c_attn)
        for kind in "wb":
            if (fused := named.pop(f"{prefix}grad_{kind}_2", None)) is not None:
                keys = model.config.key_bias or kind == "w"
                widths = [block.attn.queries, *([block.attn.queries] if keys else []), block.attn.values]
                for letter, part in zip("qkv" if keys else "qv", torch.split(fused, widths, -1), strict=True):
                    named[f"{prefix}grad_{kind}_{letter}"] = part
        keep_layer(prefix, 3, block.attn.c_proj)
        keep_layer(prefix, 5, block.ln_2)
        keep_layer(prefix, 6, block.mlp.c_fc)
        keep_layer(prefix, 8, block.mlp.c_proj)
    keep_layer("", 10, t.ln_f)
    keep_layer("", 11, model.lm_head)
    if (transposed := named.pop("grad_w_11", None)) is not None and not model.config.tied:
        named["grad_w_11"] = transposed.t()
    return named
