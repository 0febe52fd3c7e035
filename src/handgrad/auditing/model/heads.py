"""What attention would have computed with a known mistake: a wrong mask, scale or rotation, a bypassed adapter.

The heads are computed here again, in float64 and with padding, from what the audited model gave them: a_2 before and
Δ_3 after them. A mistake of the forward pass shows in a_3; one of the backward pass alone in Δ_2 and the gradients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...model.block import Block
from ...model.config import ModelConfig
from ...model.layers.linear import Affine
from ...ops import rotary
from .batch import AuditBatch


@dataclass(frozen=True)
class Heads:
    """The choices of one block's attention; a mistake is a change of them."""

    scale: float
    causal: bool = True
    ahead: int = 0  # how many later tokens a query sees; −1: not even its own
    window: int | None = None
    see_padding: bool = False
    turns: tuple[int, int] = (0, 0)  # how often queries and keys are rotated
    layout: str = "halves"  # which features are rotated together: "pairs" of neighbors; "mixed": by the halves' angles
    table: int = 0  # of frequencies
    grouped: bool = True  # neighboring queries share a key; False: queries h, h + kv, h + 2 kv, …
    bypassed: tuple[str, ...] = ()  # projections without their adapter
    detached: str = ""  # letters of q, k and v without a gradient
    corrected: bool = True  # the softmax's backward pass subtracts Δ ⊖ a
    unnormed: str = ""  # letters of the heads without their norm
    summed: bool = True  # the signals of keys and values add up over the queries that share them
    late: int = 0  # by how much the keys' positions are too large, relative to the queries'
    order: str = "qkv"  # which projections are taken for q, k and v
    returned: str = "qkv"  # to which of them the error signals of q, k and v go
    cap: float | None = None  # of scores
    sinks: bool = False  # whether the softmax has every head's learned score without a key
    away: int = 0  # from how many rows away the gradients of the projections' weights take their input


class Result(NamedTuple):
    """a_3 (B · T, h d_h) and, if Δ_3 was given, Δ_2 and the gradients by our parameter names inside the block."""

    a_3: Tensor
    delta_2: Tensor | None
    grads: dict[str, Tensor]


def right_choices(config: ModelConfig, i: int) -> Heads:
    """The choices of block i."""
    turns = (1, 1) if config.rotated_block(i) else (0, 0)
    scale = 1 / math.sqrt(config.query_width) if config.attention_scale is None else config.attention_scale
    window = config.window_of(i)
    layout, table = "pairs" if config.rotary_neighbors else "halves", config.rotary_table_of(i)
    heads = Heads(scale, config.causal, window=window, turns=turns, layout=layout, table=table)
    return replace(heads, cap=config.score_cap, sinks=config.sinks)


def known_mistakes(config: ModelConfig, i: int, block: Block, padded: bool) -> dict[str, Heads]:
    """Mistakes of a block's attention that are worth trying, each named by a condition."""
    right = right_choices(config, i)
    width = config.query_width
    own = config.attention_scale
    left_out = f"1/√d_head were left out (d_head = {width})" if own is None else f"the scale {own:g} were left out"
    found = {
        left_out: replace(right, scale=1.0),
        "the scores were divided by d_head, not by √d_head": replace(right, scale=1 / width),
        "the causal mask were missing": replace(right, causal=False),
        "the causal mask were shifted, so that a token saw the next one": replace(right, ahead=1),
        "the causal mask were shifted, so that a token did not see itself": replace(right, ahead=-1),
        "the softmax's backward pass lacked its correction term": replace(right, corrected=False),
    }
    if own is not None:
        found["the scores were divided by √d_head"] = replace(right, scale=width**-0.5)
    if right.cap is not None:
        found["the cap of the scores were left out"] = replace(right, cap=None)
    if right.sinks:
        found["the sinks were left out"] = replace(right, sinks=False)
    if right.window is not None:
        found["the sliding window were ignored"] = replace(right, window=None)
        found["the sliding window were one token longer"] = replace(right, window=right.window + 1)
        if right.window > 1:
            found["the sliding window were one token shorter"] = replace(right, window=right.window - 1)
    if padded:
        found["padding were visible"] = replace(right, see_padding=True)
    if right.turns == (1, 1):
        for who, turns in (("queries", (2, 1)), ("keys", (1, 2)), ("queries and keys", (2, 2))):
            found[f"the {who} were rotated twice"] = replace(right, turns=turns)
        for who, turns in (("queries", (0, 1)), ("keys", (1, 0)), ("queries and keys", (0, 0))):
            found[f"the {who} were not rotated"] = replace(right, turns=turns)
        found["the sine of the rotation had the wrong sign"] = replace(right, turns=(-1, -1))
        for who, turns in (("queries", (-1, 1)), ("keys", (1, -1))):
            found[f"the {who} were rotated backwards"] = replace(right, turns=turns)
        for size, late in (("large", 1), ("small", -1)):
            found[f"the keys' positions were one too {size}, relative to the queries'"] = replace(right, late=late)
        for by, layout in ((", not those of the two halves", "pairs"), (" by the angles of the two halves", "mixed")):
            if right.layout == "halves":
                found[f"neighboring features were rotated{by}"] = replace(right, layout=layout)
        if right.layout == "pairs":
            found["features of the two halves were rotated, not neighboring ones"] = replace(right, layout="halves")
        for other in range(len(config.rotary_tables())):
            if other != right.table:
                where = "without a window" if other == 0 else "with a window"
                found[f"the frequencies were those of blocks {where}"] = replace(right, table=other)
    elif config.positions == "rotary":
        found["queries and keys were rotated, which this block does not do"] = replace(right, turns=(1, 1))
    if config.kv_heads not in (1, config.n_heads):
        found["keys were shared by every n-th query, not by neighbors"] = replace(right, grouped=False)
    if config.kv_heads < config.n_heads:
        found["keys and values lacked the sum over the queries that share them"] = replace(right, summed=False)
    if config.qk_norm:
        for who, letters in (("queries and keys", "qk"), ("queries", "q"), ("keys", "k")):
            found[f"the {who} were not normalized"] = replace(right, unnormed=letters)
    orders = ("kqv", "vkq", "qvk", "kvq", "vqk") if config.kv_heads == config.n_heads else ("qvk",)
    for order in orders if config.query_width == config.value_width else ():
        taken = _exchanged(order)
        found[taken] = replace(right, order=order)
        found[f"the error signals of {taken}"] = replace(right, returned=order)
    adapted = tuple(name for name in block.attn.inputs if getattr(block.attn, name).adapted)
    if len(adapted) > 1:
        found["the adapters were bypassed"] = replace(right, bypassed=adapted)
    for name in adapted:
        found[f"the adapter of {name} were bypassed"] = replace(right, bypassed=(name,))
    for which, away in (("next", 1), ("previous", -1)):
        found[f"its input were that of the {which} row"] = replace(right, away=away)
    for letter, name in zip("qkv", ("queries", "keys", "values"), strict=True):
        found[f"the {name} were detached"] = replace(right, detached=letter)
    return found


def _exchanged(order: str) -> str:
    """What it means that these are taken for q, k and v."""
    moved = [letter for letter, other in zip("qkv", order, strict=True) if letter != other]
    if len(moved) == 2:
        return f"{moved[0]} and {moved[1]} were exchanged"
    return f"q, k and v were taken in the order {', '.join(order)}"


def fitted_scale(residual: Callable[[float], Tensor], right: float) -> float | None:
    """The scale of the scores with which a tensor is closest to what was seen: the best of a coarse search, refined by
    Gauss-Newton steps; None if none is found. `residual` is the difference at a scale."""
    tried = [right * 2 ** (i / 2) for i in range(-16, 17)]
    scale = min(tried, key=lambda x: torch.linalg.vector_norm(residual(x)).item())
    for _ in range(8):
        here, step = residual(scale), 1e-6 * scale
        slope = (residual(scale + step) - here) / step
        square = torch.sum(slope * slope).item()
        if not square:
            return None
        scale -= torch.sum(slope * here).item() / square
        if not 0 < scale < math.inf:
            return None
    return scale


def compute(
    block: Block, config: ModelConfig, batch: AuditBatch, a_2: Tensor, choices: Heads, delta_3: Tensor | None
) -> Result:
    """The heads of one block with these choices. a_2 (B · T, d), Δ_3 (B · T, h d_h), both with padding."""
    attn = block.attn
    params = {n: p for n, p in attn.named_parameters() if not n.startswith(f"{config.table.names['attn.out']}.")}
    before = {p: p.requires_grad for p in params.values()}
    try:
        with torch.enable_grad():
            for p in params.values():
                p.requires_grad_(True)
            leaf = a_2.clone().requires_grad_()
            a_3 = _forward(block, config, batch, leaf, choices)
            if delta_3 is None:
                return Result(a_3.detach(), None, {})
            found = torch.autograd.grad((a_3 * delta_3).sum(), [leaf, *params.values()], allow_unused=True)
    finally:
        for p, trained in before.items():
            p.requires_grad_(trained)
    grads = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), found[1:], strict=True)}
    delta_2 = torch.zeros_like(a_2) if found[0] is None else found[0]
    return Result(a_3.detach(), delta_2, grads)


def _forward(block: Block, config: ModelConfig, batch: AuditBatch, a_2: Tensor, c: Heads) -> Tensor:
    attn, (sequences, n) = block.attn, batch.shape
    projected = [_project(getattr(attn, name), a_2, name in c.bypassed, c.away) for name in attn.inputs]
    if attn.inputs == ("qkv",):
        projected = [x.flatten(1) for x in attn.qkv.plain().split(projected[0])]
    projected = [projected["qkv".index(letter)] for letter in c.order]
    heads = [config.n_heads, config.kv_heads, config.kv_heads]
    q, k, v = (x.view(sequences * n, h, -1) for x, h in zip(projected, heads, strict=True))
    if config.qk_norm:
        q = q if "q" in c.unnormed else _rms(q, attn.q_norm.gain, config.eps)
        k = k if "k" in c.unnormed else _rms(k, attn.k_norm.gain, config.eps)
    rotations = (_rotation(config, batch, c, late) for late in (0, c.late))
    q, k = (_times(*given) for given in zip(rotations, (q, k), c.turns, strict=True))
    # the value of each with the gradient of another
    q, k, v = (
        x if x is y else x.detach() + (y - y.detach())
        for x, y in zip((q, k, v), ((q, k, v)["qkv".index(letter)] for letter in c.returned), strict=True)
    )
    q, k, v = (
        (x.detach() if letter in c.detached else x).view(sequences, n, -1, x.shape[-1]).transpose(1, 2)
        for letter, x in zip("qkv", (q, k, v), strict=True)
    )
    group = config.n_heads // config.kv_heads
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) if c.grouped else x.repeat(1, group, 1, 1) for x in (k, v))
        if not c.summed:
            first = (torch.arange(config.n_heads) % group == 0)[:, None, None]
            k, v = (torch.where(first, x, x.detach()) for x in (k, v))
    scores = q @ k.transpose(2, 3) * c.scale
    if c.cap is not None:
        scores = c.cap * torch.tanh(scores / c.cap)
    scores = scores.masked_fill(~_visible(batch, c), -math.inf)
    norm = torch.logsumexp(scores, -1, keepdim=True)
    if c.sinks and attn.sinks is not None:
        norm = torch.logaddexp(norm, attn.sinks[:, None, None])
    rho = torch.exp(scores - (norm if c.corrected else norm.detach()))
    return (rho @ v).transpose(1, 2).reshape(sequences * n, -1)


def _project(layer: Affine, a: Tensor, bypassed: bool, away: int) -> Tensor:
    plain = layer.plain()
    w, b = (plain if bypassed else layer).effective_weight(), plain.added_bias()
    product = a @ w
    if away:  # the same value, whose gradient by w is that of other rows
        other = a.detach().roll(-away, 0) @ w
        product = a @ w.detach() + (other - other.detach())
    return product if b is None else product + b


def _rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """(n, h, d_ρ), of every head or, with a wider gain, of all together"""
    rows = x if len(w) == x.shape[2] else x.flatten(1)
    return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * w).view_as(x)


def _rotation(config: ModelConfig, batch: AuditBatch, choices: Heads, late: int) -> Callable[[Tensor, int], Tensor]:
    if config.positions != "rotary":
        return lambda x, sign: x
    table, width, layout = config.rotary_tables()[choices.table], config.rotary_width_of_head, choices.layout
    limit = table.scaling.original_max_position_embeddings
    long = table.scaling.rope_type == "longrope" and limit is not None and max(batch.lengths) > limit
    theta, factor = rotary.frequencies(width, table.base, table.scaling, torch.float64, long=long)
    cos, sin = (x[:, None] for x in rotary.angles(batch.placed.flatten() + late, theta, factor))

    def rotate(x: Tensor, sign: int) -> Tensor:
        return torch.cat((turned(x[..., :width], sign), x[..., width:]), -1) if width < x.shape[-1] else turned(x, sign)

    def turned(x: Tensor, sign: int) -> Tensor:
        if layout == "mixed":
            across = torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
            return x * torch.cat((cos, cos), -1) + sign * across * torch.cat((sin, sin), -1)
        first, second = (x[..., 0::2], x[..., 1::2]) if layout == "pairs" else x.chunk(2, -1)
        pair = first * cos - sign * second * sin, second * cos + sign * first * sin
        return torch.stack(pair, -1).flatten(-2) if layout == "pairs" else torch.cat(pair, -1)

    return rotate


def _times(rotate: Callable[[Tensor, int], Tensor], x: Tensor, turns: int) -> Tensor:
    for _ in range(abs(turns)):
        x = rotate(x, 1 if turns > 0 else -1)
    return x


def _visible(batch: AuditBatch, c: Heads) -> Tensor:
    """(B, 1, T, T): which keys a query sees. One that would see none sees itself."""
    n = batch.shape[1]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = distance >= -c.ahead if c.causal else torch.ones(n, n, dtype=torch.bool)
    if c.window is not None:
        seen = seen & (distance < c.window)
    present = batch.inputs["attention_mask"].cpu() != 0
    shown = seen & (present[:, None] | c.see_padding)
    none = ~shown.any(-1, keepdim=True)
    return (shown | (none & torch.eye(n, dtype=torch.bool)))[:, None]
