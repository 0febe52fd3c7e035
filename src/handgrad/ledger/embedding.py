"""Section 2: token and positional embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import embedding, loss, notation, transformer
from ..proof.oracles import differentiate, relative_error
from .check import AUTOGRAD, EXACT, RandomInputs, check, disagreement, mismatch, raises, shortfall
from .loss import OPTIONS


def _inputs(rng: RandomInputs) -> tuple[Tensor, Tensor, Tensor]:
    """ids (n_T,), two of them equal; w_emb (n_V, d) with more rows than tokens; an upstream Δ (n_T, d)"""
    n, d = rng.size(3, 8), rng.size(4, 8)
    n_rows = n + rng.size(1, 4)
    ids = rng.ids(n, n_rows)
    ids[-1] = ids[0]
    return ids, rng.matrix(n_rows, d), rng.matrix(n, d)


@check("D-emb-store", 2, "1", EXACT)
def embedding_store(rng: RandomInputs) -> float:
    """w_emb ∈ (n_V, d): row t is the embedding of id t; n_V is n_vocab for tokens and n_context for positions"""
    n_vocab, n_context, d = rng.size(3, 8), rng.size(9, 12), rng.size(1, 8)
    net = rng.network(n_vocab, n_context, d, [(1, 1)])
    targets = loss.next_tokens(ids := rng.ids(3, n_vocab))
    grads = transformer.backward(targets, net, transformer.forward(ids, net, OPTIONS), OPTIONS).grads
    shapes = mismatch((grads.w_tok.shape, (n_vocab, d)), (grads.w_pos.shape, (n_context, d)))
    return max(shapes, _rows_by_id(net.w_tok), _rows_by_id(net.w_pos))


def _rows_by_id(w_emb: Tensor) -> float:
    n_rows = len(w_emb)
    beyond = raises(IndexError, lambda: embedding.forward(torch.tensor([n_rows]), w_emb))
    return max(relative_error(embedding.forward(torch.arange(n_rows), w_emb), w_emb), mismatch((beyond, True)))


@check("P-ctx-bound", 2, "", EXACT)
def context_bound(rng: RandomInputs) -> float:
    """n_T ≤ n_context: a sequence may fill the context; one token more raises an error"""
    n_context, n_vocab = rng.size(3, 8), rng.size(3, 8)
    net = rng.network(n_vocab, n_context, 3, [(2, 2)])
    full = transformer.forward(rng.ids(n_context, n_vocab), net, OPTIONS)
    longer = rng.ids(n_context + 1, n_vocab)
    rejected = raises(ValueError, lambda: transformer.forward(longer, net, OPTIONS))
    return mismatch((full.y_pred.shape, (n_context, n_vocab)), (rejected, True))


@check("E-emb-pick", 2, "", EXACT)
def one_hot_selects_a_row(rng: RandomInputs) -> float:
    """ohe(t*) w_emb = w_emb(t*) ∈ (d): a one-hot row times the store is the embedding of that token"""
    _, w_emb, _ = _inputs(rng)
    selected = [notation.ohe(torch.tensor(t), len(w_emb)) @ w_emb for t in range(len(w_emb))]
    return max(relative_error(row, w_emb[t]) for t, row in enumerate(selected))


@check("E-embed-fwd", 2, "2", EXACT)
def forward(rng: RandomInputs) -> float:
    """a_i = ohe(a_{i−1}) w_emb ∈ (n_T, d), which is a table lookup"""
    ids, w_emb, _ = _inputs(rng)
    return relative_error(embedding.forward(ids, w_emb), F.embedding(ids, w_emb))


@check("E-embed-dw", 2, "3", AUTOGRAD)
def gradient_of_the_store(rng: RandomInputs) -> tuple[float, str]:
    """∂w_emb = ohe(a_{i−1})ᵗ Δ_i ∈ (n_V, d): rows of Δ add up per token, and the row of an absent one is exactly 0"""
    ids, w_emb, delta = _inputs(rng)
    ours = embedding.grad_w(delta, ids, len(w_emb))
    (expected,) = differentiate(lambda w: F.embedding(ids, w), w_emb, upstream=delta)
    disagrees = disagreement(lambda w: F.embedding(ids, w), w_emb, ours, delta, rng)
    absent = [t for t in range(len(w_emb)) if t not in ids.tolist()]
    added = torch.zeros_like(w_emb).index_add_(0, ids, delta)
    overwritten = torch.zeros_like(w_emb)
    overwritten[ids] = delta
    lost = relative_error(overwritten, expected)
    error = max(relative_error(ours, expected), relative_error(ours, added), ours[absent].abs().max().item(), disagrees)
    return max(error, shortfall(lost, 1e-3)), f"overwriting instead of adding would be off by {lost:.2f}"


@check("E-embed-dx", 2, "", AUTOGRAD)
def error_signal_of_the_one_hot_input(rng: RandomInputs) -> float:
    """Δ_{i−1} = Δ_i w_embᵗ ∈ (n_T, n_V), the gradient of the one-hot input if it were continuous (attribution)"""
    ids, w_emb, delta = _inputs(rng)
    ours = embedding.delta_one_hot(delta, w_emb)
    one_hot = F.one_hot(ids, len(w_emb)).double()
    (expected,) = differentiate(lambda x: x @ w_emb, one_hot, upstream=delta)
    return max(relative_error(ours, expected), disagreement(lambda x: x @ w_emb, one_hot, ours, delta, rng))


@check("P-embed-stop", 2, "", EXACT)
def ids_have_no_gradient(rng: RandomInputs) -> float:
    """ids are integers, d a_{i−1} = 0: differentiating with respect to an id, or passing a real number, is an error"""
    ids, w_emb, _ = _inputs(rng)
    no_gradient = raises(RuntimeError, lambda: differentiate(lambda x: embedding.forward(x, w_emb), ids))
    no_real_id = raises(IndexError, lambda: embedding.forward(ids + 0.5, w_emb))
    return mismatch((no_gradient, True), (no_real_id, True))


@check("E-pos-fwd", 2, "Table 2", EXACT)
def positions(rng: RandomInputs) -> float:
    """a_1^pos = ohe(1:n_T) w_pos ∈ (n_T, d): the first n_T rows of w_pos, in order, in the network too"""
    n, n_vocab = rng.size(3, 6), rng.size(3, 8)
    net = rng.network(n_vocab, n + rng.size(1, 3), rng.size(2, 6), [(1, 2)])
    net = net._replace(w_tok=torch.zeros_like(net.w_tok))  # so that a_1 is its positional part
    alone = embedding.forward(torch.arange(n), net.w_pos)
    a_1 = transformer.forward(rng.ids(n, n_vocab), net, OPTIONS).a_1
    return max(relative_error(alone, net.w_pos[:n]), relative_error(a_1, net.w_pos[:n]))


@check("E-pos-dw", 2, "Table 3", AUTOGRAD)
def gradient_of_the_positions(rng: RandomInputs) -> float:
    """∂w_pos = ohe(1:n_T)ᵗ Δ_1 ∈ (n_context, d): Δ_1 on the first n_T rows, exactly 0 on the others"""
    n, n_vocab, d = rng.size(3, 6), rng.size(3, 8), rng.size(3, 6)
    net = rng.network(n_vocab, n + rng.size(1, 3), d, [(1, 2)])
    where, delta = torch.arange(n), rng.matrix(n, d)
    alone = embedding.grad_w(delta, where, len(net.w_pos))
    (expected,) = differentiate(lambda w: F.embedding(where, w), net.w_pos, upstream=delta)
    ids = rng.ids(n, n_vocab)
    back = transformer.backward(loss.next_tokens(ids), net, transformer.forward(ids, net, OPTIONS), OPTIONS)
    padded = torch.cat([back.delta_1, torch.zeros_like(net.w_pos[n:])])
    return max(relative_error(alone, expected), alone[n:].abs().max().item(), relative_error(back.grads.w_pos, padded))
