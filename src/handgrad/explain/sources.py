"""The functions whose source code the page shows, by the names that stations use."""

import inspect
from collections.abc import Callable
from functools import cache

from ..model.attention import Attention
from ..model.block import Block
from ..model.layers import Linear, QueryKeyValue
from ..ops import activation, attention, embedding, gated, layernorm, linear, lora, loss, rmsnorm, rotary
from ..paper import gated as paper_gated
from ..paper import grouped_query
from ..paper import rmsnorm as paper_rmsnorm
from ..paper import rotary as paper_rotary

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
    "model/layers.py QueryKeyValue.accumulate_bias": QueryKeyValue.accumulate_bias,
    "model/layers.py Linear.accumulate_weight": Linear.accumulate_weight,
    "model/attention.py Attention.forward": Attention.forward,
    "model/attention.py Attention.backward": Attention.backward,
    "model/block.py Block.forward": Block.forward,
    "model/block.py Block.backward": Block.backward,
    "ops/loss.py forward_and_delta": loss.forward_and_delta,
}


@cache
def source(name: str) -> str:
    """Return the source code of a function of SOURCES, read from the installed package."""
    return inspect.getsource(SOURCES[name])
