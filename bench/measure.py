"""Interleaved timing, peak memory, and the load of the machine."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .process import memory_of

BUSY = 0.3  # load per core above which measurements are unreliable
Watch = Callable[[Iterable[int]], Iterable[int]]  # may wrap the rounds in a progress bar


@dataclass(frozen=True)
class Machine:
    """The machine before the measurement, which adds its own load."""

    load: float  # 1-minute load average
    cores: int
    threads: int
    torch: str

    @staticmethod
    def now() -> "Machine":
        return Machine(os.getloadavg()[0], os.cpu_count() or 1, torch.get_num_threads(), torch.__version__)

    @property
    def busy(self) -> bool:
        return self.load > BUSY * self.cores

    @property
    def state(self) -> str:
        cores, threads = (f"{n} {what}{'s' * (n > 1)}" for n, what in ((self.cores, "core"), (self.threads, "thread")))
        return f"load {self.load:.2f} on {cores} at the start, {threads}, torch {self.torch}"

    @property
    def warning(self) -> str:
        """A warning if the machine is busy, else \"\"."""
        if not self.busy:
            return ""
        return (
            f"THE MACHINE IS BUSY: load {self.load:.2f} on {self.cores} cores, above {BUSY} per core. Ratios from a"
            " busy machine are biased in our favour: do not publish them; wait until it is idle and measure again."
        )


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


def take_turns(
    contenders: dict[str, Callable[[], object]],
    rounds: int,
    watch: Watch = iter,
    in_a_row: int = 1,
) -> dict[str, Timing]:
    """Time contenders in turns: one warm-up each, then every contender in every round, `in_a_row` times if it is short."""
    timings = {name: Timing() for name in contenders}
    for run in contenders.values():
        run()
    for _ in watch(range(rounds)):
        for name, run in contenders.items():
            gc.collect()
            for _ in range(in_a_row):
                start = time.perf_counter()
                run()
                timings[name].rounds.append(time.perf_counter() - start)
    return timings


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return memory_of("VmRSS")


def peak_during(run: Callable[[], object]) -> int:
    """Peak resident memory during `run`, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    run()
    return memory_of("VmHWM")
