"""Writing on, token by token, with the KV cache: the keys and values of what has been read are kept, and each new token
costs one row of every product (Section 3, the rows of (18) that are new)."""

import math
from collections.abc import Iterator
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from .block import Block
from .errors import HandgradError, shown
from .gpt import GPT
from .ops import activation, embedding


class Cache:
    """Keys and values of every block, for as many tokens as the model can see; made once."""

    def __init__(self, model: GPT, batch: int):
        c = model.config
        like = model.transformer.wte.weight
        shape = (c.n_blocks, batch, c.n_heads, c.n_context)
        self.k = torch.empty(*shape, c.query_width, dtype=like.dtype, device=like.device)
        self.v = torch.empty(*shape, c.value_width, dtype=like.dtype, device=like.device)
        self.length = 0


@torch.no_grad()
def advance(model: GPT, tokens: Tensor, cache: Cache) -> Tensor:
    """(B, t) new ids, after those in the cache → the logits after the last, (B, V). The cache grows by t."""
    b, t = tokens.shape
    config = model.config
    if cache.length + t > config.n_context:
        raise HandgradError(f"{cache.length + t} tokens do not fit into a context of {config.n_context}")
    if not config.causal:
        raise HandgradError("a model that looks ahead cannot write on")
    positions = torch.arange(cache.length, cache.length + t, device=tokens.device).repeat(b)
    w = model.transformer
    a = embedding.forward(tokens.reshape(-1), positions, w.wte.weight, w.wpe.weight)
    for i, block in enumerate(model.blocks):
        a = _block(block, a, b, cache, i)
    cache.length += t
    last = a.view(b, t, -1)[:, -1]
    return model.lm_head.forward(w.ln_f.forward(last.contiguous())[0])


def _block(block: Block, a_1: Tensor, b: int, cache: Cache, i: int) -> Tensor:
    q, k, v = (
        x.view(b, len(a_1) // b, *x.shape[1:]).transpose(1, 2)
        for x in block.attn.split(block.attn.c_attn.forward(block.ln_1.forward(a_1)[0]))
    )
    old, new = cache.length, cache.length + q.shape[2]
    cache.k[i, :, :, old:new] = k
    cache.v[i, :, :, old:new] = v
    a_3 = _attend(q, cache.k[i, :, :, :new], cache.v[i, :, :, :new], old)
    a_5 = block.attn.c_proj.forward(a_3.transpose(1, 2).reshape(len(a_1), -1)).add_(a_1)
    a_8 = activation.forward(block.mlp.c_fc.forward(block.ln_2.forward(a_5)[0]), block.g)
    return block.mlp.c_proj.forward(a_8).add_(a_5)


def _attend(q: Tensor, k: Tensor, v: Tensor, old: int) -> Tensor:
    """New queries, all keys. A single new token sees everything; several at the beginning see what is before them."""
    if q.shape[2] == 1 or old == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
    own = torch.arange(old, old + q.shape[2], device=q.device)[:, None]
    visible = torch.arange(k.shape[2], device=q.device)[None, :] <= own
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


@overload
def generate(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int = ...,
    *,
    temperature: float = ...,
    top_k: int | None = ...,
    seed: int | None = ...,
    stream: Literal[False] = ...,
) -> Tensor: ...
@overload
def generate(
    model: GPT,
    tokens: Tensor,
    max_new_tokens: int = ...,
    *,
    temperature: float = ...,
    top_k: int | None = ...,
    seed: int | None = ...,
    stream: Literal[True],
) -> Iterator[Tensor]: ...
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
    """(B, T) ids → the ids that follow, (B, max_new_tokens); with stream=True one (B) after the other.

    temperature   0 takes the most probable token, 1 draws as the model says, less is bolder towards the probable
    top_k         draw among the k most probable only
    seed          the same seed draws the same tokens

    When the context is full, the model goes on from its later half."""
    _check_ids(tokens)
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise HandgradError(f"tokens must be (B, T) and not empty; got shape {tuple(tokens.shape)}")
    if not temperature >= 0 or math.isinf(temperature):
        raise HandgradError(f"the temperature must be at least 0, not {temperature}")
    if top_k is not None and top_k < 1:
        raise HandgradError(f"top_k must be at least 1, not {top_k}")
    if max_new_tokens < 1:
        raise HandgradError(f"at least one token must be wanted, not {max_new_tokens}")
    model.pack(tokens[:, -model.config.n_context :])  # checks the ids
    pieces = _stream(model, tokens, max_new_tokens, temperature, top_k, seed)
    return pieces if stream else torch.stack(list(pieces), 1)


def _check_ids(tokens: object) -> None:
    if isinstance(tokens, str):
        raise HandgradError(
            f"generate takes ids, not the text {shown(tokens)}: encode it first, as in tokenizer ="
            " handgrad.tokenizer.read(Path(folder)); tokens = torch.tensor([tokenizer.encode(text)])"
        )
    if not isinstance(tokens, Tensor):
        raise HandgradError(f"tokens must be a (B, T) tensor of ids, not a {type(tokens).__name__}")


def _stream(
    model: GPT, tokens: Tensor, count: int, temperature: float, top_k: int | None, seed: int | None
) -> Iterator[Tensor]:
    device = model.transformer.wte.weight.device
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
        chosen = _choose(advance(model, new, cache), temperature, top_k, generator)
        yield chosen
        new = chosen[:, None]
        seen = torch.cat([seen[:, -context:], new], 1)


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[1]:
        least = torch.topk(logits, top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial(torch.softmax(logits, 1), 1, generator=generator).squeeze(1)
