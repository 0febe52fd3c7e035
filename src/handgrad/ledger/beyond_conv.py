"""Beyond the paper: the short causal convolution with gates, L-conv-*."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import short_conv
from ..proof.oracles import differentiate, relative_error
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error


class _Inputs(NamedTuple):
    b_gate: Tensor  # (n_T, d)
    c_gate: Tensor
    x: Tensor
    w: Tensor  # (L, d)
    b: Tensor  # (d)
    delta: Tensor  # (n_T, d)


def _inputs(rng: RandomInputs) -> _Inputs:
    """A sequence that may be shorter than the taps."""
    n, d, taps = rng.size(4, 8), rng.size(1, 5), rng.size(2, 6)
    b_gate, c_gate, x, delta = (rng.matrix(n, d) for _ in range(4))
    return _Inputs(b_gate, c_gate, x, rng.matrix(taps, d), rng.matrix(d), delta)


def _by_torch(b_gate: Tensor, c_gate: Tensor, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """y by torch's convolution of d channels, which multiplies the last token by the last of its weights"""
    padded = F.pad((b_gate * x).t()[None], (len(w) - 1, 0))
    return c_gate * F.conv1d(padded, w.flip(0).t()[:, None], b, groups=len(b))[0].t()


@check("L-conv-fwd", BEYOND, "", IDENTITY)
def conv_forward(rng: RandomInputs) -> float:
    """y = C∘c ∈ (n_T, d) with c(t) = Σ_j w_j∘z(t − j) + b over t − j ≥ 0 and z = B∘x; also of fewer tokens than taps"""
    i = _inputs(rng)
    ours = short_conv.forward(*i[:5])
    return max(relative_error(ours.y, _by_torch(*i[:5])), relative_error(ours.z, i.b_gate * i.x))


@check("L-conv-bwd", BEYOND, "", AUTOGRAD)
def conv_backward(rng: RandomInputs) -> float:
    """Δ_C = Δ_y∘c, Δ_c = Δ_y∘C, Δ_z(t) = Σ_j w_j∘Δ_c(t + j) over t + j < n_T, Δ_B = Δ_z∘x, Δ_x = Δ_z∘B"""
    i = _inputs(rng)
    f = F.conv1d(F.pad((i.b_gate * i.x).t()[None], (len(i.w) - 1, 0)), i.w.flip(0).t()[:, None], i.b, groups=len(i.b))
    d_z = short_conv.delta_z(short_conv.delta_c(i.delta, i.c_gate), i.w)
    ours = {
        0: short_conv.delta_b_gate(d_z, i.x),
        1: short_conv.delta_c_gate(i.delta, f[0].t()),
        2: short_conv.delta_x(d_z, i.b_gate),
    }
    return max(
        gradient_error(grad, lambda x, k=k: _by_torch(*(*i[:k], x, *i[k + 1 :])[:5]), i[k], i.delta, rng)  # type: ignore[misc]
        for k, grad in ours.items()
    )


@check("L-conv-grad", BEYOND, "", AUTOGRAD)
def conv_gradients(rng: RandomInputs) -> float:
    """∂w_j = Σ_t z(t − j)∘Δ_c(t) over t − j ≥ 0 ∈ (L, d), ∂b = Σ_tok Δ_c"""
    i = _inputs(rng)
    delta = short_conv.delta_c(i.delta, i.c_gate)
    grad = short_conv.grad_w(delta, i.b_gate * i.x, len(i.w))
    return max(
        gradient_error(grad, lambda w: _by_torch(*i[:3], w, i.b), i.w, i.delta, rng),
        gradient_error(short_conv.grad_b(delta), lambda b: _by_torch(*i[:4], b), i.b, i.delta, rng),
    )


@check("L-conv-causal", BEYOND, "", AUTOGRAD)
def conv_is_causal(rng: RandomInputs) -> float:
    """y(t) depends on x(t − L + 1) … x(t) and on no other token"""
    i, error = _inputs(rng), 0.0
    n, taps = len(i.x), len(i.w)
    for t in range(n):
        (grad,) = differentiate(lambda x, t=t: short_conv.forward(i.b_gate, i.c_gate, x, i.w, i.b).y[t].sum(), i.x)
        others = [s for s in range(n) if not t - taps < s <= t]
        error = max([error, *(grad[s].abs().max().item() for s in others)])
    return error


@check("L-conv-cache", BEYOND, "", IDENTITY)
def conv_continued(rng: RandomInputs) -> float:
    """The last L − 1 rows of z continue a sequence: token by token, or several at once, c has the rows of the whole"""
    i = _inputs(rng)
    z = i.b_gate * i.x
    whole, behind = _by_torch(i.b_gate, torch.ones_like(z), i.x, i.w, i.b), len(i.w) - 1
    padded = torch.cat([z.new_zeros(behind, z.shape[1]), z])
    errors = []
    for start in range(len(z)):
        for stop in (start + 1, len(z)):
            c = short_conv.continued(padded[start : start + behind], z[start:stop], i.w, i.b)
            errors.append(relative_error(c, whole[start:stop]))
    return max(errors)
