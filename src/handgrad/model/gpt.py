"""GPT: the paper's Table 2, downwards in `forward_pass` and upwards in `backward_pass`; the brackets are `block.py`.

    a_0 ids → a_1 embeddings → [ a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
                               → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9 ]
            → a_11 norm → a_12 logits → loss

The stream is (n, d): all sequences packed end to end, one row per token. Parameters have Hugging Face's names.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError, NonFiniteError, shown
from ..machine import trim_heap
from ..ops import attention
from .layers.linear import freeze
from .logits import Logits
from .network import Network
from .passes import prefixes
from .passes.arguments import PLAIN, Observer, Pass, Rotations, Within
from .passes.batch import TOKENS_AT_ONCE, Batch, Piece, check_targets, count_targets, split
from .passes.example_gradients import ExampleGradients, PieceExamples
from .passes.objective import MEAN_LOSS, TEXT_LOSS, MeanLoss, Objective, PositionLoss, RowObjective
from .passes.options import DEFAULTS, Finished, PassOptions, no_hook, with_zeros
from .passes.readout import log_probabilities, normalized, readout, value_of
from .passes.router_losses import RouterLosses, routers_for
from .storage.weights import Weights


class Work(NamedTuple):
    """A batch that is ready to be computed, and what to differentiate."""

    pieces: list[Piece]
    n_targets: int  # that the summed objective is divided by: those of all calls that accumulate
    objective: Objective = MEAN_LOSS
    complete: bool = False  # every signal of every row, needed or not: in one piece, down to Δ_1 of the first block
    routers: RouterLosses | None = None  # of a mixture, if they are differentiated


class ForwardState(NamedTuple):
    """What the forward pass saves for the backward pass."""

    work: Work
    rotations: list[Rotations]  # per piece
    a_10: list[Tensor]  # per piece: the last block's output
    blocks: list[list[Any]]  # per block and piece: all it needs, or only a_1 to recompute the block from
    lowest: int  # the first block that the backward pass visits
    recompute: bool = False
    observer: Observer | None = None
    examples: ExampleGradients | None = None  # measures the gradients of single examples


class GPT(Network):
    """A decoder-only transformer with hand-derived gradients.

    model = GPT(preset("nano"), seed=1)
    loss = model.loss_and_grads(tokens, targets)     mean over the targets ≠ −100; p.grad accumulates
    """

    # ── the public calls ────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def logits(self, tokens: Tensor, lengths: list[int] | None = None, *, generating: bool = False) -> Tensor:
        """(B, T) ids → (B, T, V). Sequences of uneven length: (n) ids end to end with their lengths → (n, V).

        generating   round activations as generation does, if the model does so: one with low-bit weights
        """
        a = self.last_layer(tokens, lengths, generating)
        with self.weights(self.head, generating) as weights:
            found = self.logit_map.forward(self.head.forward(a, Pass(weights=weights)))
        return self.check_finite(found).view(*tokens.shape, -1).as_subclass(Logits)

    @torch.no_grad()
    def last_layer(self, tokens: Tensor, lengths: list[int] | None = None, generating: bool = False) -> Tensor:
        """(B, T) ids → (B·T, d): the last block's output, after the final norm. Arguments as for `logits`."""
        batch = self.pack(tokens, lengths)
        a = self.embeddings(batch.ids, batch.positions)
        run = Pass(
            attention.spans_of(batch.lengths),
            rotations=self.rotations(batch.positions, batch.lengths),
            operand=self.operand,
        )
        for block in self.blocks:
            with self.weights(block, generating) as weights:
                a, _ = block.forward(a, run._replace(weights=weights))
        return self.final_norm.forward(a, self.operand)[0]

    def forward(self, tokens: Tensor) -> Tensor:
        """model(tokens) is model.logits(tokens)."""
        return self.logits(tokens)

    @torch.no_grad()
    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: list[int] | None = None,
        *,
        objective: Objective = MEAN_LOSS,
        share: bool = False,
    ) -> float:
        """The mean loss over the targets ≠ −100, or the value of another objective, without gradients. `share`: prefixes
        that sequences have in common are computed once."""
        options = PassOptions(tokens_at_once=TOKENS_AT_ONCE, share=share)
        work = self.prepare(self.pack(tokens, lengths), targets, objective, options=options, training=False)
        state = self.forward_pass(work, lowest=len(self.blocks))
        with self.weights(self.head) as weights:
            run = PLAIN._replace(weights=weights, operand=self.operand)
            pieces = zip(work.pieces, state.a_10, strict=True)
            return sum(value_of(self.ending(), a, piece, work.objective, run) for piece, a in pieces) / work.n_targets

    @torch.no_grad()
    def log_probabilities(
        self, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None, *, share: bool = True
    ) -> Tensor:
        """log p of every target, in the shape of the targets, float64; 0 where there is none. Prefixes that sequences have
        in common are computed once."""
        options = PassOptions(tokens_at_once=TOKENS_AT_ONCE, share=share)
        batch = self.pack(tokens, lengths)
        work = self.prepare(batch, targets, TEXT_LOSS, options=options, training=False)
        state = self.forward_pass(work, lowest=len(self.blocks))
        found = torch.zeros(len(batch.ids), dtype=torch.float64, device=self.device)
        with self.weights(self.head) as weights:
            run = PLAIN._replace(weights=weights, operand=self.operand)
            for piece, a_10 in zip(work.pieces, state.a_10, strict=True):
                a_11 = normalized(self.ending(), a_10, piece, run)
                found[piece.numbered] = log_probabilities(self.ending(), a_11, piece.targets, run)
        return found.view(targets.shape)

    @torch.no_grad()
    def loss_and_grads(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: list[int] | None = None,
        *,
        n_targets: int | None = None,
        objective: Objective = MEAN_LOSS,
        **options: Any,
    ) -> float:
        """The mean loss over the targets ≠ −100; its gradient is added into every trainable parameter's `.grad`. A frozen
        parameter gets none; one it had is discarded, because an optimizer would apply it. If the configuration has
        coefficients for losses of a mixture's routers, the gradient is that of the sum, and what is returned is not.

        n_targets   To accumulate over several calls as if they were one batch, give the number of targets of all the
                    calls together: each call then returns its share of the mean, and shares and gradients add up.
                    An objective of pairs or completions counts these. A call without any target adds 0. If a call raises,
                    gradients of earlier calls may have been added to. The losses of routers are of all calls too: count
                    them first, and give routers= their sum.
        objective   What to differentiate instead of the mean loss: one target's loss, a difference of logits, or a loss of
                    preferences or rewards.
        options     How to compute it: recompute="blocks", seed, tokens_at_once, finished, record, examples, routers, share,
                    as `PassOptions` describes them.
        """
        unknown = [name for name in options if name not in PassOptions.__match_args__]
        if unknown:
            known = ", ".join(PassOptions.__match_args__)
            raise HandgradError(f"unknown option {unknown[0]}: loss_and_grads has objective, n_targets, {known}")
        how = PassOptions(**options)
        return self.differentiate(self.prepare(self.pack(tokens, lengths), targets, objective, n_targets, how), how)

    @torch.no_grad()
    def count_routers(
        self,
        tokens: Tensor,
        lengths: list[int] | None = None,
        *,
        seed: int | None = None,
        tokens_at_once: int | None = None,
    ) -> RouterLosses:
        """What the losses of a mixture's routers need to know of a batch that is computed in several calls or processes:
        add up those of all parts with +, and give the sum to every call of `loss_and_grads` as routers=. It costs a
        forward pass, with the dropout of that call if `seed` and `tokens_at_once` are the same."""
        batch, options = self.pack(tokens, lengths), PassOptions(seed=seed, tokens_at_once=tokens_at_once)
        work = self.prepare(batch, torch.zeros_like(batch.ids).view(batch.shape), options=options)
        if work.routers is None:
            raise HandgradError("balance_loss and z_loss of this model are 0: there is nothing to count")
        windows = [work.pieces] if self.unpacks else [[piece] for piece in work.pieces]
        return RouterLosses(self.config, self._count(work, windows))

    # ── preparation ─────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(
        self,
        batch: Batch,
        targets: Tensor,
        objective: Objective = MEAN_LOSS,
        n_targets: int | None = None,
        options: PassOptions = DEFAULTS,
        *,
        complete: bool = False,
        training: bool = True,
    ) -> Work:
        """Everything that is decided before a pass: the targets, the pieces, dropout's masks, the number to divide by.

        complete   Compute every signal of every row, needed or not: in one piece, and without dropout. Traces do.
        training   Whether there are dropout and the losses of routers.
        """
        if not isinstance(objective, Objective):
            raise HandgradError(
                f"objective must be hg.PositionLoss(t), hg.DPO(reference=…) or another objective, not {shown(objective)}"
            )
        if options.observer is not None and options.observer.edits and not complete:
            raise HandgradError(
                "tensors are replaced in a complete pass, without pieces or dropout: use hg.trace(edit=…)"
            )
        seed = self.dropout_seed(options.seed) if training and not complete else None
        with_routers = self.config.router_losses and objective.routers and training
        at_once = math.inf if complete else options.tokens_at_once or self.tokens_at_once()
        chosen = check_targets(batch, objective.select(targets, self.config.n_vocab), self.config)
        objective = objective.of(batch.lengths, chosen)
        # Δ of a shared row sums over examples, a router counts rows, and an observer is shown sequences
        alone = complete or with_routers or options.examples is not None or options.observer is not None
        share = options.share and not alone and self.shares_prefixes(batch.lengths)
        new = prefixes.new_tokens(batch.ids, batch.lengths) if share else batch.lengths
        if new != batch.lengths and options.tokens_at_once is None:
            at_once *= 2  # every piece computes a prefix again
        pieces = split(batch, chosen, at_once, seed, every=with_routers, unit=objective.unit, new=new)
        own = objective.count(batch.lengths, sum(len(piece.targets) for piece in pieces))
        n_targets = count_targets(own, n_targets if own or not complete else None)
        routers = routers_for(self.config, len(batch.ids), n_targets != own, options) if with_routers else None
        if options.examples is not None:
            losses = type(objective) in (MeanLoss, PositionLoss)
            if not losses and (options.examples.needs_losses or isinstance(objective, RowObjective)):
                raise HandgradError(
                    f"gradients of examples are of losses, not of {type(objective).__name__}: leave objective out"
                )
            self._begin_examples(options.examples, pieces, n_targets, len(batch.lengths))
        return Work(pieces, n_targets, objective, complete, routers)

    def _begin_examples(self, examples: ExampleGradients, pieces: list[Piece], n_targets: int, count: int) -> None:
        """Prepare the measurement of a batch's examples."""
        trained = [p for block in self.blocks for p in block.parameters() if p.requires_grad]
        if len(set(trained)) < len(trained):
            raise HandgradError("blocks share a parameter: its uses have products that example norms do not measure")
        shared = self.head.plain().weight is self.embed.weight
        examples.begin(pieces, count, n_targets, self.embed.weight if shared and self.embed.trains else None)

    # ── the two passes ──────────────────────────────────────────────────────────────────────────────────────────────

    def differentiate(self, work: Work, options: PassOptions = DEFAULTS) -> float:
        """Both passes over a prepared batch: the value of its objective; the gradients are added into `.grad`."""
        parameters, examples = list(self.parameters()), options.examples
        freeze(p for p in parameters if not p.requires_grad)
        # Pieces processed one after the other hold the activations of one piece only; processed together, block by block,
        # all gradients of a block are final at once.
        # Packed weights are then unpacked once for all pieces.
        together = options.recomputes or self.unpacks or not work.pieces or (examples is not None and examples.together)
        windows = [work.pieces] if together else [[piece] for piece in work.pieces]
        fresh = [p for p in parameters if p.grad is None]
        # gradients allocated between the activations of two pieces would fragment memory
        if len(windows) > 1 and (examples is None or examples.grads):
            for p in fresh:
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        value = 0.0
        try:
            if work.routers is not None and len(windows) > 1 and not work.routers.given:
                work.routers.sums = self._count(work, windows, options)
                work = work._replace(routers=RouterLosses(self.config, work.routers.sums))
            for window in windows:
                hook = options.finished if window is windows[-1] else no_hook
                state = self.forward_pass(work._replace(pieces=window), options)
                value += self.backward_pass(state, hook)
        except NonFiniteError:
            for p in fresh:
                p.grad = None  # discard partial gradients
            raise
        return value

    def _count(self, work: Work, windows: list[list[Piece]], options: PassOptions = DEFAULTS) -> Tensor:
        """The sums that the losses of the routers need, of all pieces."""
        found, own, quiet = RouterLosses(self.config).sums, RouterLosses(self.config), replace(options, record=None)
        for window in windows:
            self.forward_pass(work._replace(pieces=window, routers=own), quiet, lowest=len(self.blocks))
            found += own.sums
        return found

    def forward_pass(self, work: Work, options: PassOptions = DEFAULTS, lowest: int | None = None) -> ForwardState:
        """a_0 → a_10 of every piece. Saves each block's activations from `lowest` on, or its input if it is recomputed."""
        if lowest is None:
            lowest = 0 if work.complete else self.lowest_block()
        recompute, pieces = options.recomputes, work.pieces
        if recompute:
            trim_heap()  # what the last step, or the optimizer, has left free
        rotations = [self.rotations(piece.positions, piece.lengths) for piece in pieces]
        state = ForwardState(work, rotations, [], [], lowest, recompute, options.observer, options.examples)
        if state.observer is not None:
            for piece in pieces:
                state.observer.note("a_0", piece.ids)
        state.a_10.extend(self.embeddings(p.ids, p.positions) for p in pieces)
        # one buffer for the inputs of all blocks: tensors of 2 MB and more are rounded up to large pages one by one
        inputs = [a.new_empty(len(self.blocks) - lowest, *a.shape) for a in state.a_10] if recompute else []
        if work.routers is not None:
            work.routers.begin()
        for i, block in enumerate(self.blocks):
            state.blocks.append([])
            with self.weights(block) as weights:
                for j in range(len(pieces)):
                    a_1 = state.a_10[j]
                    state.a_10[j], saved = block.forward(a_1, self._pass(i, j, state, weights))
                    if i >= lowest:
                        state.blocks[i].append(inputs[j][i - lowest].copy_(a_1) if recompute else saved)
        if work.routers is not None:
            work.routers.counting = False
        return state

    def backward_pass(
        self,
        state: ForwardState,
        finished: Finished = no_hook,
        *,
        once: bool = True,
        delta_10: list[Tensor] | None = None,
    ) -> float:
        """a_10 → the value of the objective, Δ_11, and Δ_10 … Δ_1 with all gradients, down to the lowest layer that trains.
        Frees activations as it goes unless `once` is False. With a given `delta_10` of every piece, the head and the
        objective are not computed."""
        pieces, n_targets, objective, *_ = state.work
        if not pieces:
            finished = with_zeros(finished)
        every_layer = self.layers() if finished is not no_hook else [[]] * (3 + len(self.blocks))
        layers = iter(every_layer)
        value = 0.0
        deltas: list[Tensor] = [] if delta_10 is None else delta_10
        if state.recompute:
            trim_heap()  # the forward pass frees more than the head can use
        with self.weights(self.head) as weights:
            for piece, a_10 in zip(pieces, state.a_10, strict=True) if delta_10 is None else ():
                run = Pass(
                    observer=state.observer, weights=weights, operand=self.operand, examples=_examples_of(piece, state)
                )
                if not len(piece.targets):  # computed for its routers
                    deltas.append(torch.zeros_like(a_10))
                    continue
                total, signal = readout(self.ending(), a_10, piece, objective, 1 / n_targets, run)
                value += total / n_targets
                deltas.append(signal)
        if not self.config.tied:
            finished(next(layers))
        finished(next(layers))
        for i in reversed(range(state.lowest, len(self.blocks))):
            with self.weights(self.blocks[i]) as weights:
                for j in range(len(pieces)):
                    run = self._pass(i, j, state, weights)
                    saved = state.blocks[i].pop(0) if once else state.blocks[i][j]
                    if isinstance(saved, Tensor):
                        saved = self.blocks[i].forward(saved, run._replace(observer=None))[1]
                    deltas[j] = self.blocks[i].backward(deltas[j], saved, run)
                    del saved
            if state.recompute and i % 4 == 0:
                trim_heap()  # the heap fragments from block to block
            finished(next(layers))
        if self.embeddings_train():
            for piece, delta_1 in zip(pieces, deltas, strict=True):
                run = PLAIN._replace(examples=_examples_of(piece, state))
                self.embed.backward(delta_1, piece.ids, run)
                if self.has("positions"):
                    self.positions.backward(delta_1, piece.positions, run)
        finished(every_layer[-1])
        return value

    def _pass(self, i: int, j: int, state: ForwardState, weights: Weights) -> Pass:
        """The arguments of block i for piece j. The last block computes only the rows that have a target, unless
        its router has losses, which are of all rows."""
        piece, complete = state.work.pieces[j], state.work.complete
        last, routers = i == len(self.blocks) - 1, state.work.routers if self.config.sparse_block(i) else None
        some = last and not complete and self.config.leaves_rows_out(i)
        needed = piece.needed if some else piece.rows
        query_rows = needed if some and 0 < len(needed) < len(piece.ids) else None
        return Pass(
            attention.spans_of(piece.lengths, query_rows, piece.parents),
            query_rows,
            complete or i > state.lowest or self.embeddings_train(),
            piece.dropout_seed,
            None if state.observer is None else Within(state.observer, f"blocks.{i}."),
            state.rotations[j],
            weights,
            self.operand,
            examples=_examples_of(piece, state),
            routers=routers,
        )


def _examples_of(piece: Piece, state: ForwardState) -> PieceExamples | None:
    return None if state.examples is None else PieceExamples(state.examples, piece)
