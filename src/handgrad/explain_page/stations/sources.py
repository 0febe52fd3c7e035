"""The functions whose source code the page shows, by the names that stations use."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache

from ...model.block import Residual
from ...model.layers.attention import Attention
from ...model.layers.linear import Linear, QueryKeyValue
from ...ops import activation, attention, embedding, gated, layernorm, linear, lora, loss, rmsnorm, rotary
from ...paper import activation as paper_activation
from ...paper import attention as paper_attention
from ...paper import embedding as paper_embedding
from ...paper import gated as paper_gated
from ...paper import grouped_query
from ...paper import layernorm as paper_layernorm
from ...paper import linear as paper_linear
from ...paper import lora as paper_lora
from ...paper import loss as paper_loss
from ...paper import rmsnorm as paper_rmsnorm
from ...paper import rotary as paper_rotary

SOURCES: dict[str, Callable[..., object]] = {
    "ops/embedding.py forward": embedding.forward,
    "ops/embedding.py grad_w": embedding.grad_w,
    "ops/layernorm.py forward": layernorm.forward,
    "ops/layernorm.py backward": layernorm.backward,
    "ops/layernorm.py grad_w": layernorm.grad_w,
    "ops/layernorm.py grad_b": layernorm.grad_b,
    "paper/rmsnorm.py forward": paper_rmsnorm.forward,
    "paper/rmsnorm.py delta_prev": paper_rmsnorm.delta_prev,
    "paper/rmsnorm.py forward_heads": paper_rmsnorm.forward_heads,
    "paper/rmsnorm.py delta_prev_heads": paper_rmsnorm.delta_prev_heads,
    "ops/rmsnorm.py forward": rmsnorm.forward,
    "ops/rmsnorm.py backward": rmsnorm.backward,
    "ops/rmsnorm.py grad_w": rmsnorm.grad_w,
    "paper/rotary.py forward": paper_rotary.forward,
    "paper/rotary.py delta_prev": paper_rotary.delta_prev,
    "ops/rotary.py forward": rotary.forward,
    "ops/rotary.py backward": rotary.backward,
    "paper/grouped_query.py forward": grouped_query.forward,
    "paper/grouped_query.py sum_over_group": grouped_query.sum_over_group,
    "paper/gated.py forward": paper_gated.forward,
    "paper/gated.py delta_gate": paper_gated.delta_gate,
    "paper/gated.py delta_up": paper_gated.delta_up,
    "paper/gated.py delta_prev": paper_gated.delta_prev,
    "ops/gated.py forward": gated.forward,
    "ops/gated.py backward": gated.backward,
    "paper/gated.py g_prime": paper_gated.g_prime,
    "ops/linear.py forward": linear.forward,
    "ops/linear.py backward": linear.backward,
    "ops/linear.py grad_w": linear.grad_w,
    "ops/linear.py grad_b": linear.grad_b,
    "ops/lora.py forward": lora.forward,
    "ops/lora.py upstream": lora.upstream,
    "ops/lora.py backward": lora.backward,
    "ops/lora.py grad_d": lora.grad_d,
    "ops/lora.py grad_u": lora.grad_u,
    "ops/lora.py column_norms": lora.column_norms,
    "ops/lora.py grad_m": lora.grad_m,
    "ops/activation.py forward": activation.forward,
    "ops/activation.py backward": activation.backward,
    "ops/activation.py _gelu_tanh": activation._gelu_tanh,
    "ops/activation.py _gelu": activation._gelu,
    "ops/activation.py _relu2": activation._relu2,
    "ops/attention.py forward": attention.forward,
    "ops/attention.py rho_tile": attention.rho_tile,
    "ops/attention.py causal_signal_tile": attention.causal_signal_tile,
    "ops/attention.py _backward_in_tiles": attention._backward_in_tiles,
    "model/layers/linear.py QueryKeyValue.accumulate_bias": QueryKeyValue.accumulate_bias,
    "model/layers/linear.py Linear.accumulate_weight": Linear.accumulate_weight,
    "model/layers/attention.py Attention.project": Attention.project,
    "model/layers/attention.py Attention.backward_projections": Attention.backward_projections,
    "model/block.py Residual.forward": Residual.forward,
    "model/block.py Residual.backward": Residual.backward,
    "ops/loss.py forward_and_delta": loss.forward_and_delta,
}

# The readable form of a production function, which the page shows first.
READABLE: dict[str, tuple[str, Callable[..., object]]] = {
    "ops/embedding.py forward": ("paper/embedding.py forward", paper_embedding.forward),
    "ops/embedding.py grad_w": ("paper/embedding.py grad_w", paper_embedding.grad_w),
    "ops/layernorm.py forward": ("paper/layernorm.py forward", paper_layernorm.forward),
    "ops/layernorm.py backward": ("paper/layernorm.py delta_prev", paper_layernorm.delta_prev),
    "ops/layernorm.py grad_w": ("paper/layernorm.py grad_w", paper_layernorm.grad_w),
    "ops/layernorm.py grad_b": ("paper/layernorm.py grad_b", paper_layernorm.grad_b),
    "ops/linear.py forward": ("paper/linear.py forward", paper_linear.forward),
    "ops/linear.py backward": ("paper/linear.py delta_prev", paper_linear.delta_prev),
    "ops/linear.py grad_w": ("paper/linear.py grad_w", paper_linear.grad_w),
    "ops/linear.py grad_b": ("paper/linear.py grad_b", paper_linear.grad_b),
    "ops/lora.py forward": ("paper/lora.py forward", paper_lora.forward),
    "ops/lora.py backward": ("paper/lora.py delta_prev", paper_lora.delta_prev),
    "ops/lora.py grad_d": ("paper/lora.py grad_d", paper_lora.grad_d),
    "ops/lora.py grad_u": ("paper/lora.py grad_u", paper_lora.grad_u),
    "ops/activation.py forward": ("paper/activation.py g", paper_activation.g),
    "ops/activation.py backward": ("paper/activation.py delta_prev", paper_activation.delta_prev),
    "ops/attention.py forward": ("paper/attention.py forward", paper_attention.forward),
    "ops/attention.py _backward_in_tiles": ("paper/attention.py backward", paper_attention.backward),
    "ops/loss.py forward_and_delta": ("paper/loss.py delta_logits", paper_loss.delta_logits),
}
SOURCES |= dict(READABLE.values())


def readable_first(sources: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The functions of a station, those of `paper` before the production code of the same direction."""
    readable = [(way, READABLE[name][0]) for way, name in sources if name in READABLE]
    every = dict.fromkeys([*readable, *sources])
    return sorted(every, key=lambda pair: (pair[0] != "forward", not pair[1].startswith("paper/")))


@cache
def source(name: str) -> str:
    """Return the source code of a function of SOURCES, read from the installed package."""
    return inspect.getsource(SOURCES[name])
