"""The functions whose source code the page shows, by the names that stations use."""

import inspect
from collections.abc import Callable
from functools import cache

from ..model.block import Block
from ..model.layers import Head, QueryKeyValue
from ..ops import activation, attention, embedding, layernorm, linear, lora, loss

SOURCES: dict[str, Callable[..., object]] = {
    "ops/embedding.py forward": embedding.forward,
    "ops/embedding.py grad_w": embedding.grad_w,
    "ops/layernorm.py forward": layernorm.forward,
    "ops/layernorm.py backward": layernorm.backward,
    "ops/layernorm.py grad_w": layernorm.grad_w,
    "ops/layernorm.py grad_b": layernorm.grad_b,
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
    "model/layers.py Head.accumulate_weight": Head.accumulate_weight,
    "model/block.py Block.forward": Block.forward,
    "model/block.py Block.backward": Block.backward,
    "ops/loss.py forward_and_delta": loss.forward_and_delta,
}


@cache
def source(name: str) -> str:
    """Return the source code of a function of SOURCES, read from the installed package."""
    return inspect.getsource(SOURCES[name])
