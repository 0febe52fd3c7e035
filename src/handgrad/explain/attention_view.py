"""The data of the attention view: one head, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from ..errors import HandgradError
from ..model.gpt import GPT
from ..ops import linear
from . import captions
from .pictures import picture
from .session import Session, TracedSentence
from .views import labels_of


def at_head(session: Session, sentence: TracedSentence, block: int, head: int) -> dict[str, Any]:
    """Return one head: its attention weights, Δ_raw, and the error that each token sends back to each other token."""
    config = session.model.config
    if not 0 <= block < config.n_blocks or not 0 <= head < config.n_heads:
        raise HandgradError(
            f"there is no head {head} in block {block}: {config.n_blocks} blocks of {config.n_heads} heads, counted from 0"
        )
    t, here = sentence.trace, f"blocks.{block}."
    rho, raw, delta_3 = (_wide(t[here + name]) for name in ("rho", "delta_raw", "delta_3"))
    rho, raw = rho[head], raw[head]
    q, k, v = (_wide(t[here + letter][head]) for letter in "qkv")
    width = config.value_width
    with session.model_at(sentence.version) as model, torch.no_grad():
        w_q, w_k, w_v = _head_weights(model, block)
    signal = delta_3[:, head * width : (head + 1) * width]
    value = linear.backward(rho.t() @ signal, w_v[head])  # (22)
    query, key = linear.backward(raw @ k, w_q[head]), linear.backward(raw.t() @ q, w_k[head])  # (30)
    # What token t sends to token s: ρ_ts Δ_t w_vᵗ + Δ_raw,ts q_t w_kᵗ. Only its norm is needed,
    # so the vectors themselves, (n, n, d), are never made.
    along_v, along_k = linear.backward(signal, w_v[head]), linear.backward(q, w_k[head])
    product = (along_v * along_k).sum(1, keepdim=True)
    squares = rho**2 * along_v.square().sum(1, keepdim=True) + 2 * rho * raw * product
    sent = (squares + raw**2 * along_k.square().sum(1, keepdim=True)).clamp(min=0).sqrt()
    labels = labels_of(session, sentence)
    norms = {"value": value.norm().item(), "query": query.norm().item(), "key": key.norm().item()}
    signals = delta_3.view(len(delta_3), config.n_heads, width)
    maps = {"rho": rho, "delta_raw": raw, "sent": sent}
    return {
        "block": block, "head": head, "branches": norms, "incoming": signal.norm().item(),
        "joined": (value + query + key).norm().item(), "all_heads": t[f"{here}delta_2"].norm().item(),
        "heads": [
            {"incoming": signals[:, h].norm().item(), "own": t[f"{here}rho"][h].diagonal().mean().item(),
             "first": t[f"{here}rho"][h][1:, 0].mean().item()}
            for h in range(config.n_heads)
        ],
        "maps": {
            name: {"picture": picture(x, full_range=name == "rho"), "name": here + name} for name, x in maps.items()
        },
        "vectors": {name: {"picture": picture(x), "name": here + name} for name, x in (("q", q), ("k", k), ("v", v))},
        "caption": captions.about_attention(rho, sent, labels),
        "branches_caption": captions.about_branches(norms["value"], norms["query"], norms["key"]),
    }  # fmt: skip


def _head_weights(model: GPT, block: int) -> list[tuple[Tensor, ...]]:
    attn = model.blocks[block].attn
    widths = [attn.queries, attn.queries, attn.values]
    weight = _wide(attn.c_attn.effective_weight().detach())
    return [part.chunk(attn.n_heads, 1) for part in torch.split(weight, widths, 1)]


def _wide(x: Tensor) -> Tensor:
    """Convert bfloat16 to float32."""
    return x.float() if x.dtype == torch.bfloat16 else x
