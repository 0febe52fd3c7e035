"""Block and GPT: the paper's Table 2, read downwards in `forward` and upwards in `backward`.

    a_0 ids → a_1 embeddings → [ a_2 norm → a_3 heads → a_4 projection → a_5 = a_1 + a_4
                               → a_6 norm → a_7 expand → a_8 activation → a_9 contract → a_10 = a_5 + a_9 ]
            → a_11 norm → a_12 logits → loss

The stream is (n, d): all sequences packed end to end, a row is a token. Parameters carry Hugging Face's GPT-2 names.
A block keeps about 10·d numbers per token (a_1, q, k, v, a_3, a_5, a_7); norms and activations are computed again.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .config import GPTConfig
from .errors import HandgradError, NonFiniteError
from .layers import Embedding, Head, LayerNorm, Linear, LoRA, QueryKeyValue
from .ops import activation, attention, embedding, layernorm, loss

Record = Callable[[str, Tensor], None]  # given a name from the paper and the tensor that bears it

LOGITS_AT_ONCE = 1 << 24  # entries of the logits matrix that exist at any time


def ignore(name: str, value: Tensor) -> None:
    """The recorder that keeps nothing."""


class Batch(NamedTuple):
    """Sequences packed end to end."""

    ids: Tensor  # (n)
    positions: Tensor  # (n)   counted anew in each sequence
    lengths: tuple[int, ...]  # of the sequences; their sum is n


class Saved(NamedTuple):
    """What a block keeps for its way back."""

    norm_1: layernorm.Saved  # holds a_1
    heads: attention.Saved  # holds q, k, v, a_3
    norm_5: layernorm.Saved  # holds a_5
    a_7: Tensor


class Attention(nn.Module):
    """c_attn is [w_q | w_k | w_v] side by side, (d, h(2 d_ρ + d_h)); c_proj is w_3."""

    def __init__(self, config: GPTConfig, device: torch.device | None):
        super().__init__()
        self.n_heads, self.causal = config.n_heads, config.causal
        self.queries, self.values = config.n_heads * config.query_width, config.n_heads * config.value_width
        self.c_attn: Linear | LoRA = QueryKeyValue(config.d_model, self.queries, self.values, config.key_bias, device)
        self.c_proj: Linear | LoRA = Linear(self.values, config.d_model, device=device)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(n, h(2 d_ρ + d_h)) → q, k (n, h, d_ρ) and v (n, h, d_h), views"""
        q, k, v = torch.split(qkv, [self.queries, self.queries, self.values], 1)
        n, h = len(qkv), self.n_heads
        return q.view(n, h, -1), k.view(n, h, -1), v.view(n, h, -1)

    def forward(self, a_2: Tensor, lengths: tuple[int, ...]) -> attention.Saved:
        _, saved = attention.forward(*self.split(self.c_attn.forward(a_2)), lengths, self.causal)
        return saved

    def backward(self, delta_3: Tensor, a_2: Tensor, saved: attention.Saved, lengths: tuple[int, ...]) -> Tensor:
        """Δ_3 → Δ_2. The three branches of (33) meet in one product with [w_q | w_k | w_v]ᵗ."""
        grads = attention.backward(delta_3.view_as(saved.a), saved, lengths, self.causal)
        return self.c_attn.backward(torch.cat([g.flatten(1) for g in grads], 1), a_2)


class MLP(nn.Module):
    """c_fc is w_6, c_proj is w_8."""

    def __init__(self, config: GPTConfig, device: torch.device | None):
        super().__init__()
        self.c_fc: Linear | LoRA = Linear(config.d_model, config.hidden_width, device=device)
        self.c_proj: Linear | LoRA = Linear(config.hidden_width, config.d_model, device=device)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, device: torch.device | None):
        super().__init__()
        self.g = config.activation
        self.ln_1 = LayerNorm(config.d_model, config.eps, device)
        self.attn = Attention(config, device)
        self.ln_2 = LayerNorm(config.d_model, config.eps, device)
        self.mlp = MLP(config, device)

    def forward(self, a_1: Tensor, lengths: tuple[int, ...], record: Record = ignore) -> tuple[Tensor, Saved]:
        a_2, norm_1 = self.ln_1.forward(a_1)
        heads = self.attn.forward(a_2, lengths)
        a_3 = heads.a.flatten(1)
        a_4 = self.attn.c_proj.forward(a_3)
        a_5 = a_1 + a_4
        a_6, norm_5 = self.ln_2.forward(a_5)
        a_7 = self.mlp.c_fc.forward(a_6)
        a_8 = activation.forward(a_7, self.g)
        a_9 = self.mlp.c_proj.forward(a_8)
        a_10 = a_5 + a_9
        if record is not ignore:
            for i, a in enumerate((a_1, a_2, a_3, a_4, a_5, a_6, a_7, a_8, a_9, a_10), 1):
                record(f"a_{i}", a)
            for name, x in zip("qkv", heads[:3], strict=True):
                record(name, x.transpose(0, 1))
            for i, norm in ((1, norm_1), (5, norm_5)):
                record(f"mu_{i}", norm.mu)
                record(f"sigma_{i}", 1 / norm.inv_sigma)
                record(f"a_bar_{i}", layernorm.normalized(norm))
        return a_10, Saved(norm_1, heads, norm_5, a_7)

    def backward(self, delta_10: Tensor, saved: Saved, lengths: tuple[int, ...], record: Record = ignore) -> Tensor:
        """Δ_10 → Δ_1; the gradients of the block's parameters are added into `.grad`."""
        norm_1, heads, norm_5, a_7 = saved
        delta_8 = self.mlp.c_proj.backward(delta_10, activation.forward(a_7, self.g))  # Δ_9 = Δ_10
        delta_7 = activation.backward(delta_8, a_7, self.g)
        delta_6 = self.mlp.c_fc.backward(delta_7, self.ln_2.again(norm_5))
        delta_5 = delta_10 + self.ln_2.backward(delta_6, norm_5)
        delta_3 = self.attn.c_proj.backward(delta_5, heads.a.flatten(1))  # Δ_4 = Δ_5
        delta_2 = self.attn.backward(delta_3, self.ln_1.again(norm_1), heads, lengths)
        delta_1 = delta_5 + self.ln_1.backward(delta_2, norm_1)
        if record is not ignore:
            deltas = (delta_1, delta_2, delta_3, delta_5, delta_5, delta_6, delta_7, delta_8, delta_10, delta_10)
            for i, delta in enumerate(deltas, 1):
                record(f"delta_{i}", delta)
            rho, signal = attention.maps(delta_3.view_as(heads.a), heads, lengths, self.attn.causal)
            record("rho", rho)
            record("delta_causal", signal)
            record("delta_raw", signal / math.sqrt(heads.q.shape[2]))
        return delta_1

    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.parameters())


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
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        if dtype not in (torch.float64, torch.float32, torch.bfloat16):
            raise HandgradError(f"dtype must be float64, float32 or bfloat16, not {dtype}")
        self.config = config
        meta = torch.device("meta")
        self.transformer = Transformer(config, meta)
        weight = self.transformer.wte.weight if config.tied else Embedding(config.n_vocab, config.d_model, meta).weight
        self.lm_head: Head | LoRA = Head(weight, config.logits_bias, meta)
        self.to(dtype)
        if device is None or torch.device(device).type != "meta":
            self.to_empty(device=device or torch.get_default_device())
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

    # ── the public calls ────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def logits(self, tokens: Tensor, lengths: list[int] | None = None) -> Tensor:
        """(B, T) ids → (B, T, V). Sequences of uneven length: (n) ids end to end with their lengths → (n, V)."""
        batch = self.pack(tokens, lengths)
        a_11 = self._finite(self._down(batch)[0])
        return self.lm_head.forward(a_11).view(*tokens.shape, -1)

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None) -> float:
        """The mean loss over the targets ≠ −100, without gradients."""
        batch = self.pack(tokens, lengths)
        a_11 = self._finite(self._down(batch)[0])
        rows, targets = self._targets(tokens, targets)
        total = sum(
            loss.forward(self.lm_head.forward(a_11[part]), answer).item() for part, answer in self._parts(rows, targets)
        )
        return total / len(rows)

    @torch.no_grad()
    def loss_and_grads(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: list[int] | None = None,
        *,
        n_targets: int | None = None,
        record: Record = ignore,
    ) -> float:
        """The mean loss over the targets ≠ −100; its gradient is added into every trainable parameter's `.grad`.

        To accumulate over several calls as if they were one batch, give `n_targets`, the number of targets of all the
        calls together: then each call returns its share of the mean, and the shares and gradients add up.
        """
        batch = self.pack(tokens, lengths)
        rows, targets = self._targets(tokens, targets)
        record("a_0", batch.ids)
        a_11, norm_10, saved = self._down(batch, record, keep=True)
        value, delta_11 = self._head(self._finite(a_11), rows, targets, n_targets or len(rows), record)
        self._up(delta_11, batch, norm_10, saved, record)
        return value

    def pack(self, tokens: Tensor, lengths: list[int] | None = None) -> Batch:
        """Check the tokens and lay the sequences end to end: (B, T), or (n) with the lengths of its sequences."""
        config = self.config
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
        device = self.transformer.wte.weight.device
        ids = tokens.reshape(-1).to(device, torch.int64)
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= config.n_vocab:
            wrong = low if low < 0 else high
            raise HandgradError(f"token id {wrong} is outside the vocabulary: ids go from 0 to {config.n_vocab - 1}")
        positions = torch.cat([torch.arange(size, device=device) for size in sizes])
        return Batch(ids, positions, sizes)

    # ── down, the head, and up ──────────────────────────────────────────────────────────────────────────────────────

    def _down(
        self, batch: Batch, record: Record = ignore, keep: bool = False
    ) -> tuple[Tensor, layernorm.Saved, list[Saved]]:
        """a_0 → a_11, with what the way back needs if `keep`"""
        t = self.transformer
        a = embedding.forward(batch.ids, batch.positions, t.wte.weight, t.wpe.weight)
        kept = []
        for i, block in enumerate(self.blocks):
            a, saved = block.forward(a, batch.lengths, _within(i, record))
            if keep:
                kept.append(saved)
        a_11, norm_10 = t.ln_f.forward(a)
        return a_11, norm_10, kept

    def _head(
        self, a_11: Tensor, rows: Tensor, targets: Tensor, n_targets: int, record: Record
    ) -> tuple[float, Tensor]:
        """a_11 → the loss and Δ_11, some rows at a time: the logits of all rows never exist together. Rows without a
        target never come here: their Δ_11 is 0."""
        total = 0.0
        delta_11 = torch.zeros_like(a_11)
        deltas = []
        for part, answer in self._parts(rows, targets):
            a = a_11[part]
            summed, delta_12 = loss.forward_and_delta(self.lm_head.forward(a), answer, 1 / n_targets)
            total += summed.item()
            delta_11[part] = self.lm_head.backward(delta_12, a)
            if record is not ignore:
                deltas.append(delta_12)
        if record is not ignore:
            a_12 = self.lm_head.forward(a_11)
            record("a_11", a_11)
            record("a_12", a_12)
            record("y_pred", torch.softmax(a_12, 1))
            record("delta_12", torch.zeros_like(a_12).index_copy_(0, rows, torch.cat(deltas)))
            record("delta_11", delta_11)
        return total / n_targets, delta_11

    def _up(self, delta_11: Tensor, batch: Batch, norm_10: layernorm.Saved, saved: list[Saved], record: Record) -> None:
        """Δ_11 → Δ_1, down to the lowest layer that has anything to train"""
        t = self.transformer
        embeddings_train = t.wte.weight.requires_grad or t.wpe.weight.requires_grad
        lowest = 0 if embeddings_train else next((i for i, b in enumerate(self.blocks) if b.trainable()), len(saved))
        delta = t.ln_f.backward(delta_11, norm_10)
        if record is not ignore:
            for name, x in (("a_bar_10", layernorm.normalized(norm_10)), ("sigma_10", 1 / norm_10.inv_sigma)):
                record(name, x)
        for i in reversed(range(lowest, len(saved))):
            delta = self.blocks[i].backward(delta, saved.pop(), batch.lengths, _within(i, record))
        if embeddings_train:
            t.wte.backward(delta, batch.ids)
            t.wpe.backward(delta, batch.positions)

    def _targets(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that have a target, and those targets."""
        if targets.shape != tokens.shape:
            raise HandgradError(f"targets {tuple(targets.shape)} must have the shape of tokens {tuple(tokens.shape)}")
        if targets.is_floating_point():
            raise HandgradError(f"targets must be whole numbers (int64), not {targets.dtype}")
        flat = targets.reshape(-1).to(self.transformer.wte.weight.device, torch.int64)
        rows = loss.rows_with_target(flat)
        if len(rows) == 0:
            raise HandgradError("every target is ignored (−100): there is nothing to learn from in this batch")
        flat = flat[rows]
        low, high = (int(x) for x in torch.aminmax(flat))
        if low < 0 or high >= self.config.n_vocab:
            wrong = low if low < 0 else high
            raise HandgradError(
                f"target {wrong} is outside the vocabulary: ids go from 0 to {self.config.n_vocab - 1}, −100 is ignored"
            )
        return rows, flat

    def _parts(self, rows: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        size = max(1, LOGITS_AT_ONCE // self.config.n_vocab)
        return list(zip(torch.split(rows, size), torch.split(targets, size), strict=True))

    def _finite(self, a: Tensor) -> Tensor:
        """`a` itself, or an error that says where the first number went wrong."""
        if math.isfinite(a.sum().item()):
            return a
        broken = [name for name, p in self.named_parameters() if not torch.isfinite(p).all()]
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            raise NonFiniteError(f"the weights hold NaN or infinity in {broken[0]}{more}: load a sound checkpoint")
        raise NonFiniteError(f"the activations overflowed {a.dtype}: use a wider dtype or a smaller learning rate")


def _within(block: int, record: Record) -> Record:
    """The recorder for a block's own names."""
    return ignore if record is ignore else lambda name, value: record(f"blocks.{block}.{name}", value)
