"""The data of the attention view: one head, forward and backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError
from ..model.attention import Attention
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..model.trace import Trace
from ..ops import linear, rotary
from . import captions
from .norms import frozen
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
    indices = _indices(config, head)
    with session.model_at(sentence.version) as model, torch.no_grad():
        attn = model.blocks[block].attn
        found = one_head(model, t, block, head, projections(attn))
        value, query, key = found.back()
    rho, raw, signal, q, k, v, sent = found.rho, found.raw, found.signal, found.q, found.k, found.v, found.sent()
    delta_3 = _wide(t[f"{here}delta_3"])
    size, width = config.n_heads // config.kv_heads, config.value_width
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
        "vectors": {
            name: {"picture": picture(x), "name": here + name, "head": indices[name]}
            for name, x in (("q", q), ("k", k), ("v", v))
        },
        "group": list(range(head // size * size, (head // size + 1) * size)),
        "sent_caption": captions.about_sent(attn.rotated, attn.normed),
        "caption": captions.about_attention(rho, sent, labels),
        "branches_caption": captions.about_branches(norms["value"], norms["query"], norms["key"]),
    }  # fmt: skip


class Head(NamedTuple):
    """One head of a block: its tensors, and the ways of its error back to a_2."""

    rho: Tensor  # (n, n)
    raw: Tensor  # (n, n) Δ_raw
    signal: Tensor  # (n, d_h) its part of Δ_3
    q: Tensor
    k: Tensor
    v: Tensor
    branches: "dict[str, _Branch]"

    def back(self) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of Δ_2 that come through the values (22), the queries and the keys (30)"""
        value = self.branches["v"].backward(self.rho.t() @ self.signal)
        return value, self.branches["q"].backward(self.raw @ self.k), self.branches["k"].backward(self.raw.t() @ self.q)

    def sent(self) -> Tensor:
        """(n, n) the length of what token t sends back to token s: ρ_ts Δ_t w_vᵗ + Δ_raw,ts x_ts w_kᵗ, where x_ts is q_t on
        its way back through the rotation and the norm of key s, if there are any. The vectors themselves, (n, n, d), are
        never made."""
        w_k, w_v, signal, q = self.branches["k"].w, self.branches["v"].w, self.signal, self.q
        x = self.branches["k"].to_projection(q[None].expand(len(q), *q.shape)).transpose(0, 1)  # (t, s, d_ρ)
        along_v = ((signal @ (w_v.t() @ w_v)) * signal).sum(1, keepdim=True)
        along_k = ((x @ (w_k.t() @ w_k)) * x).sum(2)
        product = (x @ (signal @ (w_v.t() @ w_k))[:, :, None])[:, :, 0]
        squares = self.rho**2 * along_v + 2 * self.rho * self.raw * product + self.raw**2 * along_k
        return squares.clamp(min=0).sqrt()


Projections = dict[str, tuple[Tensor, Tensor | None]]


def one_head(model: GPT, t: Trace, block: int, head: int, pairs: Projections) -> Head:
    config, here = model.config, f"blocks.{block}."
    indices = _indices(config, head)
    width = config.value_width
    branches = {letter: _Branch(model, t, block, letter, i, pairs[letter]) for letter, i in indices.items()}
    q, k, v = (_wide(t[here + letter][i]) for letter, i in indices.items())
    signal = _wide(t[f"{here}delta_3"])[:, head * width : (head + 1) * width]
    return Head(_wide(t[f"{here}rho"][head]), _wide(t[f"{here}delta_raw"][head]), signal, q, k, v, branches)


def _indices(config: ModelConfig, head: int) -> dict[str, int]:
    """Where a head finds its queries, keys and values; heads of keys and values may be shared."""
    shared = head // (config.n_heads // config.kv_heads)
    return {"q": head, "k": shared, "v": shared}


class _Branch:
    """The way of an error signal from one head of q, k or v back to a_2."""

    def __init__(
        self, model: GPT, trace: Trace, block: int, letter: str, head: int, pair: tuple[Tensor, Tensor | None]
    ):
        attn, (w, b) = model.blocks[block].attn, pair
        steps = letter in "qk"  # values are neither rotated nor normalized
        heads = attn.n_heads if letter == "q" else attn.n_kv_heads
        self.w = _wide(w.chunk(heads, 1)[head])
        self.rotation = model.rotation(torch.arange(len(trace["a_0"]))) if steps and attn.rotated else None
        self.norm = frozen(getattr(attn, f"{letter}_norm")) if steps and attn.normed else None
        if self.norm is not None:
            bias = None if b is None else _wide(b.chunk(heads)[head])
            x = linear.forward(_wide(trace[f"blocks.{block}.a_2"]), self.w, bias)
            self.saved = self.norm.forward(x[:, None])[1]

    def to_projection(self, signal: Tensor) -> Tensor:
        """The error signal of a head's q, k or v, (n, …, d_ρ) → that of what its projection computes"""
        if self.rotation is not None:
            signal = rotary.backward(signal, *self.rotation)
        if self.norm is not None:
            signal = self.norm.backward(signal, self.norm.rebuild_output(self.saved)[0], self.saved)
        return signal

    def backward(self, signal: Tensor) -> Tensor:
        """(n, d_ρ) or (n, d_h) → (n, d), this branch's part of Δ_2"""
        return linear.backward(self.to_projection(signal[:, None])[:, 0], self.w)


def projections(attn: Attention) -> Projections:
    """Weight (d, width) and bias of q, k and v, whether they are one layer or three."""
    found: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, layer in zip(attn.inputs, attn.projections(), strict=True):
        plain = layer.plain()
        weights = torch.split(layer.effective_weight(), plain.widths, 1)
        b = plain.added_bias()
        biases = [None] * len(weights) if b is None else torch.split(b, plain.widths)
        found |= dict(zip(plain.parts or [name], zip(weights, biases, strict=True), strict=True))
    return found


def _wide(x: Tensor) -> Tensor:
    """Convert bfloat16 to float32."""
    return x.float() if x.dtype == torch.bfloat16 else x
