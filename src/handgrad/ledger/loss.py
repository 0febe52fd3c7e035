"""Section 1: tokens, the next token as a target, and the cross-entropy loss."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..paper import loss, notation, transformer
from ..proof.oracles import differentiate, relative_error
from .check import AUTOGRAD, EXACT, IDENTITY, RandomInputs, check, disagreement, mismatch, raises, shortfall

OPTIONS = transformer.Options()


def _inputs(rng: RandomInputs) -> tuple[Tensor, Tensor]:
    """logits (n_T, n_vocab) and ids (n_T,)"""
    n, n_vocab = rng.size(3, 8), rng.size(3, 8)
    return 2 * rng.matrix(n, n_vocab), rng.ids(n, n_vocab)


def _cross_entropy(a_12: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(a_12, targets, reduction=reduction, ignore_index=loss.NO_TARGET)


@check("D-token-int", 1, "", EXACT)
def tokens_are_integers(rng: RandomInputs) -> float:
    """a_0 ∈ ℕ^{n_T}: tokens are the ids 0 … n_vocab−1 (the paper counts from 1); n_vocab and real numbers are errors"""
    n_vocab = rng.size(3, 8)
    net = rng.network(n_vocab, n_vocab, 3, [(2, 2)])
    every_id = torch.arange(n_vocab)
    f = transformer.forward(every_id, net, OPTIONS)
    beyond = raises(IndexError, lambda: transformer.forward(torch.tensor([0, n_vocab]), net, OPTIONS))
    real = raises(IndexError, lambda: transformer.forward(every_id.double(), net, OPTIONS))
    return mismatch((f.y_pred.shape, (n_vocab, n_vocab)), (f.a_0.tolist(), every_id.tolist()), (beyond and real, True))


@check("D-model-sig", 1, "", IDENTITY)
def model_signature(rng: RandomInputs) -> float:
    """y_pred = N_P(a_0) ∈ (n_T, n_vocab): for each token a distribution over the vocabulary, softmax of its logits"""
    n, n_vocab = rng.size(3, 6), rng.size(3, 8)
    f = transformer.forward(rng.ids(n, n_vocab), rng.network(n_vocab, n, 4, [(2, 3), (1, 2)], n_blocks=2), OPTIONS)
    negative = (f.y_pred < 0).sum().item()
    sums = relative_error(f.y_pred.sum(1), torch.ones(n))
    return max(negative, sums, relative_error(f.y_pred, F.softmax(f.a_12, 1)), mismatch((f.a_12.shape, (n, n_vocab))))


@check("D-ohe", 1, "", EXACT)
def one_hot_rows(rng: RandomInputs) -> float:
    """an id becomes a row of zeros with a single 1, in the column of that id"""
    n, n_vocab = rng.size(3, 8), rng.size(3, 8)
    ids = rng.ids(n, n_vocab)
    rows = notation.ohe(ids, n_vocab)
    ones = [row.nonzero().flatten().tolist() for row in rows]
    return mismatch((ones, [[i] for i in ids.tolist()]), (torch.equal(rows, F.one_hot(ids, n_vocab).double()), True))


@check("E-ce", 1, "", IDENTITY)
def cross_entropy(rng: RandomInputs) -> float:
    """ℓ = −y_gt ⊖ log y_pred ∈ (n_T): each token's cross-entropy, and 0 where there is no target"""
    a_12, targets = _inputs(rng)
    targets[1] = loss.NO_TARGET
    ours = loss.token_losses(a_12, targets)
    return relative_error(ours, _cross_entropy(a_12, targets, "none")) + abs(ours[1].item())


@check("D-shift", 1, "", EXACT)
def shift_by_one(rng: RandomInputs) -> float:
    """the target of position t is the id at position t+1, for t = 1 … n_T−1; it is not the id plus one"""
    ids = rng.ids(rng.size(3, 8), 9)
    ids[1] = ids[0]  # a repeated token: its target is the same id, which "id plus one" is not
    targets = loss.next_tokens(ids)
    plus_one = (targets[:-1] != ids[:-1] + 1).sum().item()
    return mismatch((targets[:-1].tolist(), ids[1:].tolist()), (len(targets), len(ids))) + shortfall(plus_one, 1)


@check("N-loss-terms", 1, "", EXACT)
def number_of_terms(rng: RandomInputs) -> float:
    """n_T tokens make n_T−1 loss terms: the first token is not a target, and the last row has none"""
    n = rng.size(3, 8)
    ids = rng.permutation(n).argmax(1)  # all different, so that a target identifies its position
    targets = loss.next_tokens(ids)
    terms = loss.token_losses(rng.matrix(n, n), targets)
    return mismatch(
        ((targets != loss.NO_TARGET).sum().item(), n - 1),
        ((terms > 0).sum().item(), n - 1),
        (terms[-1].item(), 0.0),
        (int(ids[0]) in targets.tolist(), False),
    )


@check("E-loss-seq", 1, "", IDENTITY)
def sequence_loss(rng: RandomInputs) -> float:
    """L_seq = Σ_t ℓ(t), the sum over the rows that have a target: n_T−1 times the mean"""
    a_12, ids = _inputs(rng)
    targets = loss.next_tokens(ids)
    ours = loss.forward(a_12, targets)
    n_terms = torch.tensor(len(ids) - 1)
    return max(
        relative_error(ours, _cross_entropy(a_12, targets, "sum")),
        relative_error(ours / _cross_entropy(a_12, targets, "mean"), n_terms),
    )


@check("E-dlogits", 1, "Table 2", AUTOGRAD)
def error_signal_of_the_logits(rng: RandomInputs) -> float:
    """Δ_12 = y_pred − ohe(y_gt) ∈ (n_T, n_vocab) on the rows that have a target, exactly 0 on the last row"""
    a_12, ids = _inputs(rng)
    targets = loss.next_tokens(ids)
    ours = loss.delta_logits(F.softmax(a_12, 1), targets)
    (expected,) = differentiate(lambda x: _cross_entropy(x, targets, "sum"), a_12)
    disagrees = disagreement(lambda x: _cross_entropy(x, targets, "sum"), a_12, ours, 1.0, rng)
    return max(relative_error(ours, expected), ours[-1].abs().max().item(), disagrees)
