"""Beyond the paper: norms after branches, L-post-*; parallel branches, L-parallel-*; a multiplier of branches, L-branch-*;
and gains 1 + w, L-gain-*."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import blocks, linear, rmsnorm
from ..paper.blocks import Branch, Path
from ..proof.oracles import relative_error
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error, shortfall

EPSILONS = (0.0, 1e-5, 0.1)
SCALES = (1.0, 0.22, 1.7)


class _Inputs(NamedTuple):
    x: Tensor  # (n_T, d)
    delta: Tensor  # (n_T, d)   upstream
    w: Tensor  # (d, d) of one branch
    v: Tensor  # (d, d) of another
    gains: Tensor  # (4, d)


def _inputs(rng: RandomInputs) -> _Inputs:
    n, d = rng.size(2, 6), rng.size(3, 8)
    return _Inputs(*(rng.matrix(*shape) for shape in ((n, d), (n, d), (d, d), (d, d), (4, d))))


def _branch(w: Tensor, w_post: Tensor | None = None) -> Branch:
    """tanh(a) w, whose slope depends on a"""
    return Branch(lambda a: torch.tanh(a) @ w, lambda delta, a: (delta @ w.t()) * (1 - torch.tanh(a) ** 2), w_post)


def _norm(a: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(a, w.shape, w, eps)


def _run(
    x: _Inputs, paths: list[Path], s: float, eps: float
) -> tuple[Tensor, list[blocks.PathForward], blocks.Backward]:
    y, saved = blocks.forward(x.x, paths, s, eps)
    return y, saved, blocks.backward(x.delta, paths, saved, s)


# ── norms after branches ────────────────────────────────────────────────────────────────────────────────────────────


def _post(x: _Inputs, before: bool) -> list[Path]:
    return [Path([_branch(x.w, x.gains[1])], x.gains[0] if before else None)]


def _by_torch(x: _Inputs, before: bool, eps: float) -> Callable[..., Tensor]:
    """y from x, the gains before and after, or what the branch computes if that is given"""

    def network(a: Tensor, gains: Tensor, f: Tensor | None = None) -> Tensor:
        read = _norm(a, gains[0], eps) if before else a
        return a + _norm(torch.tanh(read) @ x.w if f is None else f, gains[1], eps)

    return network


@check("L-post-fwd", BEYOND, "", IDENTITY)
def norm_after(rng: RandomInputs) -> float:
    """y = x + norm(f(a)) ∈ (n_T, d) with a = norm(x), or a = x; without ε and with gain 1 a vector of length √d is added,
    whatever f(a)"""
    x = _inputs(rng)
    errors = [
        relative_error(_run(x, _post(x, b), 1, e)[0], _by_torch(x, b, e)(x.x, x.gains))
        for b in (True, False)
        for e in EPSILONS
    ]
    ones = x._replace(gains=torch.ones_like(x.gains))
    added = _run(ones, _post(ones, False), 1, 0.0)[0] - x.x
    return max(*errors, relative_error(added.square().mean(1), torch.ones(len(added), dtype=torch.float64)))


@check("L-post-bwd", BEYOND, "", AUTOGRAD)
def norm_after_backward(rng: RandomInputs) -> float:
    """Δ_f: Δ_y through the norm after f ∈ (n_T, d); Δ_x = Δ_y + Δ_a through the norm before it, or Δ_y + Δ_a"""
    x, errors = _inputs(rng), []
    for before in (True, False):
        for eps in EPSILONS:
            _, saved, back = _run(x, _post(x, before), 1, eps)
            network = _by_torch(x, before, eps)
            f = saved[0].branches[0].f
            errors += [
                gradient_error(back.delta_f[0][0], lambda f, n=network: n(x.x, x.gains, f), f, x.delta, rng),  # type: ignore[misc]
                gradient_error(back.delta_x, lambda a, n=network: n(a, x.gains), x.x, x.delta, rng),  # type: ignore[misc]
            ]
    return max(errors)


@check("L-post-grad", BEYOND, "", AUTOGRAD)
def gradient_of_the_gain_after(rng: RandomInputs) -> float:
    """∂w_post = Σ_tok f̄∘Δ_y ∈ (d), and that of the norm before f, Σ_tok x̄∘Δ_a"""
    x = _inputs(rng)
    back = _run(x, _post(x, True), 1, 1e-5)[2]
    grads = back.grad_norm[0], back.grad_post[0][0]
    assert grads[0] is not None and grads[1] is not None
    ours = torch.stack([grads[0], grads[1], *torch.zeros(2, len(grads[0]), dtype=torch.float64)])
    return gradient_error(ours, lambda gains: _by_torch(x, True, 1e-5)(x.x, gains), x.gains, x.delta, rng)


@check("L-post-orthogonal", BEYOND, "", IDENTITY)
def norm_after_orthogonal(rng: RandomInputs) -> float:
    """f⊖Δ_f = (ε/rms²) (f̄⊖(Δ_y∘w)) ∈ (n_T): 0 without ε, since f and 2 f have one norm; then doubling f halves Δ_f"""
    x, errors = _inputs(rng), []
    for eps in EPSILONS:
        _, saved, back = _run(x, _post(x, True), 1, eps)
        (b,), delta_f = saved[0].branches, back.delta_f[0][0]
        assert b.post is not None
        theory = eps / b.post.rms**2 * (b.post.a_bar * x.delta * x.gains[1]).sum(1)
        errors.append(relative_error((b.f * delta_f).sum(1), theory, 1.0))
    doubled = _run(x._replace(w=2 * x.w), _post(x._replace(w=2 * x.w), True), 1, 0.0)[2].delta_f[0][0]
    halved = _run(x, _post(x, True), 1, 0.0)[2].delta_f[0][0] / 2
    return max(*errors, relative_error(doubled, halved))


# ── parallel branches ───────────────────────────────────────────────────────────────────────────────────────────────


def _parallel(x: _Inputs, norms: int) -> list[Path]:
    attention, feed_forward = _branch(x.w), _branch(x.v)
    if norms == 1:
        return [Path([attention, feed_forward], x.gains[0])]
    return [Path([attention], x.gains[0]), Path([feed_forward], x.gains[1])]


def _parallel_by_torch(x: _Inputs, norms: int) -> Callable[[Tensor, Tensor], Tensor]:
    def network(a: Tensor, gains: Tensor) -> Tensor:
        first, second = _norm(a, gains[0], 1e-5), _norm(a, gains[norms - 1], 1e-5)
        return a + torch.tanh(first) @ x.w + torch.tanh(second) @ x.v

    return network


@check("L-parallel-fwd", BEYOND, "", IDENTITY)
def parallel(rng: RandomInputs) -> float:
    """a_10 = a_1 + a_4 + a_9 ∈ (n_T, d): both branches read a_2 = norm(a_1), or each has its own norm of a_1; the order
    of the branches does not matter"""
    x, errors = _inputs(rng), []
    for norms in (1, 2):
        other = x._replace(w=x.v, v=x.w, gains=x.gains[[norms - 1, 0]])
        y, swapped = (_run(z, _parallel(z, norms), 1, 1e-5)[0] for z in (x, other))
        errors += [relative_error(y, _parallel_by_torch(x, norms)(x.x, x.gains)), relative_error(y, swapped)]
    first, second = _parallel(x, 2)
    one_by_one = blocks.forward(blocks.forward(x.x, [first], 1, 1e-5)[0], [second], 1, 1e-5)[0]
    return max(*errors, shortfall(relative_error(y, one_by_one), 1e-3))


@check("L-parallel-bwd", BEYOND, "", AUTOGRAD)
def parallel_backward(rng: RandomInputs) -> float:
    """Δ_4 = Δ_9 = Δ_10; Δ_1 = Δ_10 + what comes back through both branches ∈ (n_T, d); and the gains' gradients"""
    x, errors = _inputs(rng), []
    for norms in (1, 2):
        back, network = _run(x, _parallel(x, norms), 1, 1e-5)[2], _parallel_by_torch(x, norms)
        grads = torch.stack([g for g in back.grad_norm if g is not None])
        errors += [relative_error(delta, x.delta) for path in back.delta_f for delta in path]
        errors.append(gradient_error(back.delta_x, lambda a, n=network: n(a, x.gains), x.x, x.delta, rng))  # type: ignore[misc]
        errors.append(gradient_error(grads, lambda g, n=network: n(x.x, g), x.gains[:norms], x.delta, rng))  # type: ignore[misc]
    return max(errors)


@check("L-parallel-sum", BEYOND, "", IDENTITY)
def parallel_is_a_sum(rng: RandomInputs) -> float:
    """Δ_1 − Δ_10 of a block with both branches is the sum of those of two blocks with one each. With one norm Δ_2 is the sum
    of both branches' ∈ (n_T, d): what two norms with one gain w have is the same, and ∂w the sum of theirs"""
    x = _inputs(rng)
    alone = [_run(x, [path], 1, 1e-5)[2].delta_x - x.delta for path in _parallel(x, 2)]
    both = _run(x, _parallel(x, 2), 1, 1e-5)[2].delta_x - x.delta
    same = x._replace(gains=x.gains[[0, 0, 2, 3]])
    one, two = _run(same, _parallel(same, 1), 1, 1e-5)[2], _run(same, _parallel(same, 2), 1, 1e-5)[2]
    (joint,), (first, second) = one.grad_norm, two.grad_norm
    assert joint is not None and first is not None and second is not None
    return max(
        relative_error(both, alone[0] + alone[1]),
        relative_error(one.delta_a[0], two.delta_a[0] + two.delta_a[1]),
        relative_error(one.delta_x, two.delta_x),
        relative_error(joint, first + second),
    )


# ── a multiplier of branches ────────────────────────────────────────────────────────────────────────────────────────


@check("L-branch-fwd", BEYOND, "", IDENTITY)
def multiplied_branch(rng: RandomInputs) -> float:
    """y = x + s f(norm(x)) ∈ (n_T, d), which is the block whose last matrix is s w"""
    x, errors = _inputs(rng), []
    for s in SCALES:
        y = _run(x, [Path([_branch(x.w)], x.gains[0])], s, 1e-5)[0]
        plain = _run(x, [Path([_branch(s * x.w)], x.gains[0])], 1, 1e-5)[0]
        torch_y = x.x + s * (torch.tanh(_norm(x.x, x.gains[0], 1e-5)) @ x.w)
        errors += [relative_error(y, plain), relative_error(y, torch_y)]
    return max(errors)


@check("L-branch-bwd", BEYOND, "", AUTOGRAD)
def multiplied_branch_backward(rng: RandomInputs) -> float:
    """Δ_f = s Δ_y ∈ (n_T, d), and nothing else changes: ∂w of the last matrix is s times that of the block with s w"""
    x, errors = _inputs(rng), []
    for s in SCALES:
        _, saved, back = _run(x, [Path([_branch(x.w)], x.gains[0])], s, 1e-5)

        def network(a: Tensor, w: Tensor, s: float = s) -> Tensor:
            return a + s * (torch.tanh(_norm(a, x.gains[0], 1e-5)) @ w)

        grad_w = linear.grad_w(back.delta_f[0][0], torch.tanh(saved[0].a))
        errors += [
            gradient_error(back.delta_x, lambda a, n=network: n(a, x.w), x.x, x.delta, rng),  # type: ignore[misc]
            gradient_error(grad_w, lambda w, n=network: n(x.x, w), x.w, x.delta, rng),  # type: ignore[misc]
        ]
    return max(errors)


# ── gains ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@check("L-gain-fwd", BEYOND, "", IDENTITY)
def gain_of_one_plus_w(rng: RandomInputs) -> float:
    """a_i = ā diag(1 + w) ∈ (n_T, d): w = 0 leaves ā"""
    x = _inputs(rng)
    w = x.gains[0]
    return max(
        relative_error(rmsnorm.forward(x.x, rmsnorm.gain(w), 1e-5).a, _norm(x.x, 1 + w, 1e-5)),
        relative_error(rmsnorm.forward(x.x, rmsnorm.gain(0 * w), 1e-5).a, _norm(x.x, torch.ones_like(w), 1e-5)),
    )


@check("L-gain-bwd", BEYOND, "", AUTOGRAD)
def gain_of_one_plus_w_backward(rng: RandomInputs) -> float:
    """Δ_{i−1} ∈ (n_T, d) is RMSNorm's with 1 + w for w; ∂w = Σ_tok ā∘Δ_i ∈ (d) does not change"""
    x = _inputs(rng)
    w = x.gains[0]
    f = rmsnorm.forward(x.x, rmsnorm.gain(w), 1e-5)
    return max(
        gradient_error(
            rmsnorm.delta_prev(x.delta, f.a_bar, f.rms, rmsnorm.gain(w)),
            lambda a: _norm(a, 1 + w, 1e-5),
            x.x,
            x.delta,
            rng,
        ),
        gradient_error(rmsnorm.grad_w(x.delta, f.a_bar), lambda w: _norm(x.x, 1 + w, 1e-5), w, x.delta, rng),
    )
