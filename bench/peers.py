"""The contenders. All start from the same weights and do the same work: loss, all gradients, AdamW."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import handgrad as hg
from handgrad import optim
from handgrad.machine import trim_heap
from handgrad.model.layers.linear import Embedding, Linear
from handgrad.model.storage.rounded import round_frozen
from handgrad.optim import OptimizerInBackward
from handgrad.text import tokenizer
from handgrad.training.config import Recipe, TrainOptions
from handgrad.training.distributed import Ranks
from handgrad.training.job import Job
from handgrad.training.loop import take_step

from .in_transformers import network_of
from .peft_peer import padded
from .row import MIXED

LR = 1e-5
BATCH = 8  # examples that transformers + peft compute at once


class Contender(Protocol):
    def gradients(self) -> float:
        """Compute all gradients into a fresh `.grad`; return the loss."""

    def update(self) -> None:
        """One optimizer step."""

    def named_gradients(self) -> dict[str, Tensor]:
        """Gradients by handgrad's names, in its orientation."""

    def lasting_bytes(self) -> int:
        """Bytes of weights and optimizer state."""


def step(contender: Contender) -> None:
    contender.gradients()
    contender.update()


def bytes_of(network: nn.Module, *optimizers: torch.optim.Optimizer) -> int:
    """Bytes of weights and optimizer state."""
    state = [x for o in set(optimizers) for entry in o.state.values() for x in entry.values() if isinstance(x, Tensor)]
    packed = {x.packed for x in network.modules() if isinstance(x, Linear | Embedding) and x.packed is not None}
    return sum(x.nbytes for x in [*network.parameters(), *packed, *state])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


# ── ours ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Hand:
    """handgrad with default settings, or in mixed precision."""

    def __init__(
        self, model: hg.GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None, mixed: bool = False
    ):
        if mixed:
            model.precision = MIXED
            if model.adapter is not None:  # as finetune does, which reads the base in bfloat16
                round_frozen(model)
                trim_heap()
        self.model, self.batch = model, (tokens, targets, lengths)
        self.optimizer = adamw([p for p in model.parameters() if p.requires_grad])

    def gradients(self) -> float:
        self.optimizer.zero_grad()
        return self.model.loss_and_grads(*self.batch)

    def update(self) -> None:
        optim.step(self.optimizer, 1.0)

    def named_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def lasting_bytes(self) -> int:
        return bytes_of(self.model, self.optimizer)


class HandInBackward(Hand):
    """handgrad with the least memory: blocks recomputed, the optimizer inside the backward pass."""

    def __init__(self, model: hg.GPT, tokens: Tensor, targets: Tensor):
        self.model, self.batch = model, (tokens, targets, None)
        self.inside = OptimizerInBackward(model, adamw)

    def gradients(self) -> float:
        return self.inside.step(*self.batch)

    def update(self) -> None:
        pass

    def lasting_bytes(self) -> int:
        return bytes_of(self.model, *self.inside.optimizers.values())


class Loop(Hand):
    """A step of `handgrad train`: batch, gradients, norm, clipping, update, and logging."""

    def __init__(self, model: hg.GPT, tokens: Tensor, targets: Tensor):
        super().__init__(model, tokens, targets)
        recipe = Recipe(10**9, None, LR, LR, 0, log_every=10, eval_every=250, save_every=250)
        windows: Any = SimpleNamespace(
            batch=lambda first, count: (tokens, targets, None), size=lambda first, count: (tokens.numel(),) * 2
        )
        self.job = Job(
            TrainOptions(), recipe, model, tokenizer.make("bytes", []), self.optimizer, windows, None, len(tokens)
        )
        self.ranks = Ranks()

    def gradients(self) -> float:
        step = take_step(self.job, self.ranks)
        self.job.step += 1
        if self.job.step % self.job.recipe.log_every == 0:
            step.norms()
        return step.loss

    def update(self) -> None:
        pass


class Autograd:
    """A network of PyTorch with its optimizer."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    autocast = False  # whether the forward pass runs under torch.autocast in bfloat16

    def precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)

    def update(self) -> None:
        self.optimizer.step()

    def lasting_bytes(self) -> int:
        return bytes_of(self.network, self.optimizer)


# ── eager autograd, and the same compiled ───────────────────────────────────────────────────────────────────────────


class EagerGPT(nn.Module):
    """GPT-2 as usually written in PyTorch: fused attention kernel, fused projections, tied head, autograd."""

    def __init__(self, model: hg.GPT):
        super().__init__()
        c = self.config = model.config
        self.wte = nn.Embedding(c.n_vocab, c.d_model)
        self.wpe = nn.Embedding(c.n_context, c.d_model)
        self.blocks = nn.ModuleList(EagerBlock(c) for _ in range(c.n_blocks))
        self.ln_f = nn.LayerNorm(c.d_model, c.eps)
        self.pairs = {"transformer.wte.weight": self.wte.weight, "transformer.wpe.weight": self.wpe.weight}
        for i, block in enumerate(self.blocks):
            for ours, theirs in (("ln_1", block.ln_1), ("attn.c_attn", block.c_attn), ("attn.c_proj", block.proj),
                                 ("ln_2", block.ln_2), ("mlp.c_fc", block.c_fc), ("mlp.c_proj", block.c_proj)):  # fmt: skip
                for kind in ("weight", "bias"):
                    self.pairs[f"transformer.h.{i}.{ours}.{kind}"] = getattr(theirs, kind)
        self.pairs |= {"transformer.ln_f.weight": self.ln_f.weight, "transformer.ln_f.bias": self.ln_f.bias}
        with torch.no_grad():
            for name, p in model.named_parameters():
                self.pairs[name].copy_(oriented(name, p))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class EagerBlock(nn.Module):
    def __init__(self, c: hg.ModelConfig):
        super().__init__()
        d = c.d_model
        self.n_heads = c.n_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d, c.eps), nn.LayerNorm(d, c.eps)
        self.c_attn, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.c_proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.n_heads, -1).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(d, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


def oriented(name: str, tensor: Tensor) -> Tensor:
    """Transpose between GPT-2's (f_in, f_out) and nn.Linear's (f_out, f_in); embeddings are the same."""
    return tensor.t() if tensor.ndim == 2 and ".h." in name else tensor


class Eager(Autograd):
    network: EagerGPT

    def __init__(self, model: hg.GPT, tokens: Tensor, targets: Tensor, compiled: bool = False, autocast: bool = False):
        self.autocast = autocast
        self.network = EagerGPT(model).to(model.dtype)
        self.call: Callable[..., Tensor] = torch.compile(self.network, dynamic=False) if compiled else self.network
        self.batch = (tokens, targets)
        self.optimizer = adamw(self.network.parameters())

    def gradients(self) -> float:
        self.optimizer.zero_grad()
        with self.precision():
            loss = self.call(*self.batch)
        loss.backward()
        return loss.item()

    def named_gradients(self) -> dict[str, Tensor]:
        return {name: oriented(name, p.grad) for name, p in self.network.pairs.items()}


# ── transformers + peft ─────────────────────────────────────────────────────────────────────────────────────────────


class Peft(Autograd):
    """transformers' GPT-2 with peft's LoRA; batches are padded on the right, as by its trainer."""

    def __init__(
        self, model: hg.GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None, autocast: bool = False
    ):
        self.autocast = autocast
        self.network = network_of(model)
        self.factors: dict[str, nn.Parameter] = {}
        for name in hg.lora.adapters_of(model):
            layer: Any = self.network.get_submodule(f"base_model.model.{name}")
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            self.factors |= {f"{name}.down": a, f"{name}.up": b}
        self.optimizer = adamw(self.factors.values())
        self.n_targets = int((targets != -100).sum())
        self.batches: list[tuple[Tensor, Tensor, Tensor | None]] = [(tokens, targets, None)]
        if lengths is not None:
            examples = list(zip(tokens.split(lengths), targets.split(lengths), strict=True))
            self.batches = [padded(examples[i : i + BATCH]) for i in range(0, len(examples), BATCH)]

    def gradients(self) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for tokens, targets, mask in self.batches:
            with self.precision():
                logits = self.network(input_ids=tokens, attention_mask=mask).logits
            logits = logits.float().view(-1, logits.shape[-1])  # as by transformers' loss
            loss = F.cross_entropy(logits, targets.view(-1), reduction="sum") / self.n_targets
            loss.backward()
            total += loss.item()
        return total

    def named_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.t() for name, p in self.factors.items()}
