"""Fully connected layer.

a_{i−1}  (n, f_in)      w  (f_in, f_out)      b  (f_out)      a_i, Δ_i  (n, f_out)

Mixed precision: if one operand of a product is bfloat16, or `rounded` says so, float32 operands are rounded to it. Sums are
float32, and `dtype` is that of the result. A `branch` is a second product, x y (n, r) (r, f), that is added: see `lora.py`.
"""

import torch
from torch import Tensor

from ..kernels import calls, mixed_products, token_calls

Branch = calls.Branch
FEW_ROWS = token_calls.FEW_ROWS  # products of so few rows have another kernel, limited by reading the weights
SHORT = 4 * FEW_ROWS  # rows of a short prompt: for w stored by columns that kernel is still faster than turning w first


def forward(
    a: Tensor,
    w: Tensor,
    b: Tensor | None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    branch: Branch | None = None,
) -> Tensor:
    """a_i = a_{i−1} w + b~, written to `out` if that is given"""
    if torch.bfloat16 in (a.dtype, w.dtype):
        return product(a, w, out, dtype, bias=b, branch=branch)
    if branch is not None:
        return forward(a, w, b, out).addmm_(*branch)
    by_rows = w.stride(1) == 1
    if len(a) <= (FEW_ROWS if by_rows else SHORT) and out is None and calls.fits(a, w if by_rows else w.t()):
        out = a.new_empty(len(a), w.shape[1])
        for part, result in zip(torch.split(a, FEW_ROWS), torch.split(out, FEW_ROWS), strict=True):
            token_calls.few_rows(part, w, result)
        return out if b is None else out.add_(b)
    if calls.multiplies(a, w):
        return calls.product(a, w, out, bias=b)
    return torch.mm(a, w, out=out) if b is None else torch.addmm(b, a, w, out=out)


def backward(
    delta: Tensor,
    w: Tensor,
    into: Tensor | None = None,
    dtype: torch.dtype | None = None,
    rounded: bool = False,
    branch: Branch | None = None,
) -> Tensor:
    """Δ_{i−1} = Δ_i wᵗ, or Δ_{i−1} += Δ_i wᵗ"""
    return product(delta, w.t(), into, dtype, add=into is not None, rounded=rounded, branch=branch)


def grad_w(delta: Tensor, a: Tensor, into: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """∂w += a_{i−1}ᵗ Δ_i"""
    return product(a.t(), delta, into, dtype, add=into is not None)


def grad_b(delta: Tensor, into: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """∂b += Σ_tok Δ_i"""
    found = delta.sum(0, dtype=dtype)
    return found if into is None else into.add_(found)


def product(
    x: Tensor,
    y: Tensor,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    add: bool = False,
    bias: Tensor | None = None,
    rounded: bool = False,
    branch: Branch | None = None,
) -> Tensor:
    """x y + bias + branch in `dtype` (default: that of x), written, or added, to `out` if that is given"""
    dtype = out.dtype if out is not None else dtype or x.dtype
    if rounded or torch.bfloat16 in (x.dtype, y.dtype):
        return _mixed(x, y, out, dtype, add, bias, branch)
    if branch is not None:
        return product(x, y, out, add=add, bias=bias).addmm_(*branch)
    if calls.multiplies(x, y):
        return calls.product(x, y, out, add, bias)
    if add:
        assert out is not None and bias is None
        return out.addmm_(x, y)
    return torch.mm(x, y, out=out) if bias is None else torch.addmm(bias, x, y, out=out)


def _mixed(
    x: Tensor,
    y: Tensor,
    out: Tensor | None,
    dtype: torch.dtype,
    add: bool,
    bias: Tensor | None,
    branch: Branch | None,
) -> Tensor:
    """The same with operands rounded to bfloat16 and sums in float32; a result in bfloat16 is rounded once."""
    narrow = dtype == torch.bfloat16
    if calls.mixes(x, y, *(branch or ())) and not (add and narrow):
        exact = not narrow or x.shape[1] <= calls.DEEPEST_ROUNDED  # whether the kernel writes the result itself
        if exact and out is not None:
            result = out
        else:
            result = x.new_empty(x.shape[0], y.shape[1], dtype=dtype if exact else torch.float32)
        mixed_products.product(x, y, result, add, None if bias is None else bias.float(), branch)
        if exact:
            return result
    elif x.dtype == y.dtype == dtype == torch.bfloat16 and bias is None and branch is None:
        if add and out is not None:
            return out.addmm_(x, y)
        result = torch.mm(x, y)
    else:
        result = torch.mm(*_rounded(x, y))
        if branch is not None:
            result.addmm_(*_rounded(*branch))
        if bias is not None:
            result.add_(bias)
    if out is None:
        return result.to(dtype)
    return out.add_(result) if add else out.copy_(result)


def _rounded(*operands: Tensor) -> list[Tensor]:
    return [x.bfloat16().float() for x in operands]
