"""Interleaved timing, the rows of what was timed, and peak memory."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .attempts import Attempts
from .process import memory_of
from .row import NAN, Row


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
    contenders: Mapping[str, Callable[[], object]], rounds: int, attempts: Attempts, in_a_row: int = 1
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


def timed_rows(
    scenario: str, case: str, tokens: int, names: Iterable[str], timings: Mapping[str, Timing], reference: str,
    attempts: Attempts, errors: Mapping[str, float | None] | None = None,
) -> list[Row]:  # fmt: skip
    """A row for each contender: its times, compared with the reference's, and the error of its results; or its problem."""
    rows = []
    for name in names:
        row = Row(scenario, case, name, tokens, problem=attempts.problems.get(name, ""))
        rows.append(row)
        if name in timings:
            row.seconds, row.median = timings[name].best, timings[name].median
            row.ratio = timings[reference].best / row.seconds if reference in timings else NAN
            error = (errors or {}).get(name)
            row.gradient_error = NAN if error is None else error
    return rows


def resident() -> int:
    """Resident memory of this process, in bytes."""
    return memory_of("VmRSS")


def peak_during(run: Callable[[], object]) -> int:
    """Peak resident memory during `run`, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    run()
    return memory_of("VmHWM")
