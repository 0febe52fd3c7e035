"""GPT: the paper's Table 2, read downwards in `down` and upwards in `up`; what is in the brackets is `block.py`.

    a_0 ids → a_1 embeddings → [ a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
                               → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9 ]
            → a_11 norm → a_12 logits → loss

The stream is (n, d): all sequences packed end to end, a row is a token. Parameters carry Hugging Face's GPT-2 names.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from .block import Block, Record, Saved, ignore
from .config import GPTConfig, LoRAConfig
from .errors import HandgradError, NonFiniteError, shown
from .layers import Embedding, Head, LayerNorm, LoRA, freeze
from .machine import give_back_freed_memory
from .nograph import Logits
from .ops import attention, embedding, loss

Finished = Callable[[list[nn.Parameter]], None]  # given the parameters of a layer whose gradients are final

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
LOGITS_AT_ONCE = 1 << 25  # entries of the logits matrix that exist at any time; with fewer its products slow down
TOKENS_AT_ONCE = 1024  # matrix products reach their full rate here; a larger batch is walked in pieces of this size


def rows_at_once(n_vocab: int, head_trains: bool) -> int:
    """Rows of the head's input that are walked together. Each time the gradient of a head that trains is read and written;
    a frozen one can be walked in smaller parts for nothing."""
    return max(1, LOGITS_AT_ONCE // (n_vocab * (1 if head_trains else 4)))


def as_dtype(given: torch.dtype | str, known: tuple[torch.dtype, ...] = DTYPES) -> torch.dtype:
    """A dtype by itself or by its name: torch.bfloat16, "bfloat16"."""
    names = {str(dtype).removeprefix("torch."): dtype for dtype in known}
    dtype = names.get(given.removeprefix("torch.")) if isinstance(given, str) else given
    if dtype not in known:
        *most, last = names
        raise HandgradError(f"dtype must be {', '.join(most)} or {last}, not {given}")
    return dtype


def go_on(parameters: list[nn.Parameter]) -> None:
    """What to do with final gradients, if nobody asked: leave them where they are."""


class Batch(NamedTuple):
    """Sequences packed end to end."""

    ids: Tensor  # (n)
    positions: Tensor  # (n)   counted anew in each sequence
    lengths: tuple[int, ...]  # of the sequences; their sum is n


class Piece(NamedTuple):
    """Some whole sequences of a batch, walked together."""

    ids: Tensor  # (n)
    positions: Tensor  # (n)
    lengths: tuple[int, ...]
    rows: Tensor  # (m)   those that have a target
    targets: Tensor  # (m)
    draw: int | None = None  # seed of the adapters' dropout; None drops nothing


def count_targets(pieces: list[Piece], n_targets: int | None = None) -> int:
    """By how many targets a loss is divided: those of these pieces, unless more calls belong together."""
    if n_targets is None:
        n_targets = sum(len(piece.targets) for piece in pieces)
        if n_targets == 0:
            raise HandgradError("every target is ignored (−100): there is nothing to learn from in this batch")
    if n_targets < 1:
        raise HandgradError(f"n_targets is the number of targets of all calls together, at least 1, not {n_targets}")
    return n_targets


class Kept(NamedTuple):
    """What the way down leaves for the way up."""

    pieces: list[Piece]
    a_10: list[Tensor]  # of each piece: what the last block sent to the final norm
    blocks: list[
        list[Saved | Tensor]
    ]  # of each block, of each piece: all it needs, or only its a_1 to start again from
    lowest: int  # block below which nothing trains


class Transformer(nn.Module):
    """The layers of a GPT under Hugging Face's names."""

    def __init__(self, config: GPTConfig, device: torch.device | None):
        super().__init__()
        self.wte = Embedding(config.n_vocab, config.d_model, device)
        self.wpe = Embedding(config.n_context, config.d_model, device)
        self.h = nn.ModuleList(Block(config, device) for _ in range(config.n_blocks))
        self.ln_f = LayerNorm(config.d_model, config.eps, device)


class GPT(nn.Module):
    """A GPT-2-like network whose gradients are written out by hand.

    model = GPT(preset("nano"), seed=1)
    loss = model.loss_and_grads(tokens, targets)     mean over the targets ≠ −100; p.grad accumulates
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        seed: int = 0,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if not isinstance(config, GPTConfig):
            raise HandgradError(
                f"GPT takes a GPTConfig, not {shown(config)}: hg.GPT(hg.preset({shown(config)})) makes a model from a"
                " preset, hg.load(path) reads one"
            )
        dtype = as_dtype(dtype)
        self.config = config
        self.adapter: LoRAConfig | None = None  # what `lora` has put beside the linear layers
        self.source = ""  # the folder it was read from
        meta = torch.device("meta")
        self.transformer = Transformer(config, meta)
        weight = self.transformer.wte.weight if config.tied else Embedding(config.n_vocab, config.d_model, meta).weight
        self.lm_head: Head | LoRA = Head(weight, config.logits_bias, meta)
        self.to(dtype)
        if device is None or torch.device(device).type != "meta":
            try:
                self.to_empty(device=device or torch.get_default_device())
            except (AssertionError, RuntimeError) as reason:
                if "alloc" in str(reason):
                    count = sum(p.numel() for p in self.parameters())
                    raise HandgradError(
                        f"there is no memory for {count:,} parameters: choose a smaller shape"
                    ) from None
                raise HandgradError(f"cannot use device {device}: {str(reason).splitlines()[0]}") from None
            if config.tied:
                self.lm_head.weight = self.transformer.wte.weight  # to_empty made two of one
            self._initialize(seed)

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        """As GPT-2: matrices N(0, 0.02), smaller by √(2·n_blocks) where a branch joins the stream; gains 1, biases 0"""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                p.zero_()
            elif p.ndim == 1:
                p.fill_(1)
            else:
                joins = name.endswith("c_proj.weight")
                std = 0.02 / math.sqrt(2 * self.config.n_blocks) if joins else 0.02
                p.copy_(torch.randn(p.shape, generator=generator) * std)

    @property
    def blocks(self) -> list[Block]:
        return list(self.transformer.h)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.transformer.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.transformer.wte.weight.dtype

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train every parameter, or freeze it: then its `.grad` is discarded as well."""
        super().requires_grad_(requires_grad)
        if not requires_grad:
            freeze(self.parameters())
        return self

    # ── the public calls ────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def logits(self, tokens: Tensor, lengths: list[int] | None = None) -> Tensor:
        """(B, T) ids → (B, T, V). Sequences of uneven length: (n) ids end to end with their lengths → (n, V)."""
        batch = self.pack(tokens, lengths)
        t = self.transformer
        a = embedding.forward(batch.ids, batch.positions, t.wte.weight, t.wpe.weight)
        spans = attention.spans_of(batch.lengths)
        for block in self.blocks:
            a, _ = block.forward(a, spans)
        logits = self._finite(self.lm_head.forward(t.ln_f.forward(a)[0]))
        return logits.view(*tokens.shape, -1).as_subclass(Logits)

    def forward(self, tokens: Tensor) -> Tensor:
        """model(tokens) is model.logits(tokens)."""
        return self.logits(tokens)

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None) -> float:
        """The mean loss over the targets ≠ −100, without gradients."""
        pieces = self.pieces(tokens, targets, lengths)
        n_targets = count_targets(pieces)
        kept = self.down(pieces, lowest=len(self.blocks))
        total = 0.0
        for piece, a_10 in zip(pieces, kept.a_10, strict=True):
            a_11 = self.transformer.ln_f.forward(a_10)[0]
            for part, answer in self._parts(piece.targets):
                total += self._finite(loss.forward(self.lm_head.forward(a_11[part]), answer)).item()
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
        finished: Finished = go_on,
        record: Record = ignore,
    ) -> float:
        """The mean loss over the targets ≠ −100; its gradient is added into every trainable parameter's `.grad`. A frozen
        parameter gets none, and one it had is discarded: an optimizer would apply it.

        n_targets   To accumulate over several calls as if they were one batch, give the number of targets of all the
                    calls together: then each call returns its share of the mean, and shares and gradients add up.
                    A call without any target then adds 0.
        recompute   "blocks" keeps only each block's input and computes the block again on the way back: less memory,
                    about a third more time.
        seed        Of the adapters' dropout, if they have any; drawn from torch's random numbers unless given. After
                    model.eval(), and while recording, nothing is dropped.
        tokens_at_once   A larger batch is walked in groups of whole sequences of about this size (default 1024).
        finished    Called with the parameters of a layer as soon as their gradients are final, from the head down to
                    the embeddings, while the way back still goes on.
        record      Called with every intermediate under the paper's name.
        """
        if recompute not in ("none", "blocks"):
            raise HandgradError(f"recompute must be 'none' or 'blocks', not {recompute!r}")
        draw = self.draw(seed) if record is ignore else None
        at_once = (tokens_at_once or TOKENS_AT_ONCE) if record is ignore else math.inf
        pieces = self.pieces(tokens, targets, lengths, at_once, draw)
        n_targets = count_targets(pieces, n_targets if record is ignore or pieces else None)
        freeze(p for p in self.parameters() if not p.requires_grad)
        again = recompute == "blocks"
        # Pieces walked one after the other keep the activations of one piece only; walked together, block by block, all
        # gradients of a block are final at once.
        windows = [pieces] if again or not pieces else [[piece] for piece in pieces]
        fresh = [p for p in self.parameters() if p.grad is None]
        if len(windows) > 1:  # gradients that came between one piece's activations would leave holes for the next's
            for p in fresh:
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        value = 0.0
        try:
            for window in windows:
                last = window is windows[-1]
                kept = self.down(window, again=again, lowest=None if record is ignore else 0, record=record)
                value += self.up(kept, n_targets, finished=finished if last else go_on, record=record)
        except NonFiniteError:
            for p in fresh:
                p.grad = None  # half a gradient is none
            raise
        return value

    def pack(self, tokens: Tensor, lengths: list[int] | None = None) -> Batch:
        """Check the tokens and lay the sequences end to end: (B, T), or (n) with the lengths of its sequences."""
        config = self.config
        if torch.is_autocast_enabled(self.device.type):
            raise HandgradError(
                "torch.autocast is not supported: it changes the dtype of single products, and the gradients are written"
                " for one dtype throughout; leave it out, and make the model itself narrow: model.to(torch.bfloat16)"
            )
        if not isinstance(tokens, Tensor):
            raise HandgradError(f"tokens must be a tensor of ids, not a {type(tokens).__name__}")
        if tokens.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
            raise HandgradError(f"tokens must be whole numbers (int64), not {tokens.dtype}")
        if tokens.ndim not in (1, 2) or tokens.numel() == 0:
            shape = tuple(tokens.shape)
            raise HandgradError(f"tokens must be (B, T), or (n) with lengths, and not empty; got shape {shape}")
        if tokens.ndim == 2:
            if lengths is not None:
                raise HandgradError("lengths go with tokens of shape (n); a (B, T) batch has B sequences of length T")
            sizes = (tokens.shape[1],) * tokens.shape[0]
        else:
            sizes = (len(tokens),) if lengths is None else tuple(int(x) for x in lengths)
        if min(sizes, default=0) < 1 or sum(sizes) != tokens.numel():
            raise HandgradError(f"lengths {list(sizes)} must be at least 1 and add up to the {tokens.numel()} tokens")
        if max(sizes) > config.n_context:
            raise HandgradError(
                f"a sequence of {max(sizes)} tokens does not fit into a context of {config.n_context}: shorten it"
            )
        device = self.device
        ids = tokens.reshape(-1).to(device, torch.int64)
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= config.n_vocab:
            wrong = low if low < 0 else high
            raise HandgradError(f"token id {wrong} is outside the vocabulary: ids go from 0 to {config.n_vocab - 1}")
        positions = torch.cat([torch.arange(size, device=device) for size in sizes])
        return Batch(ids, positions, sizes)

    def layers(self) -> list[list[nn.Parameter]]:
        """The parameters, layer by layer, in the order in which their gradients become final on the way up."""
        t = self.transformer
        head = list(self.lm_head.parameters())
        blocks = [list(block.parameters()) for block in reversed(self.blocks)]
        embeddings = [t.wte.weight, t.wpe.weight]
        if self.config.tied:  # the embedding's gradient is final only with its own part
            embeddings += [p for p in head if p is not t.wte.weight]
        return [*([] if self.config.tied else [head]), list(t.ln_f.parameters()), *blocks, embeddings]

    # ── down and up ─────────────────────────────────────────────────────────────────────────────────────────────────

    def down(
        self, pieces: list[Piece], *, again: bool = False, lowest: int | None = None, record: Record = ignore
    ) -> Kept:
        """a_0 → a_10 of every piece, keeping what the way up needs: a block's activations, or with `again` only its input"""
        t = self.transformer
        lowest = self._lowest() if lowest is None else lowest
        if record is not ignore:
            record("a_0", torch.cat([p.ids for p in pieces]))
        streams = [embedding.forward(p.ids, p.positions, t.wte.weight, t.wpe.weight) for p in pieces]
        blocks: list[list[Saved | Tensor]] = []
        for i, block in enumerate(self.blocks):
            blocks.append([])
            for j, piece in enumerate(pieces):
                a_1 = streams[j]
                streams[j], saved = block.forward(a_1, *self._asked(i, piece, record), _within(i, record), piece.draw)
                if i >= lowest:
                    blocks[i].append(a_1 if again else saved)
        return Kept(pieces, streams, blocks, lowest)

    def up(
        self, kept: Kept, n_targets: int, *, finished: Finished = go_on, record: Record = ignore, once: bool = True
    ) -> float:
        """a_10 → the loss, Δ_11, and Δ_10 … Δ_1 with all gradients, down to the lowest layer that has anything to train.
        What was kept is let go on the way, unless it is needed more than `once`."""
        t = self.transformer
        if not kept.pieces:
            finished = _with_zeros(finished)
        layers = iter(self.layers())
        value = 0.0
        deltas: list[Tensor] = []
        if any(isinstance(saved, Tensor) for block in kept.blocks for saved in block):
            give_back_freed_memory()  # the way down leaves more free than the head can use
        for piece, a_10 in zip(kept.pieces, kept.a_10, strict=True):
            part, delta_10 = self._head(a_10, piece, n_targets, record)
            value += part
            deltas.append(delta_10)
        if not self.config.tied:
            finished(next(layers))
        finished(next(layers))
        for i in reversed(range(kept.lowest, len(self.blocks))):
            lowest = i == kept.lowest and not self._embeddings_train() and record is ignore
            for j, piece in enumerate(kept.pieces):
                spans, asking = self._asked(i, piece, record)
                saved = kept.blocks[i].pop(0) if once else kept.blocks[i][j]
                if isinstance(saved, Tensor):
                    saved = self.blocks[i].forward(saved, spans, asking, draw=piece.draw)[1]
                deltas[j] = self.blocks[i].backward(
                    deltas[j], saved, spans, asking, lowest, _within(i, record), piece.draw
                )
                del saved
            finished(next(layers))
        if self._embeddings_train():
            for piece, delta_1 in zip(kept.pieces, deltas, strict=True):
                t.wte.backward(delta_1, piece.ids)
                t.wpe.backward(delta_1, piece.positions)
        finished(self.layers()[-1])
        return value

    def _asked(self, i: int, piece: Piece, record: Record) -> tuple[attention.Spans, Tensor | None]:
        """Which rows block i has to answer: all, but in the last block only those with a target."""
        last = i == len(self.blocks) - 1
        asking = piece.rows if last and len(piece.rows) < len(piece.ids) and record is ignore else None
        return attention.spans_of(piece.lengths, asking), asking

    def _head(self, a_10: Tensor, piece: Piece, n_targets: int, record: Record) -> tuple[float, Tensor]:
        """a_10 → the loss and Δ_10, some rows at a time: the logits of all rows never exist together."""
        a_11, norm_10 = self.transformer.ln_f.forward(a_10)
        everything = len(a_10) == len(piece.rows)
        answering = a_11 if everything else a_11[piece.rows]  # only when recording do others come this far
        delta_11 = torch.empty_like(answering)
        total = 0.0
        deltas = []
        for part, answer in self._parts(piece.targets):
            a = answering[part]
            draw = None if piece.draw is None else piece.draw + part.start
            summed, delta_12 = loss.forward_and_delta(self.lm_head.forward(a, draw), answer, 1 / n_targets)
            total += self._finite(summed).item()
            delta_11[part] = self.lm_head.backward(delta_12, draw)
            self.lm_head.accumulate(delta_12, a, draw)
            if record is not ignore:
                deltas.append(delta_12)
            del delta_12  # before the next logits come
        if not everything:
            delta_11 = torch.zeros_like(a_11).index_copy_(0, piece.rows, delta_11)
        a_bar_10, _ = self.transformer.ln_f.again(norm_10)
        if record is not ignore:
            a_12 = self.lm_head.forward(a_11)
            delta_12 = torch.zeros_like(a_12).index_copy_(0, piece.rows, torch.cat(deltas))
            named = {"a_bar_10": a_bar_10, "sigma_10": 1 / norm_10.inv_sigma, "a_11": a_11, "a_12": a_12}
            named |= {"y_pred": torch.softmax(a_12, 1), "delta_12": delta_12, "delta_11": delta_11}
            for name, x in named.items():
                record(name, x)
        return total / n_targets, self.transformer.ln_f.backward(delta_11, a_bar_10, norm_10.inv_sigma)

    def _embeddings_train(self) -> bool:
        return self.transformer.wte.weight.requires_grad or self.transformer.wpe.weight.requires_grad

    def _lowest(self) -> int:
        """The first block that has to be walked on the way up."""
        if self._embeddings_train():
            return 0
        return next((i for i, block in enumerate(self.blocks) if block.trainable()), len(self.blocks))

    def draw(self, seed: int | None) -> int | None:
        """The seed of a pass in which adapters drop parts of their input; None if none does."""
        if not self.training or not any(isinstance(x, LoRA) and x.dropout for x in self.modules()):
            return None
        return int(torch.randint(1 << 31, ())) if seed is None else seed

    def tie(self) -> None:
        """Make the logits layer the token embedding transposed; what it had is gone."""
        head = self.lm_head.base if isinstance(self.lm_head, LoRA) else self.lm_head
        head.weight = self.transformer.wte.weight
        head.weight.grad = None  # it was the embedding's alone
        self.config = replace(self.config, tied=True)

    def untie(self) -> None:
        """Give the logits layer a matrix of its own, equal to the embedding's."""
        if self.config.tied:
            head = self.lm_head.base if isinstance(self.lm_head, LoRA) else self.lm_head
            head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
            self.transformer.wte.weight.grad = None  # it was that of both
            self.config = replace(self.config, tied=False)

    def pieces(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: list[int] | None,
        at_once: float | None = None,
        draw: int | None = None,
    ) -> list[Piece]:
        """The batch in groups of whole sequences of about `at_once` tokens, TOKENS_AT_ONCE unless given; groups without
        any target are left out."""
        at_once = TOKENS_AT_ONCE if at_once is None else at_once
        batch = self.pack(tokens, lengths)
        answers = self._targets(tokens, targets)
        groups: list[list[int]] = [[]]
        for length in batch.lengths:
            if groups[-1] and sum(groups[-1]) + length > at_once:
                groups.append([])
            groups[-1].append(length)
        pieces = []
        start = 0
        for group in groups:
            here = slice(start, start + sum(group))
            start = here.stop
            rows = loss.rows_with_target(answers[here])
            if len(rows):
                own = None if draw is None else draw + start
                pieces.append(
                    Piece(batch.ids[here], batch.positions[here], tuple(group), rows, answers[here][rows], own)
                )
        return pieces

    def _targets(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The targets, checked, (n), with NO_TARGET where there is none."""
        if not isinstance(targets, Tensor):
            raise HandgradError(f"targets must be a tensor of ids, not a {type(targets).__name__}")
        if targets.shape != tokens.shape:
            raise HandgradError(f"targets {tuple(targets.shape)} must have the shape of tokens {tuple(tokens.shape)}")
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise HandgradError(f"targets must be whole numbers (int64), not {targets.dtype}")
        flat = targets.reshape(-1).to(self.device, torch.int64)
        given = flat[loss.rows_with_target(flat)]
        low, high = (int(x) for x in torch.aminmax(given)) if len(given) else (0, 0)
        if low < 0 or high >= self.config.n_vocab:
            wrong = low if low < 0 else high
            raise HandgradError(
                f"target {wrong} is outside the vocabulary: ids go from 0 to {self.config.n_vocab - 1}, −100 is ignored"
            )
        return flat

    def _parts(self, targets: Tensor) -> list[tuple[slice, Tensor]]:
        """Rows of the head's input, so many that their logits are at most LOGITS_AT_ONCE, with their targets."""
        size = rows_at_once(self.config.n_vocab, any(p.requires_grad for p in self.lm_head.parameters()))
        size = math.ceil(len(targets) / math.ceil(len(targets) / size))  # parts of equal size
        return [(slice(i, i + size), targets[i : i + size]) for i in range(0, len(targets), size)]

    def _finite(self, a: Tensor) -> Tensor:
        """`a` itself, or an error that says where the first number went wrong."""
        if math.isfinite(a.sum().item()):
            return a
        broken = [name for name, p in self.named_parameters() if not torch.isfinite(p).all()]
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            raise NonFiniteError(f"the weights hold NaN or infinity in {broken[0]}{more}: load a sound checkpoint")
        raise NonFiniteError(f"the activations overflowed {str(self.dtype).removeprefix('torch.')}: use a wider dtype")


def _within(block: int, record: Record) -> Record:
    """The recorder for a block's own names."""
    return ignore if record is ignore else lambda name, value: record(f"blocks.{block}.{name}", value)


def _with_zeros(finished: Finished) -> Finished:
    """For a batch without any target: its gradient is 0, and other processes may wait for it."""

    def announce(layer: list[nn.Parameter]) -> None:
        for p in layer:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        finished(layer)

    return announce
