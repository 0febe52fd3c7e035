"""Predict the seconds of a training step, and measure the machine's matmul rate.

Steps of the same shape with one and three blocks and a small vocabulary are timed on this machine, and extrapolated to all
blocks of each kind and the full vocabulary. This accounts for the dtype, attention, memory traffic and the overhead of
every call.
"""

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial

import torch

from .. import lora, optim
from ..checks import MIXED
from ..errors import HandgradError
from ..lora.config import LoRAConfig
from ..machine import available_memory
from ..model.gpt import GPT
from ..model.names import without_block
from ..model.passes.readout import rows_at_once
from ..model.precision import why_not_mixed
from ..model.storage.packed import Packed
from ..model.storage.rounded import round_frozen
from ..ops import linear
from ..ops.loss import NO_TARGET
from ..ops.packed import bytes_per_row
from .estimate import Plan, make_plan
from .memory import BYTES
from .outline import kinds_of_blocks, linear_layers, with_blocks
from .packing import unpacked_kinds, uses, uses_of_expert

LARGEST_FLOP, LARGEST_BYTES = 1e12, 2e9  # of a trial step; a larger one is predicted from the matmul rate alone
UNPACKED_ROWS = 4096  # most that are unpacked to measure the time
FEW, MANY = 256, 8192  # vocabulary sizes of the trial steps
Shape = tuple[tuple[int, ...], int]  # of a trial step: blocks of the planned model, and the vocabulary's size


@dataclass(frozen=True)
class Times:
    """Seconds of the parts of a step."""

    gradients: float
    update: float
    forward: float = 0.0  # of the forward pass alone, if blocks are recomputed: it is done twice


@dataclass(frozen=True)
class Forecast:
    """What a plan cannot count, measured on this machine."""

    step_seconds: float
    runtime_bytes: int  # memory of the process before the step: Python and its libraries
    from_rate: bool = False  # trial steps would be too large: seconds are FLOP ÷ the rate of matrix products


def forecast(plan: Plan, runtime_bytes: int) -> Forecast:
    """Predict the seconds of a step. `runtime_bytes` is the process's memory before the model was made."""
    from_rate = too_large(plan)  # before trials use memory
    return Forecast(predict(plan), runtime_bytes, from_rate)


def predict(plan: Plan, budget: float = 1.5) -> float:
    """Seconds of a step: the gradients of every piece, the gradient's norm, one update, and unpacking. Trial steps
    run for about `budget` seconds."""
    rows = rows_at_once(plan.config.n_vocab, head_trains=False)
    pieces, with_target = -(-plan.batch * plan.tokens // plan.piece), plan.piece // plan.tokens * plan.rows
    groups = pieces * -(-with_target // rows)
    of_expert = uses_of_expert(plan.config, pieces, plan.piece, plan.recompute == "blocks")
    return _computing(plan, budget) + sum(
        count * unpack_seconds(kind, shape, "bfloat16" if plan.mixed else plan.dtype)
        for (kind, shape), count in uses(plan.config, unpacked_kinds(plan.kinds, plan.mixed), groups, of_expert).items()
    )


def unpack_seconds(kind: str, shape: tuple[int, int], dtype: str) -> float:
    """Seconds to unpack a matrix, measured; a large one with its first rows alone."""
    rows, columns = min(shape[0], UNPACKED_ROWS), shape[1]
    matrix = Packed(torch.zeros(rows, bytes_per_row(columns, kind), dtype=torch.uint8), kind, (rows, columns))
    out = torch.empty(rows, columns, dtype=getattr(torch, dtype))
    return shape[0] / rows * best_of(partial(matrix.unpack, out), 0.02)


def too_large(plan: Plan) -> bool:
    """Whether the largest trial step, of three blocks, would take too long or too much memory."""
    config = replace(with_blocks(plan.config, (0, 0, 0)), n_vocab=min(MANY, plan.config.n_vocab))
    optimizer = "AdamW" if plan.ranks else plan.optimizer  # adapters' matrices are small
    trial = make_plan(
        config, plan.piece // plan.tokens, plan.tokens, plan.dtype, mixed=plan.mixed, optimizer=optimizer
    )  # fmt: skip
    most = min(LARGEST_BYTES, available_memory()[0] / 4)  # four trials exist at once
    return trial.forward_flop + trial.backward_flop + trial.update_flop > LARGEST_FLOP or trial.bytes_peak > most


def _computing(plan: Plan, budget: float) -> float:
    """Seconds of a step without unpacking."""
    if too_large(plan):
        seconds = (plan.forward_flop + plan.backward_flop) / matmul_rate(plan.precision)
        return seconds + (plan.update_flop / matmul_rate("bfloat16") if plan.update_flop else 0)
    c = plan.config
    few, many = min(FEW, c.n_vocab), min(MANY, c.n_vocab)
    small, large = ((0,), few), ((0,), many)
    more = {((0, i, i), few): count - (i == 0) for i, count in kinds_of_blocks(c).items() if count > (i == 0)}
    found = _best_times({trial: _Trial(plan, *trial) for trial in {small, large, *more}}, budget)

    def of_blocks(get: Callable[[Times], float]) -> float:
        one = get(found[small])
        return one + sum(count * max(0.0, get(found[three]) - one) / 2 for three, count in more.items())

    def of_vocabulary(get: Callable[[Times], float]) -> float:
        more_ids = (c.n_vocab - FEW) / (many - FEW) if c.n_vocab > FEW else 0.0
        return more_ids * max(0.0, get(found[large]) - get(found[small]))

    def gradients(times: Times) -> float:
        return times.gradients

    def update(times: Times) -> float:
        return times.update

    pieces = -(-plan.batch * plan.tokens // plan.piece)
    of_piece = of_blocks(gradients) + of_vocabulary(gradients) + of_blocks(lambda times: times.forward)
    return pieces * of_piece + of_blocks(update) + of_vocabulary(update)


class _Trial:
    """A training step of the planned shape, with a few of its blocks and a smaller vocabulary."""

    def __init__(self, plan: Plan, blocks: tuple[int, ...], n_vocab: int):
        config = replace(with_blocks(plan.config, blocks), n_vocab=n_vocab)
        self.model = GPT(config, dtype=getattr(torch, plan.dtype), precision=MIXED if plan.mixed else None)
        ranks: dict[str, int] = {}
        for name, rank in plan.ranks.items():
            inside = without_block(name)
            its = linear_layers(plan.config)[inside]
            layer = its.part_of or inside  # the model has one adapter for all parts
            ranks[layer] = max(rank, ranks.get(layer, 0))
        if ranks:  # blocks of some kinds may have none of the layers
            own = {without_block(path) for path in lora.layers_of(self.model)}
            ranks = {name: rank for name, rank in ranks.items() if name in own} or {"all-linear": max(ranks.values())}
            adapter = LoRAConfig(max(ranks.values()), targets=tuple(ranks), rank_pattern=ranks)
            lora.apply(self.model, adapter, any_rank=True)
        if ranks and plan.mixed:
            round_frozen(self.model)
        self.tokens = torch.randint(n_vocab, (plan.piece // plan.tokens, plan.tokens))
        self.targets = self.tokens.clone()
        self.targets[:, : plan.tokens - plan.rows] = NO_TARGET
        self.recomputed = plan.recompute != "none"
        rounding = optim.StochasticRounding(0, self.model.parameters())  # if they are bfloat16
        make = optim.maker(plan.optimizer, 1e-4, 0.1, (0.9, 0.99), rounding, optim.matrices(self.model))
        self.optimizer = make(self.model.parameters())

    def run(self) -> Times:
        start = time.perf_counter()
        self.model.loss_and_grads(self.tokens, self.targets)
        between = time.perf_counter()
        norms = [optim.norm(p.grad) for p in self.model.parameters() if p.grad is not None]
        optim.step(self.optimizer, optim.clip_factor(optim.length(norms), 1.0))
        self.model.zero_grad()
        end = time.perf_counter()
        if self.recomputed:
            self.model.loss(self.tokens, self.targets)
        return Times(between - start, end - between, time.perf_counter() - end)


def _best_times(steps: dict[Shape, _Trial], budget: float) -> dict[Shape, Times]:
    """Best times over several interleaved rounds; the first round is a warm-up. Four more may take three times the budget:
    the best of fewer is mostly noise."""
    best: dict[Shape, Times] = {}
    start, rounds = time.perf_counter(), 0
    while rounds < 2 or (rounds < 200 and time.perf_counter() - start < (3 if rounds < 5 else 1) * budget):
        for trial, step in steps.items():
            took = step.run()
            if rounds:
                old = best.get(trial, took)
                best[trial] = Times(*(min(pair) for pair in zip(astuple(old), astuple(took), strict=True)))
        rounds += 1
    return best


# ── matmul rate ─────────────────────────────────────────────────────────────────────────────────────────────────────

SHAPES = ((512, 768, 3072), (512, 1024, 1024))  # n, f_in, f_out of large layers
SECONDS = 0.2  # of all of them


def matmul_rate(precision: str = "float32") -> float:
    """FLOP per second of matrix products alone, in a dtype or in mixed precision: the best over large shapes."""
    if precision not in (*BYTES, MIXED):
        raise HandgradError(f"unknown dtype {precision!r}; choose one of {', '.join(BYTES)}")
    mixed = precision == MIXED and why_not_mixed() is None
    dtype = torch.bfloat16 if mixed else torch.float32 if precision == MIXED else getattr(torch, precision)
    best = 0.0
    for n, f_in, f_out in SHAPES:
        a, w = (torch.ones(shape, dtype=dtype) for shape in ((n, f_in), (f_in, f_out)))
        out = torch.empty(n, f_out, dtype=torch.float32 if mixed else dtype)
        product = partial(linear.product, a, w, out) if mixed else partial(torch.mm, a, w, out=out)
        best = max(best, 2 * n * f_in * f_out / best_of(product, SECONDS / len(SHAPES)))
    return best


class Peak:
    """The machine's peak matmul rate: measured at first use, and raised by any faster step, so that MFU is at most 1."""

    def __init__(self, precision: str):
        self.precision, self.rate = precision, 0.0

    def mfu(self, done: float, seconds: float) -> float:
        """Model FLOP utilization (MFU): `done` FLOP divided by what the peak rate allows in `seconds`."""
        if done <= 0 or seconds <= 0:
            return 0.0
        self.rate = max(self.rate or matmul_rate(self.precision), done / seconds)
        return done / seconds / self.rate


def best_of(run: Callable[[], object], seconds: float) -> float:
    """Shortest time of a call, repeated for about `seconds`."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best
