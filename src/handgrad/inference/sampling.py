"""Choose the next token from its logits."""

import math

import torch
from torch import Tensor


def sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """(B, V) logits → (B) ids: the most probable at temperature 0, else a sample among the `top_k` most probable."""
    if temperature == 0:
        return logits.argmax(1)
    logits = logits.float() / max(temperature, 1e-6)  # a smaller one would overflow
    if top_k is not None and top_k < logits.shape[1]:
        threshold = torch.topk(logits, top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    return torch.multinomial(torch.softmax(logits, 1), 1, generator=generator).squeeze(1)
