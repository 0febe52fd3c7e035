"""The cases that contenders compete on, described before any model exists."""

import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import handgrad as hg

from .peers import RANK, Contender, Eager, Hand, HandInBackward, Loop, MatmulsOnly, Peft, with_adapters
from .sizes import Size

LEAST_MEMORY = "handgrad, least memory"  # recomputes blocks, updates inside the backward pass
LOOP = "handgrad train"  # a step of the training loop
COMPILED = "torch.compile"


@dataclass
class Row:
    """A measurement."""

    scenario: str
    case: str
    contender: str
    tokens: int
    seconds: float = float("nan")  # best round
    median: float = float("nan")
    ratio: float = float("nan")  # best time of the reference ÷ this one's: larger is faster
    gradient_error: float = float("nan")  # largest relative error of a gradient against the reference
    gradient_seconds: float = float("nan")  # without the optimizer
    mfu: float = float("nan")  # time of the matmuls alone ÷ gradient_seconds
    memory: int = 0  # peak bytes above weights and optimizer state; finetune, context, explain: of the process
    memory_ratio: float = float("nan")  # this one's memory ÷ the reference's
    predicted_seconds: float = float("nan")
    predicted_memory: int = 0
    note: str = ""
    above_torch: int = 0  # peak bytes of the process above an interpreter with torch loaded
    above_torch_ratio: float = float("nan")
    bytes_per_token: float = float("nan")  # growth of memory since the next smaller number of tokens


@dataclass
class Case:
    """A model and a batch, and the contenders on it."""

    name: str
    tokens: int
    make: dict[str, Callable[[], Contender]]  # handgrad first, then the reference
    rounds: int
    matmuls: Callable[[], MatmulsOnly] | None = None
    plan: dict[str, object] = field(default_factory=dict)
    note: str = ""


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def batch_of(n_vocab: int, b: int, t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(n_vocab, (2, b, t), generator=generator)
    return tokens, targets


def uneven_examples(n_vocab: int, examples: int, longest: int) -> tuple[Tensor, Tensor, list[int]]:
    """Prompt-masked examples with lengths like those of instruction data: mostly short, a few long; an eighth is prompt."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp(4.9 + 0.85 * torch.randn(examples, generator=generator))
    lengths = [int(x) for x in (spread * longest / 900).clamp(max(12, 20 * longest / 900), longest)]
    n = sum(lengths)
    tokens = torch.randint(n_vocab, (n,), generator=generator)
    targets = torch.randint(n_vocab, (n,), generator=generator)
    start = 0
    for length in lengths:
        targets[start : start + max(10, length // 8)] = -100
        start += length
    return tokens, targets, lengths


def can_compile() -> bool:
    """Whether there is what torch.compile needs: a C++ compiler and Python's headers."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(os.environ.get("CXX", "g++")) is not None and headers.exists()


# ── scenarios ───────────────────────────────────────────────────────────────────────────────────────────────────────


def train(size: Size) -> list[Case]:
    (b, t), make = size.recipe_batch, partial(hg.GPT, size.recipe)
    recipe = _training(f"nano recipe, {b}×{t}", size.recipe, make, (b, t), 25, size.compile_recipe, True)
    return [_train_gpt2(shape, size) for shape in size.train] + [recipe]


def _train_gpt2(shape: tuple[int, int], size: Size) -> Case:
    b, t = shape
    rounds = 3 if b * t > 2048 or size.name == "quick" else 6
    return _training(
        f"{size.label}, {b}×{t}", size.model, partial(hg.GPT, size.model, seed=0), shape, rounds,
        compiled=shape in size.compiled, loop=shape == size.loop,
    )  # fmt: skip


def _training(
    name: str,
    config: hg.ModelConfig,
    model: Callable[[], hg.GPT],
    shape: tuple[int, int],
    rounds: int,
    compiled: bool,
    loop: bool,
) -> Case:
    b, t = shape
    tokens, targets = batch_of(config.n_vocab, b, t)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(model(), tokens, targets),
        "eager autograd": lambda: Eager(model(), tokens, targets),
    }
    if compiled and can_compile():
        make[COMPILED] = lambda: Eager(model(), tokens, targets, compiled=True)
    if loop:
        make[LOOP] = lambda: Loop(model(), tokens, targets)
    note = "torch.compile was skipped: no C++ compiler, or no Python.h"
    return Case(
        name, b * t, make, rounds, lambda: MatmulsOnly(model(), tokens),
        {"config": config, "batch": b, "tokens": t}, note if compiled and not can_compile() else "",
    )  # fmt: skip


def lora(size: Size) -> list[Case]:
    b, t = size.step
    model = partial(hg.GPT, size.model, seed=0)
    tokens, targets = batch_of(size.model.n_vocab, b, t)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(with_adapters(model()), tokens, targets),
        "transformers + peft": lambda: Peft(with_adapters(model()), tokens, targets),
    }
    plan = {"config": size.model, "batch": b, "tokens": t, "rank": RANK, "targets": "all-linear"}
    return [Case(f"LoRA r={RANK}, {b}×{t}", b * t, make, 3, plan=plan)]


def sft(size: Size) -> list[Case]:
    model = partial(hg.GPT, size.model, seed=0)
    ids, answers, lengths = uneven_examples(size.model.n_vocab, size.examples, size.longest)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(with_adapters(model()), ids, answers, lengths),
        "transformers + peft": lambda: Peft(with_adapters(model()), ids, answers, lengths),
    }
    note = f"{len(lengths)} examples, {len(ids):,} tokens, {int((answers != -100).sum()):,} targets"
    return [Case(f"LoRA r={RANK}, uneven examples", len(ids), make, 1, note=note)]


def memory(size: Size) -> list[Case]:
    b, t = size.step
    model = partial(hg.GPT, size.model, seed=0)
    tokens, targets = batch_of(size.model.n_vocab, b, t)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(model(), tokens, targets),
        "eager autograd": lambda: Eager(model(), tokens, targets),
        LEAST_MEMORY: lambda: HandInBackward(model(), tokens, targets),
    }
    plan = {"config": size.model, "batch": b, "tokens": t}
    return [Case(f"{size.label}, {b}×{t}", b * t, make, 2, plan=plan)]


CASES: dict[str, Callable[[Size], list[Case]]] = {"train": train, "memory": memory, "lora": lora, "sft": sft}
