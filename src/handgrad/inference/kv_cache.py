"""The KV cache: keys and values of all tokens so far, so that a new token costs one row of every product (Section 3, the new
rows of (18))."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import HandgradError
from ..model.block import Block
from ..model.gpt import GPT
from ..ops import activation, embedding


class Cache:
    """Keys and values of every block, allocated once for the full context."""

    def __init__(self, model: GPT, batch: int):
        c = model.config
        like = model.transformer.wte.weight
        shape = (c.n_blocks, batch, c.n_heads, c.n_context)
        self.k = torch.empty(*shape, c.query_width, dtype=like.dtype, device=like.device)
        self.v = torch.empty(*shape, c.value_width, dtype=like.dtype, device=like.device)
        self.length = 0


@torch.no_grad()
def advance(model: GPT, tokens: Tensor, cache: Cache) -> Tensor:
    """(B, t) new ids → the logits after the last one, (B, V). Their keys and values are added to the cache."""
    b, t = tokens.shape
    config = model.config
    if cache.length + t > config.n_context:
        raise HandgradError(f"{cache.length + t} tokens do not fit into a context of {config.n_context}")
    if not config.causal:
        raise HandgradError("generation needs a causal model (causal=True)")
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
    """Attention of new queries to all keys. A single new token sees every key; several need the causal mask."""
    if q.shape[2] == 1 or old == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
    own = torch.arange(old, old + q.shape[2], device=q.device)[:, None]
    visible = torch.arange(k.shape[2], device=q.device)[None, :] <= own
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
