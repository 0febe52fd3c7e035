"""Other orders of a block than the paper's: y = x + s Σ branch, where the branches of a path read norm(x), or x itself,
and a norm may come after a branch.

    x, y, a, f, Δ  (n_T, d)      w_norm, w_post  (d)      s  a number

The paper's block is twice one path with one branch, a norm before it, none after it, and s = 1. A branch is given as
functions: attention, the feed-forward layer, or anything else from (n_T, d) to (n_T, d). Norms are RMSNorm.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import rmsnorm


class Branch(NamedTuple):
    f: Callable[[Tensor], Tensor]  # a → f(a)
    delta_prev: Callable[[Tensor, Tensor], Tensor]  # Δ_f, a → Δ_a
    w_post: Tensor | None = None  # the gain of a norm after it


class Path(NamedTuple):
    branches: Sequence[Branch]
    w_norm: Tensor | None = None  # the gain of the norm before them


class BranchForward(NamedTuple):
    f: Tensor
    post: rmsnorm.Forward | None
    added: Tensor  # to the stream: f, or norm(f)


class PathForward(NamedTuple):
    norm: rmsnorm.Forward | None
    a: Tensor  # what the branches read
    branches: list[BranchForward]


class Backward(NamedTuple):
    delta_x: Tensor
    delta_a: list[Tensor]  # of what the branches read, by path
    delta_f: list[list[Tensor]]  # of what each branch computes, by path
    grad_norm: list[Tensor | None]  # by path
    grad_post: list[list[Tensor | None]]


def forward(x: Tensor, paths: Sequence[Path], s: float, eps: float) -> tuple[Tensor, list[PathForward]]:
    """y = x + s Σ branch"""
    saved = [forward_path(x, path, eps) for path in paths]
    return x + scaled(total([b.added for path in saved for b in path.branches]), s), saved


def forward_path(x: Tensor, path: Path, eps: float) -> PathForward:
    """a = norm(x), or x; each branch adds f(a), or norm(f(a))"""
    norm = None if path.w_norm is None else rmsnorm.forward(x, path.w_norm, eps)
    a = x if norm is None else norm.a
    return PathForward(norm, a, [forward_branch(a, branch, eps) for branch in path.branches])


def forward_branch(a: Tensor, branch: Branch, eps: float) -> BranchForward:
    f = branch.f(a)
    post = None if branch.w_post is None else rmsnorm.forward(f, branch.w_post, eps)
    return BranchForward(f, post, f if post is None else post.a)


def backward(delta_y: Tensor, paths: Sequence[Path], saved: Sequence[PathForward], s: float) -> Backward:
    """Δ_x = Δ_y + Σ over the paths of what comes back through them, each of whose branches gets s Δ_y"""
    delta_added = scaled(delta_y, s)
    delta_x, out = delta_y, Backward(delta_y, [], [], [], [])
    for path, kept in zip(paths, saved, strict=True):
        pairs = list(zip(path.branches, kept.branches, strict=True))
        delta_f = [delta_of_branch(delta_added, branch, b) for branch, b in pairs]
        delta_a = total([branch.delta_prev(d, kept.a) for (branch, _), d in zip(pairs, delta_f, strict=True)])
        delta_x = delta_x + delta_of_path(delta_a, path, kept)
        out.delta_a.append(delta_a)
        out.delta_f.append(delta_f)
        out.grad_norm.append(None if kept.norm is None else rmsnorm.grad_w(delta_a, kept.norm.a_bar))
        out.grad_post.append([None if b.post is None else rmsnorm.grad_w(delta_added, b.post.a_bar) for _, b in pairs])
    return out._replace(delta_x=delta_x)


def delta_of_branch(delta_added: Tensor, branch: Branch, saved: BranchForward) -> Tensor:
    """Δ_f: through the norm after the branch, if there is one"""
    if branch.w_post is None or saved.post is None:
        return delta_added
    return rmsnorm.delta_prev(delta_added, saved.post.a_bar, saved.post.rms, branch.w_post)


def delta_of_path(delta_a: Tensor, path: Path, saved: PathForward) -> Tensor:
    """What the path adds to Δ_x: Δ_a through the norm before the branches, if there is one"""
    if path.w_norm is None or saved.norm is None:
        return delta_a
    return rmsnorm.delta_prev(delta_a, saved.norm.a_bar, saved.norm.rms, path.w_norm)


def scaled(x: Tensor, s: float) -> Tensor:
    """s x, of what the branches add, and of Δ on its way back to them"""
    return s * x


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what several branches compute, or of what comes back through them"""
    return torch.stack(list(parts)).sum(0)
