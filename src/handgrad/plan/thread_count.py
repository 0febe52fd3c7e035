"""The fastest number of threads, measured: for runs, commands, and loops of your own.

If another process uses one of the cores, all threads wait for the one on that core, and fewer threads are faster.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # a user who sets one has decided
GAIN = 1.25  # change to a number of threads that is this many times as fast
HOPELESS = 3.0  # a number that takes this many times as long as the fastest is timed once
ROUNDS, SECONDS = 5, 0.5  # of a measurement, at most; one round is always completed

Use = Callable[[int], None]
Clock = Callable[[], float]


def choose_threads(run_step: Callable[[], object]) -> int:
    """Time `run_step` with all threads, half of them, and so on; set and return the fastest number, for what follows in this
    process. All are preferred unless another number is 1.25 times as fast. No-op if OMP_NUM_THREADS or MKL_NUM_THREADS is
    set.

    hg.choose_threads(lambda: model.loss_and_grads(tokens, targets))
    """
    most = torch.get_num_threads()
    return most if most == 1 or user_has_decided() else choose(run_step, candidates(most))


def user_has_decided() -> bool:
    return any(map(os.getenv, VARIABLES))


def candidates(most: int) -> list[int]:
    """Numbers of threads to try: `most`, and halves of it down to 1."""
    return [most] + [most >> i for i in range(1, most.bit_length())]


def choose(
    run_step: Callable[[], object],
    candidates: Sequence[int],
    use: Use = torch.set_num_threads,
    clock: Clock = time.perf_counter,
) -> int:
    """Time `run_step` with each number of threads; return the fastest and set it. The first candidate is preferred: another
    one must be GAIN times as fast."""
    chosen = candidates[0]
    times: dict[int, list[float]] = {n: [] for n in candidates}
    try:
        use(min(candidates))
        run_step()  # warm-up, with the number of threads that other processes slow down least
        end = clock() + SECONDS
        for i in range(ROUNDS):
            fastest = min((min(t) for t in times.values() if t), default=math.inf)
            for n, took in times.items():
                if i and (clock() >= end or min(took) > HOPELESS * fastest):
                    continue  # out of time, or no contender
                use(n)
                start = clock()
                run_step()
                took.append(clock() - start)
        seconds = {n: median(took) for n, took in times.items()}
        best = min(seconds, key=lambda n: seconds[n])
        if seconds[best] * GAIN <= seconds[chosen]:
            chosen = best
    finally:
        use(chosen)
    return chosen


@contextlib.contextmanager
def using(number: int | None) -> Iterator[None]:
    """Use this number of threads inside the block; None: leave it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
