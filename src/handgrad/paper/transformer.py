"""Section 7: the minimal transformer. `forward` is Table 2 from top to bottom, `backward` is Table 2 from bottom to
top with the gradients of Table 3, for any number of blocks: a block's a_10 is the next block's a_1, and its Δ_10 is the
next block's Δ_1.

    a_0 ids → a_1 embeddings → [ a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
                               → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9 ]
            → a_11 norm → a_12 logits → y_pred
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import activation, attention, embedding, layernorm, linear, lora, loss
from .attention import Head
from .notation import softmax


class Block(NamedTuple):
    """Parameters of a block, or their gradients. Σd_h = Σ_h d_h need not equal d (R36)."""

    w_1: Tensor  # (d)
    b_1: Tensor  # (d)
    heads: list[Head]
    w_3: Tensor  # (Σd_h, d)
    b_3: Tensor  # (d)
    w_5: Tensor  # (d)
    b_5: Tensor  # (d)
    w_6: Tensor  # (d, 4d)
    b_6: Tensor  # (4d)
    w_8: Tensor  # (4d, d)
    b_8: Tensor  # (d)


class Adapter(NamedTuple):
    """A low-rank adapter on the logits layer, or its gradients."""

    d_11: Tensor  # (d, r)
    u_11: Tensor  # (r, n_vocab)
    scale: float


class Network(NamedTuple):
    """Parameters of the network, or their gradients. Without w_11 the head is tied: w_11 = w_tokᵗ (R9)."""

    w_tok: Tensor  # (n_vocab, d)
    w_pos: Tensor  # (n_context, d)
    blocks: list[Block]
    w_10: Tensor  # (d)
    b_10: Tensor  # (d)
    w_11: Tensor | None = None  # (d, n_vocab)
    b_11: Tensor | None = None  # (n_vocab)
    adapter: Adapter | None = None


class Options(NamedTuple):
    g: str = "gelu_tanh"
    eps: float = 1e-5
    causal: bool = True


class BlockForward(NamedTuple):
    a_1: Tensor
    norm_1: layernorm.Forward
    a_2: Tensor
    heads: list[attention.Forward]
    a_3: Tensor
    a_4: Tensor
    a_5: Tensor
    norm_5: layernorm.Forward
    a_6: Tensor
    a_7: Tensor
    a_8: Tensor
    a_9: Tensor
    a_10: Tensor


class BlockBackward(NamedTuple):
    delta_10: Tensor
    delta_9: Tensor
    delta_8: Tensor
    delta_7: Tensor
    delta_6: Tensor
    delta_5: Tensor
    delta_4: Tensor
    delta_3: Tensor
    heads: list[attention.Backward]
    delta_2: Tensor
    delta_1: Tensor


class Forward(NamedTuple):
    a_0: Tensor
    a_1: Tensor
    blocks: list[BlockForward]
    norm_10: layernorm.Forward
    a_11: Tensor
    a_12: Tensor
    y_pred: Tensor


class Backward(NamedTuple):
    delta_12: Tensor
    delta_11: Tensor
    blocks: list[BlockBackward]
    delta_1: Tensor
    delta_0: Tensor  # of the one-hot input, (n_T, n_vocab)
    grads: Network


def add(*branches: Tensor) -> Tensor:
    """A skip connection: the stream plus the output of a branch; in the backward pass, the sum of their error signals."""
    return torch.stack(branches).sum(0)


# ── Table 2, forward ────────────────────────────────────────────────────────────────────────────────────────────────


def forward_block(a_1: Tensor, p: Block, o: Options) -> BlockForward:
    norm_1 = layernorm.forward(a_1, p.w_1, p.b_1, o.eps)
    a_2 = norm_1.a  # (38)
    heads, a_3 = attention.forward_heads(a_2, p.heads, o.causal)  # (34)
    a_4 = linear.forward(a_3, p.w_3, p.b_3)
    a_5 = add(a_1, a_4)
    norm_5 = layernorm.forward(a_5, p.w_5, p.b_5, o.eps)
    a_6 = norm_5.a  # (38)
    a_7 = linear.forward(a_6, p.w_6, p.b_6)
    a_8 = activation.g(a_7, o.g)
    a_9 = linear.forward(a_8, p.w_8, p.b_8)
    a_10 = add(a_5, a_9)
    return BlockForward(a_1, norm_1, a_2, heads, a_3, a_4, a_5, norm_5, a_6, a_7, a_8, a_9, a_10)


def forward_logits(a_11: Tensor, p: Network) -> Tensor:
    """a_12 = a_11 w_11 + b_11~ (+ scale a_11 d_11 u_11): the logits, with the adapter if there is one"""
    a_12 = linear.forward(a_11, head_weight(p), p.b_11)
    if p.adapter is not None:
        a_12 = a_12 + lora.forward(a_11, *p.adapter)  # (43)
    return a_12


def head_weight(p: Network) -> Tensor:
    """w_11, or w_tokᵗ in a tied network. (d, n_vocab)"""
    return p.w_tok.t() if p.w_11 is None else p.w_11


def forward(a_0: Tensor, p: Network, o: Options) -> Forward:
    n_tokens, n_context = len(a_0), len(p.w_pos)
    if n_tokens > n_context:
        raise ValueError(f"{n_tokens} tokens do not fit into a context of {n_context}: shorten the sequence")
    positions = torch.arange(n_tokens, device=a_0.device)
    a_1 = embedding.forward(a_0, p.w_tok) + embedding.forward(positions, p.w_pos)  # (2)
    blocks: list[BlockForward] = []
    a_10 = a_1
    for block in p.blocks:
        blocks.append(forward_block(a_10, block, o))
        a_10 = blocks[-1].a_10
    norm_10 = layernorm.forward(a_10, p.w_10, p.b_10, o.eps)
    a_11 = norm_10.a  # (38)
    a_12 = forward_logits(a_11, p)
    return Forward(a_0, a_1, blocks, norm_10, a_11, a_12, softmax(a_12))


# ── Table 2, backward, with Table 3 ─────────────────────────────────────────────────────────────────────────────────


def backward_block(delta_10: Tensor, p: Block, f: BlockForward, o: Options) -> tuple[BlockBackward, Block]:
    delta_9 = delta_10
    delta_8 = linear.delta_prev(delta_9, p.w_8)
    delta_7 = activation.delta_prev(delta_8, f.a_7, o.g)
    delta_6 = linear.delta_prev(delta_7, p.w_6)
    delta_5 = add(delta_10, layernorm.delta_prev(delta_6, f.norm_5.a_bar, f.norm_5.sigma, p.w_5))  # (40)
    delta_4 = delta_5
    delta_3 = linear.delta_prev(delta_4, p.w_3)
    heads, delta_2 = attention.backward_heads(delta_3, f.a_2, p.heads, attention.ManyForward(f.heads, f.a_3))  # (35)
    delta_1 = add(delta_5, layernorm.delta_prev(delta_2, f.norm_1.a_bar, f.norm_1.sigma, p.w_1))  # (40)
    grads = Block(
        w_1=layernorm.grad_w(delta_2, f.norm_1.a_bar),  # (41)
        b_1=layernorm.grad_b(delta_2),  # (42)
        heads=[head.grads for head in heads],  # (23), (24), (31), (32)
        w_3=linear.grad_w(delta_4, f.a_3),
        b_3=linear.grad_b(delta_4),
        w_5=layernorm.grad_w(delta_6, f.norm_5.a_bar),  # (41)
        b_5=layernorm.grad_b(delta_6),  # (42)
        w_6=linear.grad_w(delta_7, f.a_6),
        b_6=linear.grad_b(delta_7),
        w_8=linear.grad_w(delta_9, f.a_8),
        b_8=linear.grad_b(delta_9),
    )
    deltas = BlockBackward(
        delta_10, delta_9, delta_8, delta_7, delta_6, delta_5, delta_4, delta_3, heads, delta_2, delta_1
    )
    return deltas, grads


def delta_before_logits(delta_12: Tensor, p: Network) -> Tensor:
    """Δ_11 = Δ_12 w_11ᵗ (+ scale Δ_12 (d_11 u_11)ᵗ): the first term is there even if w_11 is frozen (R3)"""
    delta_11 = linear.delta_prev(delta_12, head_weight(p))
    if p.adapter is not None:
        delta_11 = delta_11 + lora.delta_prev(delta_12, *p.adapter)  # (44)
    return delta_11


def grad_w_tok(delta_1: Tensor, delta_12: Tensor, f: Forward, p: Network) -> Tensor:
    """∂w_tok = ohe(a_0)ᵗ Δ_1, plus Δ_12ᵗ a_11 when the head is tied: one matrix used twice gets the sum (R9)"""
    grad = embedding.grad_w(delta_1, f.a_0, len(p.w_tok))  # (3)
    if p.w_11 is None:
        grad = grad + linear.grad_w(delta_12, f.a_11).t()
    return grad


def backward(targets: Tensor, p: Network, f: Forward, o: Options) -> Backward:
    delta_12 = loss.delta_logits(f.y_pred, targets)
    delta_11 = delta_before_logits(delta_12, p)
    delta_10 = layernorm.delta_prev(delta_11, f.norm_10.a_bar, f.norm_10.sigma, p.w_10)  # (40)
    blocks: list[BlockBackward] = []
    block_grads: list[Block] = []
    for block, saved in zip(reversed(p.blocks), reversed(f.blocks), strict=True):
        deltas, grads = backward_block(delta_10, block, saved, o)
        blocks.insert(0, deltas)
        block_grads.insert(0, grads)
        delta_10 = deltas.delta_1
    delta_1 = delta_10
    positions = torch.arange(len(f.a_0), device=f.a_0.device)
    adapter = None
    if p.adapter is not None:
        d_11, u_11, scale = p.adapter
        adapter = Adapter(
            lora.grad_d(delta_12, f.a_11, u_11, scale),  # (45)
            lora.grad_u(delta_12, f.a_11, d_11, scale),  # (46)
            scale,
        )
    network_grads = Network(
        w_tok=grad_w_tok(delta_1, delta_12, f, p),
        w_pos=embedding.grad_w(delta_1, positions, len(p.w_pos)),  # (3)
        blocks=block_grads,
        w_10=layernorm.grad_w(delta_11, f.norm_10.a_bar),  # (41)
        b_10=layernorm.grad_b(delta_11),  # (42)
        w_11=None if p.w_11 is None else linear.grad_w(delta_12, f.a_11),
        b_11=None if p.b_11 is None else linear.grad_b(delta_12),
        adapter=adapter,
    )
    return Backward(delta_12, delta_11, blocks, delta_1, embedding.delta_one_hot(delta_1, p.w_tok), network_grads)
