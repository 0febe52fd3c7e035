"""What the kernel for single new tokens needs of a model: sizes, and the addresses of norms and matrices.

    blocks = describe(model)            None if a layer has no kernel: then the blocks run one by one
    blocks.forward(a, places, rotation)

The kernel computes what `Block.forward` does; a block with a step that it does not know is refused, so its blocks run one by
one. Describe a model again when the blocks are not `current`, and after it was changed in other ways.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import calls, token_block, token_calls
from ..model.block import Block
from ..model.gpt import GPT
from ..model.layers.linear import Affine
from ..model.layers.mlp import MLP
from ..model.layers.norms import LayerNorm, Norm
from ..model.steps import UnknownStep, require_block


class TokenBlocks:
    """The blocks of a model for a few new tokens, one of each sequence."""

    def __init__(self, model: GPT, blocks: Sequence[token_block.Block], tensors: list[Tensor]):
        self._blocks = token_block.array(blocks)
        self._tensors = tensors  # whose addresses the blocks hold
        self._parameters = [p for block in model.blocks for p in block.parameters()]
        self._described = [_where(p) for p in self._parameters]

    @property
    def current(self) -> bool:
        """Whether the model's numbers are still where they were: the data of a parameter can be exchanged."""
        return [_where(p) for p in self._parameters] == self._described

    def forward(self, a: Tensor, places: token_calls.Places, rotation: tuple[Tensor, Tensor] | None) -> None:
        """a (n, d): a_1 of the first block, which becomes a_10 of the last"""
        token_block.forward(self._blocks, places, rotation, a)


def describe(model: GPT) -> TokenBlocks | None:
    """The model for the kernel; None if a part of it has none."""
    tensors: list[Tensor] = []
    try:
        return TokenBlocks(model, [_block(model, block, i, tensors) for i, block in enumerate(model.blocks)], tensors)
    except (_NoKernel, UnknownStep):
        return None


def _where(x: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return x.data_ptr(), x.shape, x.stride()


class _NoKernel(Exception):
    """Also where a parameter has another shape than its layer: the blocks one by one report it."""


def _block(model: GPT, block: Block, i: int, tensors: list[Tensor]) -> token_block.Block:
    require_block(block.steps(), "the code of single tokens")
    c, attn, mlp = model.config, block.attn, block.mlp
    assert isinstance(mlp, MLP)
    g = token_block.activation(mlp.g)
    if g is None:
        raise _NoKernel
    d, q_width, k_width, v_width = (
        c.d_model,
        c.n_heads * c.query_width,
        *(c.kv_heads * w for w in (c.query_width, c.value_width)),
    )
    qkv = _matrices(model, attn.projections(), d, q_width + k_width + v_width, tensors)
    inputs = _matrices(model, mlp.projections(), d, c.hidden_width * (2 if mlp.gated else 1), tensors)
    (out,) = _matrices(model, [attn.out], c.n_heads * c.value_width, d, tensors)
    (contract,) = _matrices(model, [mlp.contract], c.hidden_width, d, tensors)
    found = token_block.Block(
        i, c.d_model, c.n_heads, c.n_heads // c.kv_heads, c.query_width, c.value_width, c.hidden_width,
        attn.scores.window or 0, int(attn.rotated), g, int(mlp.gated), len(qkv), len(inputs),
        *attn.scores.numbers(c.query_width), 0 if attn.sinks is None else _numbers(attn.sinks, (c.n_heads,), tensors),
        norm_1=_norm(block.norm_1, d, tensors),
        norm_5=_norm(block.norm_2, d, tensors),
        out=out,
        contract=contract,
    )  # fmt: skip
    for matrices, given in ((found.qkv, qkv), (found.mlp, inputs)):
        for j, matrix in enumerate(given):
            matrices[j] = matrix
    if attn.normed:
        found.q_norm, found.k_norm = (_norm(x, c.query_width, tensors) for x in (attn.q_norm, attn.k_norm))
    return found


def _norm(norm: Norm, width: int, tensors: list[Tensor]) -> token_block.Norm:
    if norm.offset or (isinstance(norm, LayerNorm) and norm.bias is None):
        raise _NoKernel  # the kernel multiplies by the weight, and takes a norm without bias for RMSNorm
    w = _numbers(norm.weight, (width,), tensors)
    b = _numbers(norm.bias, (width,), tensors) if isinstance(norm, LayerNorm) else 0
    return token_block.Norm(w, b, norm.eps)


def _matrices(
    model: GPT, layers: Iterable[Affine], f_in: int, f_out: int, tensors: list[Tensor]
) -> list[token_block.Matrix]:
    """Layers with one input of width f_in, whose outputs are f_out wide side by side."""
    found = [_matrix(layer, model.rounds_activations, tensors) for layer in layers]
    if any(x.f_in != f_in for x in found) or sum(x.f_out for x in found) != f_out:
        raise _NoKernel
    return found


def _matrix(layer: Affine, rounds: bool, tensors: list[Tensor]) -> token_block.Matrix:
    branches, plain = layer.low_rank(), layer.plain()
    if branches is None or len(branches) > 1:
        raise _NoKernel
    fields: dict[str, Any] | None = None
    if plain.packed is None:
        w = plain.w.detach()
        if w.ndim == 2 and calls.fits(w if w.stride(1) == 1 else w.t()):
            fields = token_block.numbers(w)
            tensors.append(w)
    elif not plain.in_out and plain.like.dtype is calls.PACKED_DTYPE and plain.packed.data.is_cpu:
        fields = token_block.packed(plain.packed.data, plain.packed.kind, plain.packed.shape[1], rounds)
        tensors.append(plain.packed.data)
    if fields is None or fields["f_out"] != sum(plain.widths):
        raise _NoKernel
    f_in, f_out, bias = fields["f_in"], fields["f_out"], plain.added_bias()
    found = token_block.Matrix(**fields, b=0 if bias is None else _numbers(bias, (f_out,), tensors))
    for down, up, scale in branches:
        rank = down.shape[1]
        found.rank, found.scale = rank, scale
        found.down, found.up = _numbers(down, (f_in, rank), tensors), _numbers(up, (rank, f_out), tensors)
    return found


def _numbers(x: Tensor, shape: tuple[int, ...], tensors: list[Tensor]) -> int:
    """The address of contiguous numbers."""
    if x.shape != shape or not calls.fits(x) or not x.is_contiguous():
        raise _NoKernel
    tensors.append(x.detach())
    return x.data_ptr()
