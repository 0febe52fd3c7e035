"""Taking turns, peak memory, and whether the machine is quiet enough for either to mean anything."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

BUSY = 0.3  # load per core above which a measurement is not to be believed


@dataclass(frozen=True)
class Machine:
    """As it was when the measurement began; later its load is our own."""

    load: float  # processes that were running or waiting, mean of the last minute
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
        """Empty on a quiet machine."""
        if not self.busy:
            return ""
        return (
            f"THE MACHINE IS BUSY: load {self.load:.2f} on {self.cores} cores, above {BUSY} per core. A ratio from a busy"
            " machine flatters us and is not published: wait until it is quiet and measure again."
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
    watch: Callable[[Iterable[int]], Iterable[int]] = iter,
    in_a_row: int = 1,
) -> dict[str, Timing]:
    """One warm-up each, then in each round every contender once; short ones several times in a row, each time counted."""
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
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def peak_during(run: Callable[[], object]) -> int:
    """Bytes at the highest point of `run`."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    run()
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
