"""Interleaved timing, and peak memory."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .attempts import Attempts
from .process import memory_of


@dataclass
class Timing:
    """Seconds of each round."""

    rounds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def run(self, call: Callable[[], object], times: int = 1) -> None:
        """Time a call."""
        gc.collect()
        for _ in range(times):
            start = time.perf_counter()
            call()
            self.rounds.append(time.perf_counter() - start)


def take_turns(
    contenders: dict[str, Callable[[], object]], rounds: int, attempts: Attempts, in_a_row: int = 1
) -> dict[str, Timing]:
    """Time contenders in turns: one warm-up each, then every contender in every round, `in_a_row` times if it is short.
    Those that fail have no timing."""
    timings = {name: Timing() for name in contenders}
    for name, run in contenders.items():
        attempts(name, run)
    gc.collect()
    gc.freeze()  # looking through all imported modules between rounds takes longer than a short run, and empties the caches
    try:
        for _ in attempts.rounds(rounds):
            for name, run in contenders.items():
                attempts(name, lambda name=name, run=run: timings[name].run(run, in_a_row))  # type: ignore[misc]
    finally:
        gc.unfreeze()
    return {name: timings[name] for name in attempts.competing(contenders)}


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return memory_of("VmRSS")


def peak_during(run: Callable[[], object]) -> int:
    """Peak resident memory during `run`, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    run()
    return memory_of("VmHWM")
