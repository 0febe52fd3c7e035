"""Attribution: which earlier tokens the log-probability of later ones depends on.

    L = Σ_t log p(id_t | id_0 … id_{t−1})        over the target positions t
    g = ∂L/∂a_1                                  (n, d): −Δ_1 of the summed loss, one backward pass
    score_t = ⟨g_t, a_1t⟩                        gradient · input: positive where the token made the targets more probable
    norm_t = ‖g_t‖                               how much L can change with the token's embedding, whatever the direction

a_1 are the embeddings that enter the first block. Both are 0 for a token that no target depends on. The score is the change
of L to first order if the embedding is scaled from 0 to what it is, so scores of several tokens add up.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import HandgradError, shown
from ..model.batch import TOKENS_AT_ONCE, Piece
from ..model.block import Saved
from ..model.gpt import GPT
from ..model.passes import Pass
from ..model.readout import readout
from ..ops import attention
from ..ops.loss import NO_TARGET


@dataclass(frozen=True, eq=False)
class Attribution:
    """How the log-probability of the targets depends on every token.

    ids        the tokens
    targets    positions of the tokens whose log-probability was differentiated
    logprob    their summed log-probability, L
    gradient   (n, d) ∂L/∂a_1
    scores     (n) gradient · input, signed
    norms      (n) norm of the gradient
    """

    ids: list[int]
    targets: list[int]
    logprob: float
    gradient: Tensor
    scores: Tensor
    norms: Tensor

    def __repr__(self) -> str:
        return f"Attribution: log-probability {self.logprob:.6f} of {len(self.targets)} of {len(self.ids)} tokens"


@torch.no_grad()
def attribute(model: GPT, ids: Sequence[int] | Tensor, targets: Iterable[int] | None = None) -> Attribution:
    """Differentiate the log-probability of the tokens at positions `targets` (default: the last one) with respect to the
    embedding of every token. One forward and one backward pass; parameters, their `.grad` and `requires_grad` do not
    change, and adapters drop nothing."""
    tokens, positions = _checked(model, ids, targets)
    n = positions[-1]  # tokens from the last target on have no influence
    wanted = torch.full((n,), NO_TARGET)
    wanted[[t - 1 for t in positions]] = tokens[positions]
    (piece,) = model.pieces(tokens[:n], wanted, [n], n)
    with _frozen(model):
        loss, a_1, delta_1 = _input_signal(model, piece)
    gradient = torch.zeros(len(tokens), a_1.shape[1], dtype=a_1.dtype, device=a_1.device)
    gradient[:n] = -delta_1  # L is the negative of the loss
    scores, norms = gradient.new_zeros(len(tokens)), torch.linalg.vector_norm(gradient, dim=1)
    scores[:n] = (gradient[:n] * a_1).sum(1)
    return Attribution(tokens.tolist(), positions, -loss, gradient, scores, norms)


def _input_signal(model: GPT, piece: Piece) -> tuple[float, Tensor, Tensor]:
    """The summed loss, a_1 and Δ_1 of a piece of one sequence."""
    run = Pass(attention.spans_of(piece.lengths), rotation=model.rotation(piece.positions))
    runs = [run] * len(model.blocks)
    if len(piece.rows) < len(piece.ids):  # as in training: the last block needs only the rows with a target
        runs[-1] = run._replace(spans=attention.spans_of(piece.lengths, piece.rows), query_rows=piece.rows)
    a = a_1 = model.embeddings(piece.ids, piece.positions)
    recompute = len(piece.ids) > TOKENS_AT_ONCE  # a long text's activations would need gigabytes
    saved: list[Saved | Tensor] = []
    for block, its_run in zip(model.blocks, runs, strict=True):
        with model.unpacked(block):
            out, kept = block.forward(a, its_run)
        saved.append(a if recompute else kept)
        a = out
        del kept
    with model.unpacked(model.head):
        loss, delta = readout(model.final_norm, model.head, a, piece, 1.0, model.check_finite)
    for block, its_run in reversed(list(zip(model.blocks, runs, strict=True))):
        with model.unpacked(block):
            state = saved.pop()
            if isinstance(state, Tensor):
                state = block.forward(state, its_run)[1]
            delta = block.backward(delta, state, its_run)
    return loss, a_1, delta


@contextmanager
def _frozen(model: GPT) -> Iterator[None]:
    """Within the context no parameter gets a gradient; afterwards each trains or not as before."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def _checked(model: GPT, ids: Sequence[int] | Tensor, targets: Iterable[int] | None) -> tuple[Tensor, list[int]]:
    """The ids as a tensor, and the target positions in ascending order."""
    if not model.config.causal:
        raise HandgradError("attribution needs a causal model (causal=True)")
    try:
        tokens = torch.as_tensor(ids).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise HandgradError(f"attribute takes a list of token ids, or a 1-D tensor, not {shown(ids)}") from None
    if tokens.ndim != 1 or tokens.dtype.is_floating_point or tokens.dtype == torch.bool:
        raise HandgradError(
            f"attribute takes a list of token ids, or a 1-D tensor of integers, not {tokens.dtype} of shape"
            f" {tuple(tokens.shape)}"
        )
    if len(tokens) < 2:
        raise HandgradError(f"attribution needs at least two tokens, one that another depends on, not {len(tokens)}")
    positions = sorted(set([len(tokens) - 1] if targets is None else targets))
    if not positions:
        raise HandgradError("targets is empty: give the positions of the tokens to explain")
    for t in positions:
        if type(t) is not int or not 1 <= t < len(tokens):
            raise HandgradError(
                f"target {shown(t)} is not the position of a token that follows another: positions go from 1 to"
                f" {len(tokens) - 1}"
            )
    return tokens.to(torch.int64), positions
