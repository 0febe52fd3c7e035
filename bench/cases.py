"""The cases that contenders compete on, described before any model exists."""

import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import handgrad as hg
from handgrad.model.precision import why_not_mixed
from handgrad.tolerances import TOLERANCE

from . import bridge
from .attempts import MissingError
from .in_transformers import RANK, load_libraries, with_adapters
from .peers import Contender, Eager, Hand, HandInBackward, Loop, Peft
from .products import MatmulsOnly
from .row import AUTOCAST, MIXED
from .sizes import Size

LEAST_MEMORY = "handgrad, least memory"  # recomputes blocks, updates inside the backward pass
LOOP = "handgrad train"  # a step of the training loop
COMPILED = "torch.compile"
EAGER = "eager autograd"
PEFT = "transformers + peft"
MATMULS = "matmuls only"
Contenders = dict[str, Callable[[], Contender]]  # by name
InPrecisions = dict[str, Callable[[bool], Contender]]  # by name; called with whether operands of products are rounded


@dataclass
class Case:
    """A model and a batch, and the contenders on it."""

    name: str
    tokens: int
    make: Contenders  # handgrad first, then the reference
    rounds: int
    matmuls: Callable[[], MatmulsOnly] | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    in_a_row: int = 1  # steps of a contender in a round
    tolerance: float = 1e-4  # relative, of losses and gradients
    exact: Callable[[], Contender] | None = None  # the same in float32, where the dtype itself rounds more than that
    before: Callable[[], object] = lambda: None  # imports what contenders need, before memory is measured


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


def in_precisions(make: InPrecisions, rounded: bool) -> Contenders:
    """All contenders in float32; then, if `rounded` and this machine multiplies bfloat16, handgrad in mixed precision and
    every peer under autocast."""
    found: Contenders = {name: partial(call, False) for name, call in make.items()}
    if rounded and why_not_mixed() is None:
        found |= {
            f"{name}, {MIXED}" if name.startswith("handgrad") else name + AUTOCAST: partial(call, True)
            for name, call in make.items()
        }
    return found


def _compiled(make: Callable[[], Contender]) -> Contender:
    if not can_compile():
        raise MissingError("no C++ compiler (g++, or what CXX names), or no Python.h")
    return make()


# ── scenarios ───────────────────────────────────────────────────────────────────────────────────────────────────────


def train(size: Size) -> list[Case]:
    b, t = size.recipe_batch
    recipe = _training(
        f"nano recipe, {b}×{t}", size.recipe, (b, t), size.recipe_rounds, size.compile_recipe, loop=True,
        rounded="recipe" in size.mixed,
    )  # fmt: skip
    recipe.in_a_row = 10 if size.recipe_rounds > 1 else 1  # a step is so short that one alone is mostly noise
    cases = [_train_gpt2(shape, size) for shape in size.train]
    return [*cases, *(_train_gpt2(shape, size, "bfloat16") for shape in size.bfloat16), recipe]


def _train_gpt2(shape: tuple[int, int], size: Size, dtype: str = "float32") -> Case:
    b, t = shape
    wide = dtype == "float32"
    return _training(
        f"{size.label}, {b}×{t}" + ("" if wide else f", {dtype}"), size.model, shape, _rounds(size, b * t),
        compiled=wide and shape in size.compiled, loop=wide and shape == size.loop, dtype=dtype,
        rounded=wide and shape in size.mixed_train,
    )  # fmt: skip


def _rounds(size: Size, tokens: int) -> int:
    return 2 if size.name == "quick" else 3 if tokens > 2048 else 6


def _hand_and_eager(model: Callable[[], hg.GPT], tokens: Tensor, targets: Tensor) -> InPrecisions:
    return {
        "handgrad": lambda low: Hand(model(), tokens, targets, mixed=low),
        EAGER: lambda low: Eager(model(), tokens, targets, autocast=low),
    }


def _training(
    name: str,
    config: hg.ModelConfig,
    shape: tuple[int, int],
    rounds: int,
    compiled: bool,
    loop: bool,
    dtype: str = "float32",
    rounded: bool = False,
) -> Case:
    b, t = shape
    tokens, targets = batch_of(config.n_vocab, b, t)
    model = partial(hg.GPT, config, dtype=dtype)
    in_both = _hand_and_eager(model, tokens, targets)
    if compiled:
        in_both[COMPILED] = lambda low: _compiled(lambda: Eager(model(), tokens, targets, compiled=True, autocast=low))
    make = in_precisions(in_both, rounded)
    if loop:
        make[LOOP] = lambda: Loop(model(), tokens, targets)
    plan = {"config": config, "batch": b, "tokens": t, "dtype": dtype}
    tolerance = TOLERANCE[getattr(torch, dtype)]
    exact = None if dtype == "float32" else lambda: Hand(model().float(), tokens, targets)
    return Case(name, b * t, make, rounds, lambda: MatmulsOnly(model(), tokens), plan, tolerance=tolerance, exact=exact)


def lora(size: Size) -> list[Case]:
    models = {"": size.model, **{f"{label}: ": config for label, config in size.lora_models}}
    return [_lora(label, config, shape, size) for label, config in models.items() for shape in size.lora]


def _lora(label: str, config: hg.ModelConfig, shape: tuple[int, int], size: Size) -> Case:
    b, t = shape
    tokens, targets = batch_of(config.n_vocab, b, t)
    plan = {"config": config, "batch": b, "tokens": t, "rank": RANK, "targets": "all-linear"}
    return Case(
        f"{label}LoRA r={RANK}, {b}×{t}", b * t, _with_peft(config, "lora" in size.mixed, tokens, targets),
        _rounds(size, b * t),
        (lambda: MatmulsOnly(hg.GPT(config), tokens, RANK)) if config.family == "gpt2" else None, plan,
    )  # fmt: skip


def _with_peft(
    config: hg.ModelConfig, rounded: bool, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None
) -> Contenders:
    """handgrad and transformers + peft, both with adapters on every matrix."""

    def model() -> hg.GPT:
        return with_adapters(hg.GPT(config))

    make: InPrecisions = {
        "handgrad": lambda low: Hand(model(), tokens, targets, lengths, mixed=low),
        PEFT: lambda low: Peft(model(), tokens, targets, lengths, autocast=low),
    }
    return in_precisions(make, rounded)


def sft(size: Size) -> list[Case]:
    ids, answers, lengths = uneven_examples(size.model.n_vocab, size.examples, size.longest)
    note = f"{len(lengths)} examples, {len(ids):,} tokens, {int((answers != -100).sum()):,} targets"
    make = _with_peft(size.model, "sft" in size.mixed, ids, answers, lengths)
    return [Case(f"LoRA r={RANK}, uneven examples", len(ids), make, 1, note=note)]


def memory(size: Size) -> list[Case]:
    b, t = size.memory
    tokens, targets = batch_of(size.model.n_vocab, b, t)
    make = in_precisions(_hand_and_eager(partial(hg.GPT, size.model), tokens, targets), "memory" in size.mixed)
    make[LEAST_MEMORY] = lambda: HandInBackward(hg.GPT(size.model), tokens, targets)
    plan = {"config": size.model, "batch": b, "tokens": t}
    return [Case(f"{size.label}, {b}×{t}", b * t, make, 1 if size.name == "quick" else 2, plan=plan)]


def bridged(size: Size) -> list[Case]:
    """A transformers model, and the same with hand-derived backward passes: all weights, and LoRA."""
    models = {size.label: size.model, **dict(size.bridge_models)}
    return [_bridged(label, config, adapted, size) for label, config in models.items() for adapted in (False, True)]


def _bridged(label: str, config: hg.ModelConfig, adapted: bool, size: Size) -> Case:
    b, t = size.bridge
    tokens, _ = batch_of(config.n_vocab, b, t)

    def model() -> hg.GPT:
        made = hg.GPT(config)
        return with_adapters(made) if adapted else made

    make: InPrecisions = {
        bridge.REPLACED: lambda low: bridge.Replaced(model(), tokens, low),
        bridge.TRANSFORMERS: lambda low: bridge.Transformers(model(), tokens, low),
        bridge.WRAPPED: lambda low: bridge.Wrapped(model(), tokens, low),
    }
    if size.bridge_compiled:
        make[COMPILED] = lambda low: _compiled(lambda: bridge.Compiled(model(), tokens, low))
    name = f"{label}, {f'LoRA r={RANK}, ' * adapted}{b}×{t}"
    return Case(
        name,
        b * t,
        in_precisions(make, "bridge" in size.mixed),
        2 if size.name == "quick" else 6,
        before=load_libraries,
    )


CASES: dict[str, Callable[[Size], list[Case]]] = {
    "train": train, "memory": memory, "lora": lora, "sft": sft, "bridge": bridged,
}  # fmt: skip
