"""Generate tokens: read the prompt once, then one token at a time through the KV cache."""

import math
from collections.abc import Iterator
from typing import Literal, overload

import torch
from torch import Tensor

from ..checks import check_integer
from ..errors import HandgradError, shown
from ..model.gpt import GPT
from .kv_cache import Cache, advance
from .sampling import sample


@overload
def generate(
    model: GPT, tokens: Tensor, max_new_tokens: int = ..., *, temperature: float = ..., top_k: int | None = ...,
    seed: int | None = ..., stream: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def generate(
    model: GPT, tokens: Tensor, max_new_tokens: int = ..., *, temperature: float = ..., top_k: int | None = ...,
    seed: int | None = ..., stream: Literal[True],
) -> Iterator[Tensor]: ...  # fmt: skip
def generate(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int = 50,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    stream: bool = False,
) -> Tensor | Iterator[Tensor]:
    """(B, T) ids → the ids that follow, (B, max_new_tokens); with stream=True an iterator of (B) ids, one per step.

    temperature   0 takes the most probable token; 1 samples from the model's probabilities, lower values sharpen them
    top_k         sample among the k most probable tokens only
    seed          the same seed gives the same tokens

    When the context is full, generation continues from its second half."""
    _check_ids(tokens)
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise HandgradError(f"tokens must be (B, T) and not empty; got shape {tuple(tokens.shape)}")
    if not temperature >= 0 or math.isinf(temperature):
        raise HandgradError(f"temperature must be a finite number of at least 0, not {temperature}")
    if top_k is not None and top_k < 1:
        raise HandgradError(f"top_k must be at least 1, not {top_k}")
    if seed is not None:
        check_integer("seed", seed)
    if max_new_tokens < 1:
        raise HandgradError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    model.pack(tokens[:, -model.config.n_context :])  # checks the ids
    pieces = _stream(model, tokens, max_new_tokens, temperature, top_k, seed)
    return pieces if stream else torch.stack(list(pieces), 1)


def _check_ids(tokens: object) -> None:
    if isinstance(tokens, str):
        raise HandgradError(
            f"generate takes token ids, not the text {shown(tokens)}: encode it first, as in tokenizer ="
            " handgrad.text.tokenizer.read(Path(folder)); tokens = torch.tensor([tokenizer.encode(text)])"
        )
    if not isinstance(tokens, Tensor):
        raise HandgradError(f"tokens must be a (B, T) tensor of ids, not a {type(tokens).__name__}")


def _stream(
    model: GPT, tokens: Tensor, count: int, temperature: float, top_k: int | None, seed: int | None
) -> Iterator[Tensor]:
    device = model.device
    generator = torch.Generator(device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    context = model.config.n_context
    seen = tokens.to(device, torch.int64)[:, -context:]
    cache = Cache(model, len(seen))
    new = seen
    for _ in range(count):
        if cache.length + new.shape[1] > context:
            cache.length = 0
            new = seen[:, -max(1, context // 2) :]
        chosen = sample(advance(model, new, cache), temperature, top_k, generator)
        yield chosen
        new = chosen[:, None]
        seen = torch.cat([seen[:, -context:], new], 1)
