"""Beyond the paper: gradients per example, L-example-*. Each formula is compared with gradients that autograd computes for
one example at a time."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import per_example
from ..proof.oracles import differentiate, relative_error
from .check import AUTOGRAD, BEYOND, IDENTITY, RandomInputs, check, gradient_error

NO_TARGET = -100


class _Examples(NamedTuple):
    """Two examples of uneven length."""

    a: tuple[Tensor, Tensor]  # (n_i, f_in)
    delta: tuple[Tensor, Tensor]  # (n_i, f_out)


def _inputs(rng: RandomInputs) -> _Examples:
    n, f_in, f_out = rng.size(2, 5), rng.size(2, 7), rng.size(2, 7)
    lengths = (n, n + rng.size(1, 3))
    a, delta = (tuple(rng.matrix(length, f) for length in lengths) for f in (f_in, f_out))
    return _Examples(a, delta)  # type: ignore[arg-type]


def _product_error(
    ours: Callable[[int, int], Tensor], f: Callable[[Tensor, int], Tensor], w: Tensor, x: _Examples
) -> float:
    """ours(i, j) against the products of the gradients of Δ_i · f(w, i) by autograd, for all pairs of the two examples"""
    grads = [differentiate(lambda w, i=i: f(w, i), w, upstream=x.delta[i])[0] for i in (0, 1)]
    found = torch.stack([ours(i, j) for i in (0, 1) for j in (0, 1)])
    expected = torch.stack([(grads[i] * grads[j]).sum() for i in (0, 1) for j in (0, 1)])
    return relative_error(found, expected)


def _pair(x: tuple[Tensor, Tensor], i: int, j: int) -> tuple[Tensor, Tensor]:
    return x[i], x[j]


# ── the shares of a batch ───────────────────────────────────────────────────────────────────────────────────────────


class _Batch(NamedTuple):
    a: Tensor  # (n, d)   inputs of the logits layer
    w: Tensor  # (d, n_vocab)
    targets: Tensor  # (n)
    rows: tuple[slice, slice]  # of the two examples
    counts: tuple[int, int]  # targets of each


def _batch(rng: RandomInputs) -> _Batch:
    first, d, n_vocab = rng.size(2, 5), rng.size(2, 6), rng.size(3, 7)
    second = first + rng.size(0, 2)  # more targets than the first example, of which one is ignored
    targets = rng.ids(first + second, n_vocab)
    targets[0] = NO_TARGET
    rows = slice(0, first), slice(first, first + second)
    return _Batch(rng.matrix(first + second, d), rng.matrix(d, n_vocab), targets, rows, (first - 1, second))


def _mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=NO_TARGET)


@check("L-example-fwd", BEYOND, "", IDENTITY)
def loss_of_a_batch_of_examples(rng: RandomInputs) -> float:
    """L = Σ_i (m_i/M) L_i: the mean loss over M targets, from the means L_i of examples with m_i of them"""
    b = _batch(rng)
    logits = b.a @ b.w
    alone = [_mean_loss(logits[rows], b.targets[rows]) for rows in b.rows]
    return relative_error(per_example.batch_loss(alone, b.counts), _mean_loss(logits, b.targets))


@check("L-example-bwd", BEYOND, "", AUTOGRAD)
def gradient_of_an_example_from_the_batch(rng: RandomInputs) -> float:
    """∂L_i/∂w = (M/m_i) a_iᵗ Δ_i, from the rows of the batch's Δ = ∂L/∂a: the gradient of example i alone"""
    b = _batch(rng)
    (delta,) = differentiate(lambda logits: _mean_loss(logits, b.targets), b.a @ b.w)
    errors = []
    for rows, count in zip(b.rows, b.counts, strict=True):

        def alone(w: Tensor, rows: slice = rows) -> Tensor:
            return _mean_loss(b.a[rows] @ w, b.targets[rows])

        ours = per_example.grad_w(b.a[rows], delta[rows], count, sum(b.counts))
        errors.append(gradient_error(ours, alone, b.w, torch.ones((), dtype=b.w.dtype), rng))
    return max(errors)


# ── products of gradients ───────────────────────────────────────────────────────────────────────────────────────────


@check("L-example-linear", BEYOND, "", AUTOGRAD)
def product_of_weight_gradients(rng: RandomInputs) -> float:
    """⟨∂w_i, ∂w_j⟩ = (a_i a_jᵗ) · (Δ_i Δ_jᵗ), two matrices (n_i, n_j)"""
    x = _inputs(rng)
    w = rng.matrix(x.a[0].shape[1], x.delta[0].shape[1])
    return _product_error(
        lambda i, j: per_example.product_w(x.a[i], x.delta[i], x.a[j], x.delta[j]), lambda w, i: x.a[i] @ w, w, x
    )


@check("L-example-bias", BEYOND, "", AUTOGRAD)
def product_of_bias_gradients(rng: RandomInputs) -> float:
    """⟨∂b_i, ∂b_j⟩ = (Σ_tok Δ_i) · (Σ_tok Δ_j)"""
    x = _inputs(rng)
    b = rng.matrix(x.delta[0].shape[1])
    return _product_error(
        lambda i, j: per_example.product_b(x.delta[i], x.delta[j]), lambda b, i: b.expand(len(x.delta[i]), -1), b, x
    )


@check("L-example-gain", BEYOND, "", AUTOGRAD)
def product_of_gain_gradients(rng: RandomInputs) -> float:
    """⟨∂w_i, ∂w_j⟩ of a norm's gain = (Σ_tok ā_i∘Δ_i) · (Σ_tok ā_j∘Δ_j)"""
    x = _inputs(rng)
    bars = tuple(F.normalize(rng.matrix(*delta.shape), dim=1) for delta in x.delta)
    return _product_error(
        lambda i, j: per_example.product_gain(x.delta[i], bars[i], x.delta[j], bars[j]),
        lambda w, i: bars[i] * w, rng.matrix(x.delta[0].shape[1]), x,
    )  # fmt: skip


def _tokens(x: _Examples, rng: RandomInputs, n_vocab: int) -> tuple[Tensor, Tensor]:
    """Ids of both examples, with repetitions and an id in common."""
    ids = tuple(rng.ids(len(delta), n_vocab) for delta in x.delta)
    ids[0][0] = ids[0][1] = ids[1][0] = 1
    return ids  # type: ignore[return-value]


@check("L-example-table", BEYOND, "", AUTOGRAD)
def product_of_embedding_gradients(rng: RandomInputs) -> float:
    """⟨∂w_i, ∂w_j⟩ of a table = Σ_st [id_s = id_t] (Δ_i Δ_jᵗ)_st: rows of equal ids meet"""
    x, n_vocab = _inputs(rng), 5
    ids = _tokens(x, rng, n_vocab)
    return _product_error(
        lambda i, j: per_example.product_table(ids[i], x.delta[i], ids[j], x.delta[j], n_vocab),
        lambda w, i: F.embedding(ids[i], w), rng.matrix(n_vocab, x.delta[0].shape[1]), x,
    )  # fmt: skip


@check("L-example-tied", BEYOND, "", AUTOGRAD)
def product_of_tied_gradients(rng: RandomInputs) -> float:
    """⟨E_i + H_i, E_j + H_j⟩ of a matrix used as embedding and as logits layer: the cross terms
    ⟨E_i, H_j⟩ = (ohe(ids_i) Δ_12jᵗ) · (Δ_1i a_11jᵗ) belong to it"""
    x, n_vocab = _inputs(rng), 5
    ids, d = _tokens(x, rng, n_vocab), x.delta[0].shape[1]
    a_11 = tuple(rng.matrix(len(delta), d) for delta in x.delta)
    delta_12 = tuple(rng.matrix(len(delta), n_vocab) for delta in x.delta)

    def both_uses(w: Tensor, i: int) -> Tensor:
        return torch.cat([F.embedding(ids[i], w), a_11[i] @ w.t()], 1)

    uses = _Examples(x.a, tuple(torch.cat(pair, 1) for pair in zip(x.delta, delta_12, strict=True)))  # type: ignore[arg-type]
    return _product_error(
        lambda i, j: per_example.product_tied(
            _pair(ids, i, j), _pair(x.delta, i, j), _pair(a_11, i, j), _pair(delta_12, i, j)  # type: ignore[arg-type]
        ),
        both_uses, rng.matrix(n_vocab, d), uses,
    )  # fmt: skip


@check("L-example-lora", BEYOND, "", AUTOGRAD)
def product_of_adapter_gradients(rng: RandomInputs) -> float:
    """⟨∂d_i, ∂d_j⟩ = (a_i a_jᵗ) · (g_i g_jᵗ) and ⟨∂u_i, ∂u_j⟩ = scale² (h_i h_jᵗ) · (Δ_i Δ_jᵗ) with h = a d and
    g = scale Δ uᵗ"""
    x, scale = _inputs(rng), 0.7
    r = rng.size(1, 3)
    d, u = rng.matrix(x.a[0].shape[1], r), rng.matrix(r, x.delta[0].shape[1])
    return max(
        _product_error(
            lambda i, j: per_example.product_d(_pair(x.a, i, j), _pair(x.delta, i, j), u, scale),
            lambda d, i: scale * x.a[i] @ d @ u, d, x,
        ),
        _product_error(
            lambda i, j: per_example.product_u(_pair(x.a, i, j), _pair(x.delta, i, j), d, scale),
            lambda u, i: scale * x.a[i] @ d @ u, u, x,
        ),
    )  # fmt: skip


@check("L-example-magnitude", BEYOND, "", AUTOGRAD)
def product_of_magnitude_gradients(rng: RandomInputs) -> float:
    """⟨∂m_i, ∂m_j⟩ = (Σ_tok Δ_i∘z_i / c) · (Σ_tok Δ_j∘z_j / c), DoRA's magnitude"""
    x = _inputs(rng)
    z = tuple(rng.matrix(*delta.shape) for delta in x.delta)
    c = 1 + rng.matrix(x.delta[0].shape[1]).square()
    return _product_error(
        lambda i, j: per_example.product_m(_pair(x.delta, i, j), _pair(z, i, j), c),  # type: ignore[arg-type]
        lambda m, i: z[i] * (m / c), rng.matrix(len(c)), x,
    )  # fmt: skip


@check("L-example-with", BEYOND, "", AUTOGRAD)
def product_with_a_given_gradient(rng: RandomInputs) -> float:
    """⟨∂w_i, Q⟩ = (a_i Q) · Δ_i for a given Q (f_in, f_out): as cheap as ∂w itself"""
    x = _inputs(rng)
    q, w = rng.matrix(x.a[0].shape[1], x.delta[0].shape[1]), rng.matrix(x.a[0].shape[1], x.delta[0].shape[1])
    grad = differentiate(lambda w: x.a[0] @ w, w, upstream=x.delta[0])[0]
    return relative_error(per_example.product_with(x.a[0], x.delta[0], q), (grad * q).sum())
