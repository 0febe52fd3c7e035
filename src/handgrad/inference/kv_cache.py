"""The KV cache: keys and values of all tokens so far, so that a new token costs one row of every product (Section 3, the new
rows of (18))."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import HandgradError
from ..model.gpt import GPT
from ..model.passes import Pass
from ..ops.attention import Saved

FIRST_CAPACITY = 256  # tokens; doubled whenever the cache is full


class Cache:
    """Keys and values of every block. It grows with the tokens, up to the model's context."""

    def __init__(self, model: GPT, batch: int):
        self.config, self.batch = model.config, batch
        self.length = 0
        self._k = self._empty(next(model.parameters()), self.config.query_width)
        self._v = self._empty(next(model.parameters()), self.config.value_width)

    def _empty(self, like: Tensor, width: int) -> Tensor:
        c = self.config
        capacity = min(FIRST_CAPACITY, c.n_context)
        return like.new_empty(c.n_blocks, self.batch, c.kv_heads, capacity, width)

    def make_room(self, tokens: int) -> None:
        """Grow so that this many tokens more fit."""
        capacity = self._k.shape[3]
        needed = self.length + tokens
        if needed > capacity:
            more = min(max(2 * capacity, needed), self.config.n_context) - capacity
            self._k, self._v = (F.pad(x, (0, 0, 0, more)) for x in (self._k, self._v))

    def append(self, i: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values (B, h, t, width) of block i, and return all of that block."""
        end = self.length + k.shape[2]
        self._k[i, :, :, self.length : end] = k
        self._v[i, :, :, self.length : end] = v
        return self._k[i, :, :, :end], self._v[i, :, :, :end]


class BlockCache:
    """The cache of block i, as the block sees it."""

    def __init__(self, cache: Cache, i: int):
        self.cache, self.i = cache, i

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Saved:
        """(B·t, h, width) each: attention of new queries to all keys so far."""
        batch, old = self.cache.batch, self.cache.length
        new_q, new_k, new_v = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        keys, values = self.cache.append(self.i, new_k, new_v)
        t = new_q.shape[2]
        visible = _visible(old, t, window, q.device)
        first = visible is None and t > 1  # an empty cache: torch's own causal mask
        grouped = new_q.shape[1] != keys.shape[1]
        a = F.scaled_dot_product_attention(new_q, keys, values, attn_mask=visible, is_causal=first, enable_gqa=grouped)
        return Saved(q, k, v, a.transpose(1, 2).reshape(len(q), *a.shape[1::2]), q.new_empty(0))


def _visible(old: int, t: int, window: int | None, device: torch.device) -> Tensor | None:
    """The mask of t new queries after `old` tokens; None if a single one sees every key, or if there are no old ones."""
    limited = window is not None and old + t > window
    if (t == 1 or old == 0) and not limited:
        return None
    own = torch.arange(old, old + t, device=device)[:, None]
    keys = torch.arange(old + t, device=device)[None, :]
    mask = keys <= own
    return mask & (keys > own - window) if limited and window is not None else mask


@torch.no_grad()
def advance(model: GPT, tokens: Tensor, cache: Cache) -> Tensor:
    """(B, t) new ids → the logits after the last one, (B, V). Their keys and values are added to the cache."""
    b, t = tokens.shape
    config = model.config
    if cache.length + t > config.n_context:
        raise HandgradError(f"{cache.length + t} tokens do not fit into a context of {config.n_context}")
    if not config.causal:
        raise HandgradError("generation needs a causal model (causal=True)")
    cache.make_room(t)
    positions = torch.arange(cache.length, cache.length + t, device=tokens.device).repeat(b)
    run = Pass(rotation=model.rotation(positions))
    a = model.embeddings(tokens.reshape(-1), positions)
    for i, block in enumerate(model.blocks):
        with model.unpacked(block):
            a, _ = block.forward(a, run._replace(cache=BlockCache(cache, i)))
    cache.length += t
    last = a.view(b, t, -1)[:, -1]
    return model.head.forward(model.final_norm.forward(last.contiguous())[0])
