"""Section 1: tokens, the next token as a target, and the cross-entropy loss."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...paper import loss, notation, transformer
from ..oracles import differentiate, directional_error, relative_error
from .check import AUTOGRAD, EXACT, IDENTITY, Lab, check, mismatch, refuses, unless

OPTIONS = transformer.Options()


def _draw(lab: Lab) -> tuple[Tensor, Tensor]:
    """logits (n_T, n_vocab) and ids (n_T,)"""
    n, n_vocab = lab.size(3, 8), lab.size(3, 8)
    return 2 * lab.matrix(n, n_vocab), lab.ids(n, n_vocab)


def _cross_entropy(a_12: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(a_12, targets, reduction=reduction, ignore_index=loss.NO_TARGET)


@check("D-token-int", 1, "", EXACT)
def tokens_are_integers(lab: Lab) -> float:
    """a_0 ∈ ℕ^{n_T}: tokens are the ids 0 … n_vocab−1 (the paper counts from 1); n_vocab and reals are refused"""
    n_vocab = lab.size(3, 8)
    net = lab.network(n_vocab, n_vocab, 3, [(2, 2)])
    every_id = torch.arange(n_vocab)
    f = transformer.forward(every_id, net, OPTIONS)
    beyond = refuses(IndexError, lambda: transformer.forward(torch.tensor([0, n_vocab]), net, OPTIONS))
    real = refuses(IndexError, lambda: transformer.forward(every_id.double(), net, OPTIONS))
    return mismatch((f.y_pred.shape, (n_vocab, n_vocab)), (f.a_0.tolist(), every_id.tolist()), (beyond and real, True))


@check("D-model-sig", 1, "", IDENTITY)
def model_signature(lab: Lab) -> float:
    """y_pred = N_P(a_0) ∈ (n_T, n_vocab): for each token a distribution over the vocabulary, softmax of its logits"""
    n, n_vocab = lab.size(3, 6), lab.size(3, 8)
    f = transformer.forward(lab.ids(n, n_vocab), lab.network(n_vocab, n, 4, [(2, 3), (1, 2)], n_blocks=2), OPTIONS)
    negative = (f.y_pred < 0).sum().item()
    sums = relative_error(f.y_pred.sum(1), torch.ones(n))
    return max(negative, sums, relative_error(f.y_pred, F.softmax(f.a_12, 1)), mismatch((f.a_12.shape, (n, n_vocab))))


@check("D-ohe", 1, "", EXACT)
def one_hot_rows(lab: Lab) -> float:
    """an id becomes a row of zeros with a single 1, in the column of that id"""
    n, n_vocab = lab.size(3, 8), lab.size(3, 8)
    ids = lab.ids(n, n_vocab)
    rows = notation.ohe(ids, n_vocab)
    ones = [row.nonzero().flatten().tolist() for row in rows]
    return mismatch((ones, [[i] for i in ids.tolist()]), (torch.equal(rows, F.one_hot(ids, n_vocab).double()), True))


@check("E-ce", 1, "", IDENTITY)
def cross_entropy(lab: Lab) -> float:
    """ℓ = −y_gt ⊖ log y_pred ∈ (n_T): each token's cross-entropy, and 0 where there is no target"""
    a_12, targets = _draw(lab)
    targets[1] = loss.NO_TARGET
    ours = loss.token_losses(a_12, targets)
    return relative_error(ours, _cross_entropy(a_12, targets, "none")) + abs(ours[1].item())


@check("D-shift", 1, "", EXACT)
def shift_by_one(lab: Lab) -> float:
    """the target of position t is the id at position t+1, for t = 1 … n_T−1; it is not the id plus one"""
    ids = lab.ids(lab.size(3, 8), 9)
    ids[1] = ids[0]  # a repeated token: its target is itself, where "id plus one" would be another
    targets = loss.next_tokens(ids)
    plus_one = (targets[:-1] != ids[:-1] + 1).sum().item()
    return mismatch((targets[:-1].tolist(), ids[1:].tolist()), (len(targets), len(ids))) + unless(plus_one, 1)


@check("N-loss-terms", 1, "", EXACT)
def number_of_terms(lab: Lab) -> float:
    """n_T tokens make n_T−1 loss terms: the first token is nobody's target, and the last row has none"""
    n = lab.size(3, 8)
    ids = lab.permutation(n).argmax(1)  # all different, so that a target names its position
    targets = loss.next_tokens(ids)
    terms = loss.token_losses(lab.matrix(n, n), targets)
    return mismatch(
        ((targets != loss.NO_TARGET).sum().item(), n - 1),
        ((terms > 0).sum().item(), n - 1),
        (terms[-1].item(), 0.0),
        (int(ids[0]) in targets.tolist(), False),
    )


@check("E-loss-seq", 1, "", IDENTITY)
def sequence_loss(lab: Lab) -> float:
    """L_seq = Σ_t ℓ(t), the sum over the rows that have a target: n_T−1 times the mean"""
    a_12, ids = _draw(lab)
    targets = loss.next_tokens(ids)
    ours = loss.forward(a_12, targets)
    n_terms = torch.tensor(len(ids) - 1)
    return max(
        relative_error(ours, _cross_entropy(a_12, targets, "sum")),
        relative_error(ours / _cross_entropy(a_12, targets, "mean"), n_terms),
    )


@check("E-dlogits", 1, "Table 2", AUTOGRAD)
def error_signal_of_the_logits(lab: Lab) -> float:
    """Δ_12 = y_pred − ohe(y_gt) ∈ (n_T, n_vocab) on the rows that have a target, exactly 0 on the last row"""
    a_12, ids = _draw(lab)
    targets = loss.next_tokens(ids)
    ours = loss.delta_logits(F.softmax(a_12, 1), targets)
    (truth,) = differentiate(lambda x: _cross_entropy(x, targets, "sum"), a_12)
    differences = directional_error(lambda x: _cross_entropy(x, targets, "sum").item(), a_12, ours, lab.generator)
    agree = 0.0 if differences < 1e-6 else math.inf
    return max(relative_error(ours, truth), ours[-1].abs().max().item(), agree)
