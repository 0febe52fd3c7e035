"""The source code of functions, by the names that stations use: "ops/linear.py forward"."""

import inspect
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from operator import attrgetter

# The readable form of a production function, which the page shows first.
READABLE = {
    "ops/embedding.py forward": "paper/embedding.py forward",
    "ops/embedding.py grad_w": "paper/embedding.py grad_w",
    "ops/layernorm.py forward": "paper/layernorm.py forward",
    "ops/layernorm.py backward": "paper/layernorm.py delta_prev",
    "ops/layernorm.py grad_w": "paper/layernorm.py grad_w",
    "ops/layernorm.py grad_b": "paper/layernorm.py grad_b",
    "ops/linear.py forward": "paper/linear.py forward",
    "ops/linear.py backward": "paper/linear.py delta_prev",
    "ops/linear.py grad_w": "paper/linear.py grad_w",
    "ops/linear.py grad_b": "paper/linear.py grad_b",
    "ops/lora.py forward": "paper/lora.py forward",
    "ops/lora.py backward": "paper/lora.py delta_prev",
    "ops/lora.py grad_d": "paper/lora.py grad_d",
    "ops/lora.py grad_u": "paper/lora.py grad_u",
    "ops/activation.py forward": "paper/activation.py g",
    "ops/activation.py backward": "paper/activation.py delta_prev",
    "ops/attention.py forward": "paper/attention.py forward",
    "ops/attention.py _backward_in_tiles": "paper/attention.py backward",
    "ops/loss.py forward_and_delta": "paper/loss.py delta_logits",
}


def readable_first(sources: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The functions of a station, those of `paper` before the production code of the same direction."""
    readable = [(way, READABLE[name]) for way, name in sources if name in READABLE]
    every = dict.fromkeys([*readable, *sources])
    return sorted(every, key=lambda pair: (pair[0] != "forward", not pair[1].startswith("paper/")))


@cache
def source(name: str) -> str:
    """Return the source code of a function, read from the installed package."""
    file, function = name.split()
    module = import_module("handgrad." + file.removesuffix(".py").replace("/", "."))
    return inspect.getsource(attrgetter(function)(module))
