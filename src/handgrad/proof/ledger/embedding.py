"""Section 2: token and positional embeddings."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...paper import embedding, loss, notation, transformer
from ..oracles import differentiate, directional_error, relative_error
from .check import AUTOGRAD, EXACT, Lab, check, mismatch, refuses, unless
from .loss import OPTIONS


def _draw(lab: Lab) -> tuple[Tensor, Tensor, Tensor]:
    """ids (n_T,) of which two agree, w_emb (n_V, d) with more rows than tokens, an upstream Δ (n_T, d)"""
    n, d = lab.size(3, 8), lab.size(4, 8)
    n_rows = n + lab.size(1, 4)
    ids = lab.ids(n, n_rows)
    ids[-1] = ids[0]
    return ids, lab.matrix(n_rows, d), lab.matrix(n, d)


@check("D-emb-store", 2, "1", EXACT)
def embedding_store(lab: Lab) -> float:
    """w_emb ∈ (n_V, d): row t is the embedding of id t; n_V is n_vocab for tokens and n_context for positions"""
    n_vocab, n_context, d = lab.size(3, 8), lab.size(9, 12), lab.size(1, 8)
    net = lab.network(n_vocab, n_context, d, [(1, 1)])
    targets = loss.next_tokens(ids := lab.ids(3, n_vocab))
    grads = transformer.backward(targets, net, transformer.forward(ids, net, OPTIONS), OPTIONS).grads
    shapes = mismatch((grads.w_tok.shape, (n_vocab, d)), (grads.w_pos.shape, (n_context, d)))
    return max(shapes, _rows_by_id(net.w_tok), _rows_by_id(net.w_pos))


def _rows_by_id(w_emb: Tensor) -> float:
    n_rows = len(w_emb)
    beyond = refuses(IndexError, lambda: embedding.forward(torch.tensor([n_rows]), w_emb))
    return max(relative_error(embedding.forward(torch.arange(n_rows), w_emb), w_emb), mismatch((beyond, True)))


@check("P-ctx-bound", 2, "", EXACT)
def context_bound(lab: Lab) -> float:
    """n_T ≤ n_context: a sequence may fill the context; one token more is refused"""
    n_context, n_vocab = lab.size(3, 8), lab.size(3, 8)
    net = lab.network(n_vocab, n_context, 3, [(2, 2)])
    full = transformer.forward(lab.ids(n_context, n_vocab), net, OPTIONS)
    longer = lab.ids(n_context + 1, n_vocab)
    refused = refuses(ValueError, lambda: transformer.forward(longer, net, OPTIONS))
    return mismatch((full.y_pred.shape, (n_context, n_vocab)), (refused, True))


@check("E-emb-pick", 2, "", EXACT)
def one_hot_picks_a_row(lab: Lab) -> float:
    """ohe(t*) w_emb = w_emb(t*) ∈ (d): a one-hot row times the store is the embedding of that token"""
    _, w_emb, _ = _draw(lab)
    picked = [notation.ohe(torch.tensor(t), len(w_emb)) @ w_emb for t in range(len(w_emb))]
    return max(relative_error(row, w_emb[t]) for t, row in enumerate(picked))


@check("E-embed-fwd", 2, "2", EXACT)
def forward(lab: Lab) -> float:
    """a_i = ohe(a_{i−1}) w_emb ∈ (n_T, d), which is a table lookup"""
    ids, w_emb, _ = _draw(lab)
    return relative_error(embedding.forward(ids, w_emb), F.embedding(ids, w_emb))


@check("E-embed-dw", 2, "3", AUTOGRAD)
def gradient_of_the_store(lab: Lab) -> tuple[float, str]:
    """∂w_emb = ohe(a_{i−1})ᵗ Δ_i ∈ (n_V, d): rows of Δ add up per token, and the row of an absent one is exactly 0"""
    ids, w_emb, delta = _draw(lab)
    ours = embedding.grad_w(delta, ids, len(w_emb))
    (truth,) = differentiate(lambda w: F.embedding(ids, w), w_emb, upstream=delta)
    differences = directional_error(lambda w: (F.embedding(ids, w) * delta).sum().item(), w_emb, ours, lab.generator)
    agree = 0.0 if differences < 1e-6 else math.inf
    absent = [t for t in range(len(w_emb)) if t not in ids.tolist()]
    added = torch.zeros_like(w_emb).index_add_(0, ids, delta)
    overwritten = torch.zeros_like(w_emb)
    overwritten[ids] = delta
    lost = relative_error(overwritten, truth)
    error = max(relative_error(ours, truth), relative_error(ours, added), ours[absent].abs().max().item(), agree)
    return max(error, unless(lost, 1e-3)), f"overwriting instead of adding would be off by {lost:.2f}"


@check("E-embed-dx", 2, "", AUTOGRAD)
def error_signal_of_the_one_hot_input(lab: Lab) -> float:
    """Δ_{i−1} = Δ_i w_embᵗ ∈ (n_T, n_V), the gradient of the one-hot input were it allowed to vary (attribution)"""
    ids, w_emb, delta = _draw(lab)
    ours = embedding.delta_one_hot(delta, w_emb)
    one_hot = F.one_hot(ids, len(w_emb)).double()
    (truth,) = differentiate(lambda x: x @ w_emb, one_hot, upstream=delta)
    differences = directional_error(lambda x: ((x @ w_emb) * delta).sum().item(), one_hot, ours, lab.generator)
    return max(relative_error(ours, truth), 0.0 if differences < 1e-6 else math.inf)


@check("P-embed-stop", 2, "", EXACT)
def the_flow_stops_here(lab: Lab) -> float:
    """a whole number cannot vary, d a_{i−1} = 0: no gradient of an id can be asked for, and no real number put in"""
    ids, w_emb, _ = _draw(lab)
    no_gradient = refuses(RuntimeError, lambda: differentiate(lambda x: embedding.forward(x, w_emb), ids))
    no_real_id = refuses(IndexError, lambda: embedding.forward(ids + 0.5, w_emb))
    return mismatch((no_gradient, True), (no_real_id, True))


@check("E-pos-fwd", 2, "Table 2", EXACT)
def positions(lab: Lab) -> float:
    """a_1^pos = ohe(1:n_T) w_pos ∈ (n_T, d): the first n_T rows of w_pos, in order, in the network too"""
    n, n_vocab = lab.size(3, 6), lab.size(3, 8)
    net = lab.network(n_vocab, n + lab.size(1, 3), lab.size(2, 6), [(1, 2)])
    net = net._replace(w_tok=torch.zeros_like(net.w_tok))  # what is left of a_1 is its positional part
    alone = embedding.forward(torch.arange(n), net.w_pos)
    a_1 = transformer.forward(lab.ids(n, n_vocab), net, OPTIONS).a_1
    return max(relative_error(alone, net.w_pos[:n]), relative_error(a_1, net.w_pos[:n]))


@check("E-pos-dw", 2, "Table 3", AUTOGRAD)
def gradient_of_the_positions(lab: Lab) -> float:
    """∂w_pos = ohe(1:n_T)ᵗ Δ_1 ∈ (n_context, d): Δ_1 on the first n_T rows, exactly 0 on the others"""
    n, n_vocab, d = lab.size(3, 6), lab.size(3, 8), lab.size(3, 6)
    net = lab.network(n_vocab, n + lab.size(1, 3), d, [(1, 2)])
    where, delta = torch.arange(n), lab.matrix(n, d)
    alone = embedding.grad_w(delta, where, len(net.w_pos))
    (truth,) = differentiate(lambda w: F.embedding(where, w), net.w_pos, upstream=delta)
    ids = lab.ids(n, n_vocab)
    back = transformer.backward(loss.next_tokens(ids), net, transformer.forward(ids, net, OPTIONS), OPTIONS)
    padded = torch.cat([back.delta_1, torch.zeros_like(net.w_pos[n:])])
    return max(relative_error(alone, truth), alone[n:].abs().max().item(), relative_error(back.grads.w_pos, padded))
