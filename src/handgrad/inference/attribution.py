"""Attribution: which earlier tokens the log-probability of later ones depends on.

    L = Σ_t log p(id_t | id_0 … id_{t−1})        over the target positions t
    g = ∂L/∂a_1                                  (n, d): −Δ_1 of the summed loss, one backward pass
    score_t = ⟨g_t, a_1t⟩                        gradient · input: positive where the token made the targets more probable
    norm_t = ‖g_t‖                               how much L can change with the token's embedding, whatever the direction

a_1 are the embeddings that enter the first block. Both are 0 for a token that no target depends on. The score is the change
of L to first order if the embedding is scaled from 0 to what it is, so scores of several tokens add up.

Integrated gradients follow L along the straight line from a baseline to a_1, so that their sum is the whole difference:

    a(α) = b + α (a_1 − b)                       b: the mean row of the token table in the place of every token but the first
    integrated_t = ⟨∫ g(α) dα, a_1t − b_t⟩       the midpoint rule in `steps` steps
    gap = Σ_t integrated_t − (L(a_1) − L(b))     what the rule misses: completeness; it falls with the steps

The first token stays: many models attend to it when nothing else matches, and without it L jumps along the line.
Both are estimates. `removed` measures instead: L minus the L of the same targets without the token.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import HandgradError, shown
from ..model.gpt import GPT
from ..model.inspect.trace import without_gradients
from ..model.passes.arguments import Pass
from ..model.passes.batch import TOKENS_AT_ONCE, Piece
from ..model.passes.objective import MEAN_LOSS, LogitDifference, Objective
from ..model.passes.options import PassOptions
from ..model.passes.readout import readout
from ..ops import attention
from ..ops.loss import NO_TARGET


@dataclass(frozen=True, eq=False)
class Attribution:
    """How the log-probability of the targets depends on every token.

    ids        the tokens
    targets    positions of the tokens whose log-probability was differentiated
    logprob    their summed log-probability, L; with `against` the difference of logits that was differentiated
    gradient   (n, d) ∂L/∂a_1
    scores     (n) gradient · input, signed
    norms      (n) norm of the gradient
    integrated (n) integrated gradients, and their completeness gap; None without steps
    removed    (n) measured: L minus L without the token; NaN where it was not measured; None if nothing was removed
    """

    ids: list[int]
    targets: list[int]
    logprob: float
    gradient: Tensor
    scores: Tensor
    norms: Tensor
    integrated: Tensor | None = None
    gap: float | None = None
    removed: Tensor | None = None

    def __repr__(self) -> str:
        text = f"Attribution: log-probability {self.logprob:.6f} of {len(self.targets)} of {len(self.ids)} tokens"
        return text if self.gap is None else f"{text}, completeness gap {self.gap:.3g}"


@torch.no_grad()
def attribute(
    model: GPT,
    ids: Sequence[int] | Tensor,
    targets: Iterable[int] | None = None,
    *,
    against: int | None = None,
    steps: int = 0,
    remove: int = 0,
) -> Attribution:
    """Differentiate the log-probability of the tokens at positions `targets` (default: the last one) with respect to the
    embedding of every token. One forward and one backward pass; parameters, their `.grad` and `requires_grad` do not
    change, and adapters drop nothing.

    against   Explain the logit of the only target minus that of this token, instead of the log-probability.
    steps     Steps of integrated gradients; each costs about as much as the first pass.
    remove    How many tokens to remove, one at a time, to measure what they contribute: those with the largest |score|.
    """
    tokens, positions = _checked(model, ids, targets)
    for name, count in (("steps", steps), ("remove", remove)):
        if type(count) is not int or count < 0:
            raise HandgradError(f"{name} must be a number of at least 0, not {shown(count)}")
    objective, sign = _objective(model, tokens, positions, against)
    n = positions[-1]  # tokens from the last target on have no influence
    batch, whole = model.pack(tokens[:n], [n]), PassOptions(tokens_at_once=n)
    (piece,) = model.prepare(batch, _wanted(tokens, positions), options=whole, training=False).pieces
    with without_gradients(model):
        value, a_1, delta_1 = _input_signal(model, piece, objective)
        integrated, gap = None, None
        if steps:
            found, gap = _integrated(model, piece, objective, a_1, value, steps)
            integrated, gap = a_1.new_zeros(len(tokens)), sign * gap
            integrated[:n] = sign * found
    gradient = torch.zeros(len(tokens), a_1.shape[1], dtype=a_1.dtype, device=a_1.device)
    gradient[:n] = sign * delta_1  # L is the negative of the loss
    scores, norms = gradient.new_zeros(len(tokens)), torch.linalg.vector_norm(gradient, dim=1)
    scores[:n] = (gradient[:n] * a_1).sum(1)
    removed = None
    if remove:
        first = 1 if 1 in positions else 0  # without a token before it a target has no probability
        chosen = [t for t in scores.abs().argsort(descending=True).tolist() if first <= t < n and t not in positions]
        removed = torch.full_like(scores, math.nan)
        complete = _measured(model, tokens, positions, against)
        for t in chosen[:remove]:
            left, moved = (
                torch.cat([tokens[:t], tokens[t + 1 :]]),
                [position - (position > t) for position in positions],
            )
            removed[t] = sign * (complete - _measured(model, left, moved, against))
    return Attribution(tokens.tolist(), positions, sign * value, gradient, scores, norms, integrated, gap, removed)


def _objective(model: GPT, tokens: Tensor, positions: list[int], against: int | None) -> tuple[Objective, int]:
    """What is differentiated, and its sign in L."""
    if against is None:
        return MEAN_LOSS, -1
    if len(positions) > 1:
        raise HandgradError(f"against compares the logits of one position: give one target, not {len(positions)}")
    objective = LogitDifference(positions[0] - 1, int(tokens[positions[0]]), against)
    objective.select(tokens[: positions[0]], model.config.n_vocab)  # raises if the tokens are equal or unknown
    return objective, 1


def _wanted(tokens: Tensor, positions: list[int]) -> Tensor:
    """The targets of the tokens before the last target."""
    wanted = torch.full((positions[-1],), NO_TARGET)
    wanted[[t - 1 for t in positions]] = tokens[positions]
    return wanted


def _integrated(
    model: GPT, piece: Piece, objective: Objective, a_1: Tensor, value: float, steps: int
) -> tuple[Tensor, float]:
    """Integrated gradients of the objective (n), and their completeness gap."""
    ids, n = piece.ids, len(piece.ids)
    table, _ = model.embed.table(torch.arange(model.config.n_vocab, device=ids.device))
    own, rows = model.embed.table(ids)
    baseline = a_1 + model.embed.scale * (table.mean(0) - own[rows])  # positions stay
    baseline[0] = a_1[0]
    total = torch.zeros_like(a_1)
    at_once = max(1, TOKENS_AT_ONCE // n)
    for first in range(0, steps, at_once):
        alphas = [(k + 0.5) / steps for k in range(first, min(first + at_once, steps))]
        inputs = torch.cat([baseline + alpha * (a_1 - baseline) for alpha in alphas])
        copies = _copies(piece, len(alphas))
        total += _input_signal(model, copies, objective, inputs)[2].view(len(alphas), n, -1).sum(0)
    found = (total / steps * (a_1 - baseline)).sum(1)
    change = value - _input_signal(model, piece, objective, baseline)[0]
    return found, found.sum().item() - change


def _copies(piece: Piece, count: int) -> Piece:
    """The same sequence several times, end to end."""
    n, device = len(piece.ids), piece.ids.device
    rows = (torch.arange(count, device=device)[:, None] * n + piece.rows).flatten()
    return Piece(
        piece.ids.repeat(count), piece.positions.repeat(count), piece.lengths * count, rows, piece.targets.repeat(count)
    )


def _measured(model: GPT, tokens: Tensor, positions: list[int], against: int | None) -> float:
    """The objective of the targets at these positions, by a forward pass alone."""
    objective, _ = _objective(model, tokens, positions, against)
    n = positions[-1]
    return model.loss(tokens[:n], _wanted(tokens, positions), [n], objective=objective) * len(positions)


def _input_signal(
    model: GPT, piece: Piece, objective: Objective = MEAN_LOSS, a_1: Tensor | None = None
) -> tuple[float, Tensor, Tensor]:
    """The summed objective, a_1 and Δ_1 of a piece, from its own embeddings or the given ones."""
    run = Pass(attention.spans_of(piece.lengths), rotations=model.rotations(piece.positions, piece.lengths))
    runs = [run] * len(model.blocks)
    if len(piece.rows) < len(piece.ids) and model.config.leaves_rows_out(
        len(model.blocks) - 1
    ):  # as in training: the last block needs only the rows with a target
        runs[-1] = run._replace(spans=attention.spans_of(piece.lengths, piece.rows), query_rows=piece.rows)
    a = a_1 = model.embeddings(piece.ids, piece.positions) if a_1 is None else a_1
    recompute = len(piece.ids) > TOKENS_AT_ONCE  # a long text's activations would need gigabytes
    saved: list[Any] = []
    for block, its_run in zip(model.blocks, runs, strict=True):
        with model.weights(block) as weights:
            out, kept = block.forward(a, its_run._replace(weights=weights))
        saved.append(a if recompute else kept)
        a = out
        del kept
    with model.weights(model.head) as weights:
        loss, delta = readout(model.ending(), a, piece, objective, 1.0, Pass(weights=weights))
    for block, its_run in reversed(list(zip(model.blocks, runs, strict=True))):
        with model.weights(block) as weights:
            its_run = its_run._replace(weights=weights)
            state = saved.pop()
            if isinstance(state, Tensor):
                state = block.forward(state, its_run)[1]
            delta = block.backward(delta, state, its_run)
    return loss, a_1, delta


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
