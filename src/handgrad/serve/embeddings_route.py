"""`/v1/embeddings`: a text as a vector, the mean over its tokens of the model's last layer, after the final norm.

It is what `transformers` calls last_hidden_state, averaged. It is not scaled to length 1: divide by the norm for cosines.
"""

import base64
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..lora.named import selected
from .answers import usage
from .api_errors import invalid
from .plans import encode, served
from .served_models import Models

MAX_TEXTS = 2048  # of a request, as OpenAI's


def embeddings(models: Models, asked: dict[str, Any]) -> tuple[list[list[int]], Callable[[list[int]], Tensor]]:
    """Check the request; the ids of its texts, and what the engine's thread is to compute of each."""
    model = served(models, asked["model"])
    if "input" not in asked:
        raise invalid("input", "input is missing: give a text, or a list of texts")
    if len(asked["input"]) > MAX_TEXTS:
        raise invalid("input", f"input may have {MAX_TEXTS:,} texts at most, not {len(asked['input']):,}")
    width = models.network.config.d_model
    if asked.get("dimensions", width) != width:
        raise invalid(
            "dimensions", f"dimensions may be {width} only, the width of the model, not {asked['dimensions']}"
        )
    texts = [encode(models, "input", text) for text in asked["input"]]

    def compute(ids: list[int]) -> Tensor:
        network = models.network
        with selected(network, model.adapter):
            a = network.last_layer(torch.tensor([ids], device=network.device))
        return network.check_finite(a.float().mean(0).cpu())

    return texts, compute


def answer(asked: dict[str, Any], texts: list[list[int]], vectors: list[Tensor]) -> dict[str, Any]:
    """The vectors as OpenAI's JSON."""
    as_bytes = asked.get("encoding_format") == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": _base64(vector) if as_bytes else vector.tolist()}
        for i, vector in enumerate(vectors)
    ]
    count = usage(sum(len(ids) for ids in texts), 0)
    del count["completion_tokens"]
    return {"object": "list", "data": data, "model": asked["model"], "usage": count}


def _base64(vector: Tensor) -> str:
    """float32, little-endian, which OpenAI's client asks for."""
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
