"""What the kernel for single new tokens needs of a model: sizes, and the addresses of norms and matrices.

    blocks = describe(model)            None if a layer has no kernel: then the blocks run one by one
    blocks.forward(a, places, rotation)

The kernel computes what `Block.forward` does. Describe a model again after it was changed: the addresses may be others.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..kernels import calls, token_block
from .block import Block
from .gpt import GPT
from .layers import Affine
from .norms import LayerNorm, Norm


class TokenBlocks:
    """The blocks of a model for a few new tokens, one of each sequence."""

    def __init__(self, blocks: Sequence[token_block.Block], tensors: list[Tensor]):
        self._blocks = token_block.array(blocks)
        self._tensors = tensors  # whose addresses the blocks hold

    def forward(self, a: Tensor, places: Tensor, rotation: tuple[Tensor, Tensor] | None) -> None:
        """a (n, d): a_1 of the first block, which becomes a_10 of the last"""
        token_block.forward(self._blocks, places, rotation, a)


def describe(model: GPT) -> TokenBlocks | None:
    """The model for the kernel; None if a part of it has none."""
    tensors: list[Tensor] = []
    try:
        return TokenBlocks([_block(model, block, i, tensors) for i, block in enumerate(model.blocks)], tensors)
    except _NoKernel:
        return None


class _NoKernel(Exception):
    pass


def _block(model: GPT, block: Block, i: int, tensors: list[Tensor]) -> token_block.Block:
    c, attn, mlp = model.config, block.attn, block.mlp
    g = token_block.activation(mlp.g)
    if g is None:
        raise _NoKernel
    qkv = [_matrix(layer, tensors) for layer in attn.projections()]
    inputs = [_matrix(layer, tensors) for layer in mlp.projections()]
    found = token_block.Block(
        i, c.d_model, c.n_heads, c.n_heads // c.kv_heads, c.query_width, c.value_width, c.hidden_width,
        attn.window or 0, int(attn.rotated), g, int(mlp.gated), len(qkv), len(inputs),
        norm_1=_norm(block.norm_1, tensors),
        norm_5=_norm(block.norm_2, tensors),
        out=_matrix(attn.out, tensors),
        contract=_matrix(mlp.contract, tensors),
    )  # fmt: skip
    for matrices, given in ((found.qkv, qkv), (found.mlp, inputs)):
        for j, matrix in enumerate(given):
            matrices[j] = matrix
    if attn.normed:
        found.q_norm, found.k_norm = _norm(attn.q_norm, tensors), _norm(attn.k_norm, tensors)
    return found


def _norm(norm: Norm, tensors: list[Tensor]) -> token_block.Norm:
    w = _numbers(norm.weight, tensors)
    b = _numbers(norm.bias, tensors) if isinstance(norm, LayerNorm) else 0
    return token_block.Norm(w, b, norm.eps)


def _matrix(layer: Affine, tensors: list[Tensor]) -> token_block.Matrix:
    branches, plain = layer.low_rank(), layer.plain()
    if branches is None or len(branches) > 1:
        raise _NoKernel
    fields: dict[str, Any] | None = None
    if plain.packed is None:
        w = plain.w.detach()
        if calls.fits(w if w.stride(1) == 1 else w.t()):
            fields = token_block.numbers(w)
            tensors.append(w)
    elif not plain.in_out and plain.like.dtype is calls.PACKED_DTYPE and plain.packed.data.is_cpu:
        fields = token_block.packed(plain.packed.data, plain.packed.kind, plain.packed.shape[1])
        tensors.append(plain.packed.data)
    if fields is None:
        raise _NoKernel
    bias = plain.added_bias()
    found = token_block.Matrix(**fields, b=0 if bias is None else _numbers(bias, tensors))
    for down, up, scale in branches:
        found.rank, found.scale = down.shape[1], scale
        found.down, found.up = _numbers(down, tensors), _numbers(up, tensors)
    return found


def _numbers(x: Tensor, tensors: list[Tensor]) -> int:
    """The address of contiguous numbers."""
    if not calls.fits(x) or not x.is_contiguous():
        raise _NoKernel
    tensors.append(x)
    return x.data_ptr()
