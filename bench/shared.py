"""A small model on a machine that others use too: its speed with zero, one and two busy cores, each contender in its own
process."""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import handgrad as hg
from handgrad.training.threads import Threads

from .attempts import Attempts
from .cases import batch_of
from .measure import Timing, timed_rows
from .peers import Loop
from .process import busy_cores, run_alone
from .row import NAN, Row
from .sizes import SIZES, Size

OURS, DEFAULT = "handgrad", "torch's default threads"


def case_name(busy: int) -> str:
    return f"{busy} busy core{'s' * (busy != 1)}"


def cases(size: Size) -> dict[str, Callable[[Attempts], list[Row]]]:
    return {case_name(busy): partial(measure, busy, size) for busy in size.busy_cores}


def measure(busy: int, size: Size, attempts: Attempts) -> list[Row]:
    b, t = size.recipe_batch
    runs = {name: partial(step_seconds, name, size) for name in (OURS, DEFAULT)}
    with busy_cores(busy):
        timings = {name: Timing([seconds]) for name, seconds in attempts.collect(runs).items()}
    rows = timed_rows("shared", case_name(busy), b * t, runs, timings, DEFAULT, attempts)
    for row in rows:
        row.note = f"nano recipe, {b}×{t}; best: mean of all steps; ratio: against {DEFAULT} with as many busy cores"
    return rows


def step_seconds(name: str, size: Size) -> float:
    code = "import handgrad; handgrad.configure_runtime(); from bench.shared import show_step_seconds; "
    code += f"show_step_seconds({name!r}, {size.name!r})"
    return float(json.loads(run_alone(name, code)[0].splitlines()[-1]))


def show_step_seconds(name: str, size_name: str) -> None:
    """Print the mean time of a training step. Runs in a separate process."""
    size = SIZES[size_name]
    model = hg.GPT(size.recipe)
    loop = Loop(model, *batch_of(size.recipe.n_vocab, *size.recipe_batch))
    loop.gradients()
    with ExitStack() as stack:
        if name == OURS:
            stack.enter_context(Threads(loop.job, loop.ranks, lambda text: None))
        start, steps = time.perf_counter(), 0
        while steps < 3 or time.perf_counter() - start < size.shared_seconds:
            loop.gradients()
            steps += 1
        print(json.dumps((time.perf_counter() - start) / steps))


def of_idle(rows: list[Row]) -> list[Row]:
    """Fill in the share of each contender's speed on the idle machine."""
    idle = {row.contender: row.seconds for row in rows if row.scenario == "shared" and row.case == case_name(0)}
    for row in rows:
        if row.scenario == "shared":
            row.of_idle = idle.get(row.contender, NAN) / row.seconds
    return rows
