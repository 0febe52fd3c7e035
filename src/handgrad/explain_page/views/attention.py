"""The data of the attention view: one head, forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import HandgradError
from ...model.gpt import GPT
from ...model.inspect.trace import Trace
from ...model.steps import signal as signal_of
from ...ops import linear, rotary
from ..follow.tensors import Pair, frozen, products
from ..json_types.station import Head as HeadView
from ..json_types.station import HeadBranches, HeadMap, Heads, HeadVectors, SmallHead
from ..presentation import captions
from ..presentation.notation import typeset
from ..presentation.pictures import COLUMNS, picture
from ..session.session import Session, TracedSentence
from ..stations.network import NetworkStep, block_steps

IMPORT = "from handgrad.explain_page.views.attention import attention_head\n"  # for lines of Python that the page shows


def at_head(session: Session, sentence: TracedSentence, block: int, head: int, *, limit: int = COLUMNS) -> HeadView:
    """Return one head: its attention weights, Δ_raw, and the error that each token sends back to each other token;
    pictures have at most `limit` columns."""
    config = session.model.config
    if not 0 <= block < config.n_blocks or not 0 <= head < config.n_heads:
        raise HandgradError(
            f"there is no head {head} in block {block}: {config.n_blocks} blocks of {config.n_heads} heads, counted from 0"
        )
    t, here = sentence.trace, f"blocks.{block}."
    with session.model_at(sentence.version) as model, torch.no_grad():
        found = _head(model, t, session.network.find(block, "attention"), head)
        attn = model.blocks[block].attn
    rho, raw, sent, indices = found.rho, found.raw, found.sent, found.indices
    signal, value, query, key = found.signal, *found.branches
    q, k, v = found.vectors
    width, size = config.value_width, config.n_heads // config.kv_heads
    step = session.network.find(block, "attention")
    delta = _wide(t[step.signals[0]])
    labels = session.labels(sentence)
    signals, outputs = (x.view(len(x), config.n_heads, width) for x in (delta, _wide(t[step.outputs[0]])))
    lengths: HeadBranches = {"value": value.norm().item(), "query": query.norm().item(), "key": key.norm().item()}

    def shown(name: str, x: Tensor, python: str = "") -> HeadMap:
        drawn = picture(x, limit=limit, full_range=name == "rho")
        return {"picture": drawn, "name": here + name, "python": python or f"trace[{here + name!r}][{head}]"}

    def vectors(name: str, x: Tensor) -> HeadVectors:
        return {"picture": picture(x, limit=limit), "name": here + name, "head": indices[name]}

    return {
        "block": block, "head": head, "branches": lengths, "incoming": signal.norm().item(),
        "joined": (value + query + key).norm().item(), "all_heads": t[signal_of(step.inputs[0])].norm().item(),
        "heads": [
            {"length": outputs[:, h].norm().item(), "incoming": signals[:, h].norm().item(),
             "own": t[f"{here}rho"][h].diagonal().mean().item(),
             "first": t[f"{here}rho"][h][1:, 0].mean().item()}
            for h in range(config.n_heads)
        ],
        "maps": {
            "rho": shown("rho", rho), "delta_raw": shown("delta_raw", raw),
            "sent": shown("sent", sent, f"{IMPORT}attention_head(model, trace, {block}, {head}).sent"),
        },
        "vectors": {"q": vectors("q", q), "k": vectors("k", k), "v": vectors("v", v)},
        "group": list(range(head // size * size, (head // size + 1) * size)),
        "sent_caption": captions.about_sent(attn.rotated, attn.normed),
        "caption": captions.about_attention(rho, sent, labels),
        "branches_caption": captions.about_branches(lengths["value"], lengths["query"], lengths["key"]),
        "branches_python": f"{IMPORT}[x.norm() for x in attention_head(model, trace, {block}, {head}).branches]",
    }  # fmt: skip


class Head(NamedTuple):
    """One head, forward and backward."""

    indices: dict[str, int]  # of its queries, keys and values
    vectors: tuple[Tensor, Tensor, Tensor]  # q, k, v
    rho: Tensor
    raw: Tensor
    signal: Tensor  # its part of Δ_3
    branches: tuple[Tensor, Tensor, Tensor]  # of values, queries and keys: their parts of Δ_2
    sent: Tensor  # (n, n), length of the error that each token sends to each other token


def attention_head(model: GPT, trace: Trace, block: int, head: int) -> Head:
    """Return one head of a traced model: its attention, its error signals, and what its tokens send each other."""
    return _head(model, trace, next(step for step in block_steps(model, block) if step.kind == "attention"), head)


@torch.no_grad()
def _head(model: GPT, trace: Trace, step: NetworkStep, head: int) -> Head:
    assert step.block is not None
    t, config, here, attn = trace, model.config, step.here, model.blocks[step.block].attn
    rho, raw, delta = (_wide(t[name]) for name in (f"{here}rho", f"{here}delta_raw", step.signals[0]))
    rho, raw = rho[head], raw[head]
    width, size = config.value_width, config.n_heads // config.kv_heads
    indices = {"q": head, "k": head // size, "v": head // size}  # heads of keys and values may be shared
    q, k, v = (_wide(t[here + letter][i]) for letter, i in indices.items())
    signal = delta[:, head * width : (head + 1) * width]
    pairs = products(attn.projections(), "qkv")
    branches = {letter: _Branch(model, t, step, letter, i, pairs[letter]) for letter, i in indices.items()}
    value = branches["v"].backward(rho.t() @ signal)  # (22)
    query, key = branches["q"].backward(raw @ k), branches["k"].backward(raw.t() @ q)  # (30)
    # What token t sends to token s: ρ_ts Δ_t w_vᵗ + Δ_raw,ts x_ts w_kᵗ, where x_ts is q_t on its way back through the
    # rotation and the norm of key s, if there are any. Only the length is needed, so the vectors themselves, (n, n, d),
    # are never made.
    w_k, w_v = branches["k"].w, branches["v"].w
    x = branches["k"].to_projection(q[None].expand(len(q), *q.shape)).transpose(0, 1)  # (t, s, d_ρ)
    along_v = ((signal @ (w_v.t() @ w_v)) * signal).sum(1, keepdim=True)
    along_k = ((x @ (w_k.t() @ w_k)) * x).sum(2)
    product = (x @ (signal @ (w_v.t() @ w_k))[:, :, None])[:, :, 0]
    squares = rho**2 * along_v + 2 * rho * raw * product + raw**2 * along_k
    return Head(indices, (q, k, v), rho, raw, signal, (value, query, key), squares.clamp(min=0).sqrt())


def all_heads(session: Session, sentence: TracedSentence, *, limit: int = 16) -> Heads:
    """Return every head of every block in small: its attention weights, and the error sent back between tokens."""
    t, config = sentence.trace, session.model.config
    rows: list[list[SmallHead]] = []
    largest, attending = (0.0, 0, 0), session.network.having("attention")
    with session.model_at(sentence.version) as model, torch.no_grad():
        for b in range(config.n_blocks):
            heads: list[SmallHead] = []
            for h in range(config.n_heads) if b in attending else ():
                found = _head(model, t, session.network.find(b, "attention"), h)
                size = found.signal.norm().item()
                largest = max(largest, (size, b, h))
                heads.append({
                    "rho": picture(found.rho, limit=limit, rows_limit=limit, full_range=True),
                    "sent": picture(found.sent, limit=limit, rows_limit=limit),
                    "incoming": size, "sent_largest": found.sent.max().item(),
                })  # fmt: skip
            rows.append(heads)
    _, b, h = largest
    every = session.network.every("attention") + f" for h in range({config.n_heads})"
    return {
        "blocks": rows,
        "caption": f"The largest error reaches head {h + 1} of block {b + 1}: length {typeset(largest[0])}."
        if largest[0]
        else "No error reaches any head.",
        "python": {
            "rho": f"{{(b, h): trace[f'blocks.{{b}}.rho'][h] {every}}}",
            "sent": f"{IMPORT}{{(b, h): attention_head(model, trace, b, h).sent {every}}}",
        },
    }  # fmt: skip


class _Branch:
    """The way of an error signal from one head of q, k or v back to what attention reads."""

    def __init__(self, model: GPT, trace: Trace, step: NetworkStep, letter: str, head: int, pair: Pair):
        assert step.block is not None
        attn, (w, b) = model.blocks[step.block].attn, pair
        changed = letter in "qk"  # values are neither rotated nor normalized
        heads = attn.n_heads if letter == "q" else attn.n_kv_heads
        self.w = _wide(w.chunk(heads, 1)[head])
        width, self.place = self.w.shape[1], slice(None)
        n = len(trace["a_0"])
        rotations = model.rotations(torch.arange(n), (n,)) if changed and attn.rotated else ()
        self.rotation, self.neighbors = rotations[attn.rotary_table] if rotations else None, attn.neighbors
        self.norm = frozen(getattr(attn, f"{letter}_norm")) if changed and attn.normed else None
        if self.norm is not None:
            bias = None if b is None else _wide(b.chunk(heads)[head])
            if len(self.norm.weight) > width:  # over all heads, which its backward pass then reaches
                self.w, bias = _wide(w), None if b is None else _wide(b)
                self.place = slice(head * width, (head + 1) * width)
            x = linear.forward(_wide(trace[step.inputs[0]]), self.w, bias)
            self.saved = self.norm.forward(x[:, None])[1]

    def to_projection(self, signal: Tensor) -> Tensor:
        """The error signal of a head's q, k or v, (n, …, d_ρ) → that of what its projection computes"""
        if self.rotation is not None:
            signal = rotary.backward(signal, *self.rotation, neighbors=self.neighbors)
        if self.norm is not None:
            whole = signal.new_zeros(*signal.shape[:-1], len(self.norm.weight))
            whole[..., self.place] = signal
            signal = self.norm.backward(whole, self.norm.rebuild_output(self.saved)[0], self.saved)
        return signal

    def backward(self, signal: Tensor) -> Tensor:
        """(n, d_ρ) or (n, d_h) → (n, d), this branch's part of Δ_2"""
        return linear.backward(self.to_projection(signal[:, None])[:, 0], self.w)


def _wide(x: Tensor) -> Tensor:
    """Convert bfloat16 to float32."""
    return x.float() if x.dtype == torch.bfloat16 else x
