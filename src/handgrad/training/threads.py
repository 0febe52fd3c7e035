"""The number of threads of a run: measured before the first step, watched during training, recorded.

The threads of a step wait for each other hundreds of times. If another process uses one of the cores, all of them wait for
the thread on that core, and a small model trains faster with fewer threads. Sums are split by thread, so the last bits of
a result depend on their number: a run changes it only for a clear gain, says so, and records it in `Job.threads`.
"""

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Self

import torch

from ..errors import HandgradError
from ..formatting import plural
from ..plan.timing import Peak
from .distributed import Ranks
from .job import Job

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # a user who sets one has decided
GAIN = 1.25  # change to a number of threads that is this many times as fast
FAR = 3.0  # far slower: choose again; a resumed run keeps its number unless another one is this many times as fast
ROUNDS, SECONDS = 5, 0.5  # of a measurement, at most; one round is always completed
STEPS = 5  # number of steps whose median must be far slower
TRIAL_FLOP, TRIAL_TOKENS = 2e10, 32  # a trial step is cut to this many FLOP, but not below this many tokens
PAUSE = 20  # training between two measurements lasts at least this many times as long as a measurement
PROBE = 30.0  # seconds until more threads are tried; doubled after each try without a change
LONGEST_PROBE = 1800.0

Use = Callable[[int], None]
Clock = Callable[[], float]


def candidates(most: int) -> list[int]:
    """Numbers of threads to try: `most`, and halves of it down to 1."""
    return [most] + [most >> i for i in range(1, most.bit_length())]


def choose(
    run_step: Callable[[], object],
    candidates: Sequence[int],
    gain: float = GAIN,
    use: Use = torch.set_num_threads,
    clock: Clock = time.perf_counter,
) -> int:
    """Time `run_step` with each number of threads; return the fastest and set it. The first candidate is preferred: another
    one must be `gain` times as fast."""
    chosen = candidates[0]
    times: dict[int, list[float]] = {n: [] for n in candidates}
    try:
        use(min(candidates))
        run_step()  # warm-up, with the number of threads that other processes slow down least
        end = clock() + SECONDS
        for i in range(ROUNDS):
            fastest = min((min(t) for t in times.values() if t), default=math.inf)
            for n, took in times.items():
                if i and (clock() >= end or min(took) > FAR * fastest):
                    continue  # out of time, or no contender
                use(n)
                start = clock()
                run_step()
                took.append(clock() - start)
        seconds = {n: median(took) for n, took in times.items()}
        best = min(seconds, key=lambda n: seconds[n])
        if seconds[best] * gain <= seconds[chosen]:
            chosen = best
    finally:
        use(chosen)
    return chosen


class Watcher:
    """Says when to choose again: when steps have become far slower, and now and then when more threads may have become
    faster."""

    def __init__(self, clock: Clock = time.perf_counter):
        self.clock = clock
        self.wait = PROBE
        self.chosen(cost=0.0, changed=True)

    def chosen(self, cost: float, changed: bool) -> None:
        """Start anew after a choice that took `cost` seconds."""
        self.wait = PROBE if changed else min(2 * self.wait, LONGEST_PROBE)
        self.since, self.cost = self.clock(), cost
        self.recent: deque[float] = deque(maxlen=STEPS)  # seconds per unit of work of the last steps
        self.normal = math.inf  # lowest median since the last choice

    def slowdown(self, seconds: float, work: float) -> float:
        """Add a step; how many times as long as before the last steps took, per unit of work."""
        self.recent.append(seconds / max(work, 1.0))
        if len(self.recent) < STEPS:
            return 1.0
        now = median(self.recent)
        self.normal = min(self.normal, now)
        return now / self.normal

    def due(self, slowdown: float, more: bool) -> bool:
        """Whether to choose again; `more`: there are more threads to try."""
        passed = self.clock() - self.since
        return passed >= PAUSE * self.cost and (slowdown > FAR or (more and passed >= max(self.wait, 50 * self.cost)))


class Threads:
    """The threads of a run: sets their number, keeps it in line with the machine's load, and records it in `job.threads`.

    Only a single process that may use several threads chooses. `--threads`, OMP_NUM_THREADS and MKL_NUM_THREADS decide by
    hand; a group of processes shares the cores evenly. `started_with`: the number in run.json of a resumed run."""

    def __init__(self, job: Job, ranks: Ranks, say: Callable[[str], None], started_with: int | None = None):
        self.job, self.say = job, say
        self.most = torch.get_num_threads()
        given = job.options.threads
        by_hand = given is not None or any(map(os.environ.get, VARIABLES))
        fixed = by_hand or ranks.size > 1 or self.most == 1 or job.ended
        self.watcher = None if fixed else Watcher()
        self.recorded = job.threads[-1][1] if job.threads else started_with
        if fixed:
            self._use(given or self.most)
        elif self.recorded is not None:
            self._choose(max(1, min(self.recorded, self.most)), FAR)
        else:
            self._choose(self.most, GAIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.most)  # as before the run

    def describe(self) -> str:
        """The number, and how it was chosen if it was measured."""
        how = "measured" if self.recorded is None else "as recorded"
        if self.recorded not in (None, self.number):
            how = f"measured; the run had {self.recorded} before"
        return f"threads: {self.number} of {self.most}, {how}"

    @property
    def number(self) -> int:
        return self.job.threads[-1][1]

    def after_step(self, seconds: float, flop: int) -> None:
        """Choose again if the steps have become far slower, or if more threads should be tried."""
        if self.watcher is None or self.job.ended:
            return
        slowdown = self.watcher.slowdown(seconds, flop)
        if not self.watcher.due(slowdown, self.number < self.most):
            return
        before = self.number
        self._choose(before, GAIN)
        if self.number != before:
            why = f"steps had become {slowdown:.1f} times as slow" if slowdown > FAR else "that is faster now"
            self.say(f"step {self.job.step:,}: {plural(self.number, 'thread')} instead of {before}, because {why}")

    def _choose(self, preferred: int, gain: float) -> None:
        assert self.watcher is not None
        start = time.perf_counter()
        others = [n for n in candidates(self.most) if n != preferred]
        try:
            chosen = choose(trial_step(self.job), [preferred, *others], gain)
        except HandgradError:
            chosen = preferred  # the step itself will fail, with its diagnosis
        self.watcher.chosen(time.perf_counter() - start, chosen != preferred)
        self._use(chosen)

    def _use(self, number: int) -> None:
        torch.set_num_threads(number)
        history = self.job.threads
        if not history or history[-1][1] != number:
            history.append((self.job.step, number))
            if self.job.peak is not None:
                self.job.peak = Peak(self.job.options.dtype)  # to be measured again with this number


def trial_step(job: Job) -> Callable[[], None]:
    """A function that computes the gradient of the next batch, or of its beginning if it is large, and discards it. Weights,
    optimizer and random numbers stay as they are."""
    tokens, targets, lengths = job.training.batch(job.step * job.batch, job.batch)
    limit = max(TRIAL_TOKENS, int(TRIAL_FLOP * tokens.numel() / max(1, job.flop(targets, lengths))))
    if limit < tokens.numel():
        each = lengths if lengths is not None else len(tokens) * [tokens.shape[1]]
        starts = [sum(each[:i]) for i in range(len(each))]
        lengths = [min(n, limit - start) for n, start in zip(each, starts, strict=True) if start < limit]
        tokens = tokens.reshape(-1)[:limit]
        targets = tokens  # the first tokens may have no targets

    def discard(layer: list[torch.nn.Parameter]) -> None:
        for p in layer:
            p.grad = None

    def run() -> None:
        job.model.zero_grad()  # of the last step
        try:
            # A separate seed: dropout must not draw from torch's random numbers.
            recompute = job.options.recompute
            job.model.loss_and_grads(tokens, targets, lengths, recompute=recompute, seed=0, finished=discard)
        finally:
            job.model.zero_grad()

    return run


@contextlib.contextmanager
def using(number: int | None) -> Iterator[None]:
    """Use this number of threads inside the block; None: leave it."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
