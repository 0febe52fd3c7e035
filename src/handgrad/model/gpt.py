"""GPT: the paper's Table 2, downwards in `forward_pass` and upwards in `backward_pass`; the brackets are `block.py`.

    a_0 ids → a_1 embeddings → [ a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
                               → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9 ]
            → a_11 norm → a_12 logits → loss

The stream is (n, d): all sequences packed end to end, one row per token. Parameters have Hugging Face's names.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import HandgradError, NonFiniteError, shown
from ..machine import trim_heap
from ..ops import attention
from .batch import FROZEN_AT_ONCE, TOKENS_AT_ONCE, Batch, Piece, check_targets, count_targets, pack, split
from .block import Saved
from .example_gradients import ExampleGradients, PieceExamples
from .layers import Affine, Linear, freeze
from .logits import Logits
from .network import Network
from .objective import MEAN_LOSS, Objective
from .passes import PLAIN, Pass, Record, no_record
from .readout import readout, row_groups

Finished = Callable[[list[nn.Parameter]], None]  # called with the parameters of a layer whose gradients are final


def no_hook(parameters: list[nn.Parameter]) -> None:
    """Default hook: do nothing."""


class ForwardState(NamedTuple):
    """What the forward pass saves for the backward pass."""

    pieces: list[Piece]
    rotations: list[tuple[Tensor, Tensor] | None]  # per piece: cos and sin of its positions
    a_10: list[Tensor]  # per piece: the last block's output
    blocks: list[list[Saved | Tensor]]  # per block and piece: all it needs, or only a_1 to recompute the block from
    lowest: int  # the first block that the backward pass visits
    all_signals: bool
    record: Record
    examples: ExampleGradients | None = None  # measures the gradients of single examples


class GPT(Network):
    """A decoder-only transformer with hand-derived gradients.

    model = GPT(preset("nano"), seed=1)
    loss = model.loss_and_grads(tokens, targets)     mean over the targets ≠ −100; p.grad accumulates
    """

    # ── the public calls ────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def logits(self, tokens: Tensor, lengths: list[int] | None = None) -> Tensor:
        """(B, T) ids → (B, T, V). Sequences of uneven length: (n) ids end to end with their lengths → (n, V)."""
        a = self.last_layer(tokens, lengths)
        return self.check_finite(self.head.forward(a)).view(*tokens.shape, -1).as_subclass(Logits)

    @torch.no_grad()
    def last_layer(self, tokens: Tensor, lengths: list[int] | None = None) -> Tensor:
        """(B, T) ids → (B·T, d): the last block's output, after the final norm. Lengths as for `logits`."""
        self.check_parameters()
        batch = self.pack(tokens, lengths)
        a = self.embeddings(batch.ids, batch.positions)
        run = Pass(attention.spans_of(batch.lengths), rotation=self.rotation(batch.positions))
        for block in self.blocks:
            with self.unpacked(block):
                a, _ = block.forward(a, run)
        return self.final_norm.forward(a)[0]

    def forward(self, tokens: Tensor) -> Tensor:
        """model(tokens) is model.logits(tokens)."""
        return self.logits(tokens)

    @torch.no_grad()
    def loss(
        self, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None, *, objective: Objective = MEAN_LOSS
    ) -> float:
        """The mean loss over the targets ≠ −100, or the value of another objective, without gradients."""
        self.check_parameters()
        pieces = self.pieces(tokens, objective.select(targets, self.config.n_vocab), lengths)
        n_targets = count_targets(pieces)
        state = self.forward_pass(pieces, lowest=len(self.blocks))
        total = 0.0
        with self.unpacked(self.head):
            for piece, a_10 in zip(pieces, state.a_10, strict=True):
                a_11 = self.final_norm.forward(a_10)[0]
                for rows in row_groups(len(piece.targets), self.head):
                    summed = objective.forward(self.head.forward(a_11[rows]), piece.targets[rows])
                    total += self.check_finite(summed).item()
        return total / n_targets

    @torch.no_grad()
    def loss_and_grads(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: list[int] | None = None,
        *,
        n_targets: int | None = None,
        recompute: str = "none",
        seed: int | None = None,
        tokens_at_once: int | None = None,
        finished: Finished = no_hook,
        record: Record = no_record,
        all_signals: bool = False,
        objective: Objective = MEAN_LOSS,
        examples: ExampleGradients | None = None,
    ) -> float:
        """The mean loss over the targets ≠ −100; its gradient is added into every trainable parameter's `.grad`. A frozen
        parameter gets none; one it had is discarded, because an optimizer would apply it.

        n_targets   To accumulate over several calls as if they were one batch, give the number of targets of all the
                    calls together: each call then returns its share of the mean, and shares and gradients add up.
                    A call without any target adds 0.
        recompute   "blocks" saves only each block's input and recomputes the block in the backward pass: less memory,
                    about a third more time.
        seed        Seed of the adapters' dropout, if they have any (default: drawn from torch's random numbers). No
                    dropout after model.eval().
        tokens_at_once   A larger batch is processed in pieces of complete sequences of about this size (default 1024, or
                    512 if the matrices are frozen).
        finished    Called with the parameters of a layer as soon as their gradients are final, from the head to the
                    embeddings, during the backward pass.
        record      Called with every intermediate under the paper's name, once per piece. It observes what this call
                    computes and changes nothing.
        all_signals Compute every signal of every row, needed or not: in one piece, down to Δ_1 of the first block,
                    without dropout. `hg.trace` uses it.
        objective   What to differentiate instead of the mean loss: one target's loss, or a difference of logits.
        examples    Measures the gradient of each sequence (see `example_gradients`). Only ExampleNorms(grads=True) fills
                    `.grad` as well.
        """
        if recompute not in ("none", "blocks"):
            raise HandgradError(f"recompute must be 'none' or 'blocks', not {recompute!r}")
        if not callable(record) or not callable(finished):
            raise HandgradError("record and finished must be functions: record=lambda name, tensor: ...")
        if tokens_at_once is not None and (not isinstance(tokens_at_once, int) or tokens_at_once < 1):
            raise HandgradError(f"tokens_at_once must be an integer of at least 1, not {shown(tokens_at_once)}")
        parameters = list(self.parameters())
        self.check_parameters(parameters)
        dropout_seed = None if all_signals else self.dropout_seed(seed)
        at_once = math.inf if all_signals else tokens_at_once or self.tokens_at_once()
        targets = objective.select(targets, self.config.n_vocab)
        pieces = self.pieces(tokens, targets, lengths, at_once, dropout_seed)
        n_targets = count_targets(pieces, n_targets if pieces or not all_signals else None)
        freeze(p for p in parameters if not p.requires_grad)
        # Pieces processed one after the other hold the activations of one piece only; processed together, block by block,
        # all gradients of a block are final at once.
        # Packed weights are then unpacked once for all pieces.
        together = recompute == "blocks" or self.packed or not pieces or (examples is not None and examples.together)
        windows = [pieces] if together else [[piece] for piece in pieces]
        fresh = [p for p in parameters if p.grad is None]
        if examples is not None:
            self.begin_examples(examples, pieces, n_targets, tokens, lengths)
        fills = examples is None or examples.grads
        # gradients allocated between the activations of two pieces would fragment memory
        if len(windows) > 1 and fills:
            for p in fresh:
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        value = 0.0
        try:
            for window in windows:
                hook = finished if window is windows[-1] else no_hook
                state = self.forward_pass(
                    window, recompute=recompute == "blocks", record=record, all_signals=all_signals, examples=examples
                )
                value += self.backward_pass(state, n_targets, finished=hook, objective=objective)
        except NonFiniteError:
            for p in fresh:
                p.grad = None  # discard partial gradients
            raise
        return value

    def tokens_at_once(self) -> int:
        """Tokens of a piece, unless a call gives another number."""
        if self.adapter is None or any(isinstance(x, Linear) and x.trains for x in self.modules()):
            return TOKENS_AT_ONCE
        return FROZEN_AT_ONCE

    def begin_examples(
        self, examples: ExampleGradients, pieces: list[Piece], n_targets: int, tokens: Tensor, lengths: list[int] | None
    ) -> None:
        """Prepare the measurement of a batch's examples."""
        trained = [p for block in self.blocks for p in block.parameters() if p.requires_grad]
        if len(set(trained)) < len(trained):
            raise HandgradError("blocks share a parameter: its uses have products that example norms do not measure")
        count = len(tokens) if tokens.ndim == 2 else len(lengths or [1])
        shared = self.head.plain().weight is self.embed.weight
        examples.begin(pieces, count, n_targets, self.embed.weight if shared and self.embed.trains else None)

    def pack(self, tokens: Tensor, lengths: list[int] | None = None) -> Batch:
        """Check tokens (B, T), or (n) with the lengths of its sequences, and pack them end to end."""
        if torch.is_autocast_enabled(self.device.type):
            raise HandgradError(
                "torch.autocast is not supported: it changes the dtype of single products, and the gradients are written"
                " for one dtype throughout; remove it, and convert the model instead: model.to(torch.bfloat16)"
            )
        return pack(tokens, lengths, self.config, self.device)

    def pieces(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: list[int] | None,
        at_once: float = TOKENS_AT_ONCE,
        dropout_seed: int | None = None,
    ) -> list[Piece]:
        """The batch in pieces of complete sequences, about `at_once` tokens each."""
        batch = self.pack(tokens, lengths)
        return split(batch, check_targets(tokens, targets, self.config, self.device), at_once, dropout_seed)

    # ── the two passes ──────────────────────────────────────────────────────────────────────────────────────────────

    def forward_pass(
        self,
        pieces: list[Piece],
        *,
        recompute: bool = False,
        lowest: int | None = None,
        record: Record = no_record,
        all_signals: bool = False,
        examples: ExampleGradients | None = None,
    ) -> ForwardState:
        """a_0 → a_10 of every piece. Saves each block's activations, or with `recompute` only its input."""
        if lowest is None:
            lowest = 0 if all_signals else self._lowest()
        if recompute:
            trim_heap()  # what the last step, or the optimizer, has left free
        rotations = [self.rotation(piece.positions) for piece in pieces]
        state = ForwardState(pieces, rotations, [], [], lowest, all_signals, record, examples)
        for piece in pieces:
            record("a_0", piece.ids)
        state.a_10.extend(self.embeddings(p.ids, p.positions) for p in pieces)
        # one buffer for the inputs of all blocks: tensors of 2 MB and more are rounded up to large pages one by one
        inputs = [a.new_empty(len(self.blocks) - lowest, *a.shape) for a in state.a_10] if recompute else []
        for i, block in enumerate(self.blocks):
            state.blocks.append([])
            with self.unpacked(block):
                for j in range(len(pieces)):
                    a_1 = state.a_10[j]
                    state.a_10[j], saved = block.forward(a_1, self._pass(i, j, state))
                    if i >= lowest:
                        state.blocks[i].append(inputs[j][i - lowest].copy_(a_1) if recompute else saved)
        return state

    def backward_pass(
        self,
        state: ForwardState,
        n_targets: int,
        *,
        finished: Finished = no_hook,
        once: bool = True,
        objective: Objective = MEAN_LOSS,
        delta_10: list[Tensor] | None = None,
    ) -> float:
        """a_10 → the loss, Δ_11, and Δ_10 … Δ_1 with all gradients, down to the lowest layer that trains.
        Frees activations as it goes unless `once` is False. A `delta_10` of every piece that is known already stands
        instead of the loss."""
        if not state.pieces:
            finished = _with_zeros(finished)
        every_layer = self.layers() if finished is not no_hook else [[]] * (3 + len(self.blocks))
        layers = iter(every_layer)
        value = 0.0
        deltas: list[Tensor] = [] if delta_10 is None else delta_10
        recomputed = any(isinstance(saved, Tensor) for block in state.blocks for saved in block)
        if recomputed:
            trim_heap()  # the forward pass frees more than the head can use
        with self.unpacked(self.head):
            for piece, a_10 in zip(state.pieces, state.a_10, strict=True) if delta_10 is None else ():
                total, signal = readout(
                    self.final_norm, self.head, a_10, piece, 1 / n_targets, self.check_finite, state.record,
                    _examples_of(piece, state), objective,
                )  # fmt: skip
                value += total / n_targets
                deltas.append(signal)
        if not self.config.tied:
            finished(next(layers))
        finished(next(layers))
        for i in reversed(range(state.lowest, len(self.blocks))):
            with self.unpacked(self.blocks[i]):
                for j in range(len(state.pieces)):
                    run = self._pass(i, j, state)
                    saved = state.blocks[i].pop(0) if once else state.blocks[i][j]
                    if isinstance(saved, Tensor):
                        saved = self.blocks[i].forward(saved, run._replace(record=no_record))[1]
                    deltas[j] = self.blocks[i].backward(deltas[j], saved, run)
                    del saved
            if recomputed and i % 4 == 0:
                trim_heap()  # the heap fragments from block to block
            finished(next(layers))
        if self.embeddings_train():
            for piece, delta_1 in zip(state.pieces, deltas, strict=True):
                run = PLAIN._replace(examples=_examples_of(piece, state))
                self.embed.backward(delta_1, piece.ids, run)
                if self.has("positions"):
                    self.positions.backward(delta_1, piece.positions, run)
        finished(every_layer[-1])
        return value

    def _pass(self, i: int, j: int, state: ForwardState) -> Pass:
        """The arguments of block i for piece j. The last block computes only the rows that have a target."""
        piece = state.pieces[j]
        last = i == len(self.blocks) - 1
        query_rows = piece.rows if last and len(piece.rows) < len(piece.ids) and not state.all_signals else None
        record = state.record
        return Pass(
            attention.spans_of(piece.lengths, query_rows),
            query_rows,
            state.all_signals or i > state.lowest or self.embeddings_train(),
            piece.dropout_seed,
            no_record if record is no_record else lambda name, value: record(f"blocks.{i}.{name}", value),
            state.rotations[j],
            examples=_examples_of(piece, state),
        )

    def _lowest(self) -> int:
        """The first block that the backward pass has to visit."""
        if self.embeddings_train():
            return 0
        return next((i for i, block in enumerate(self.blocks) if block.trains()), len(self.blocks))

    def dropout_seed(self, seed: int | None) -> int | None:
        """The dropout seed of a pass; None if no layer drops anything."""
        if (
            self.adapter is None
            or not self.training
            or not any(isinstance(x, Affine) and x.dropout for x in self.modules())
        ):
            return None
        return int(torch.randint(1 << 31, ())) if seed is None else seed

    def check_finite(self, a: Tensor) -> Tensor:
        """Return `a`; raise if its sum is not finite, naming the parameter that is broken if one is."""
        if math.isfinite(a.sum().item()):
            return a
        broken = [name for name, p in self.named_parameters() if not torch.isfinite(p).all()]
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            raise NonFiniteError(f"the weights hold NaN or infinity in {broken[0]}{more}: load an intact checkpoint")
        raise NonFiniteError(f"the activations overflowed {str(self.dtype).removeprefix('torch.')}: use a wider dtype")


def _examples_of(piece: Piece, state: ForwardState) -> PieceExamples | None:
    return None if state.examples is None else PieceExamples(state.examples, piece)


def _with_zeros(finished: Finished) -> Finished:
    """For a batch without any target: its gradient is 0, and other processes may be waiting for it."""

    def announce(layer: list[nn.Parameter]) -> None:
        for p in layer:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        finished(layer)

    return announce
