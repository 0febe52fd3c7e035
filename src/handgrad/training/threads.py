"""The number of threads of a run: measured before its first step, recorded, and kept.

The threads of a step wait for each other hundreds of times. If another process uses one of the cores, all of them wait for
the thread on that core, and a small model trains faster with fewer threads. Sums are split by thread, so the last bits of
a result depend on their number: a run, resumed or not, keeps the number that it began with, unless the user gives another
one or lets the run follow the machine's load.
"""

import math
import time
from collections.abc import Callable
from typing import Self

import torch

from ..errors import HandgradError, option
from ..formatting import plural
from ..plan.thread_count import candidates, choose, user_has_decided
from ..plan.timing import Peak
from .distributed import Ranks
from .job import Job

TRIAL_FLOP, TRIAL_TOKENS = 2e10, 32  # a trial step is cut to this many FLOP, but not below this many tokens
PAUSE, COST = 30.0, 20.0  # a run that follows the load pauses PAUSE seconds, or COST times what measuring took


class Threads:
    """The threads of a run: sets their number and records it in `job.threads`.

    The first of these decides: the user (`threads`), the record of a resumed run, OMP_NUM_THREADS or MKL_NUM_THREADS, and a
    measurement if the run is one process; a group shares the cores evenly. `started_with`: the number in run.json of a
    resumed run."""

    def __init__(self, job: Job, ranks: Ranks, say: Callable[[str], None], started_with: int | None = None):
        self.job, self.say = job, say
        self.most = torch.get_num_threads()
        self.next = math.inf  # time of the next measurement
        given, follow = job.options.threads, job.options.follow_load
        if follow and ranks.size > 1:
            raise HandgradError(f"{option('follow_load', True)} is for a run of one process: leave it out")
        recorded = (job.threads[-1][1] if job.threads else started_with) if ranks.size == 1 else None
        measured = ranks.size == 1 and self.most > 1 and not job.ended and (follow or not user_has_decided())
        self.how = ""
        if given is None and measured and (follow or recorded is None):
            self._measure(min(recorded or self.most, self.most), follow)
            self.how = "measured, and again as the load changes" if follow else "measured"
        else:
            self._use(given or recorded or self.most)
            self.how = f"as recorded; {option('threads')} changes it" if recorded and given is None else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.most)  # as before the run

    def describe(self) -> str:
        """The number, and how it was chosen; "" if the user has."""
        return f"threads: {self.number} of {self.most}, {self.how}" if self.how else ""

    @property
    def number(self) -> int:
        return self.job.threads[-1][1]

    def after_step(self) -> None:
        """Measure again, now and then, if the run follows the load."""
        if time.perf_counter() < self.next or self.job.ended:
            return
        before = self.number
        self._measure(before, follow=True)
        if self.number != before:
            self.say(f"step {self.job.step:,}: {plural(self.number, 'thread')} instead of {before}: faster now")

    def _measure(self, preferred: int, follow: bool) -> None:
        start = time.perf_counter()
        others = [n for n in candidates(self.most) if n != preferred]
        try:
            chosen = choose(trial_step(self.job), [preferred, *others])
        except HandgradError:
            chosen = preferred  # the step itself will fail, with its diagnosis
        now = time.perf_counter()
        self.next = now + max(PAUSE, COST * (now - start)) if follow else math.inf
        self._use(chosen)

    def _use(self, number: int) -> None:
        torch.set_num_threads(number)
        history = self.job.threads
        if not history or history[-1][1] != number:
            history.append((self.job.step, number))
            if self.job.peak is not None:
                self.job.peak = Peak(self.job.model.precision)  # to be measured again with this number


def trial_step(job: Job) -> Callable[[], None]:
    """A function that computes the gradient of the next batch, or of its beginning if it is large, and discards it. Weights,
    optimizer and random numbers stay as they are."""
    tokens, targets, lengths = job.training.batch(job.step * job.batch, job.batch)
    limit = max(TRIAL_TOKENS, int(TRIAL_FLOP * tokens.numel() / max(1, job.flop(tokens, targets, lengths))))
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
            recompute, share = job.options.recompute, job.options.share_prefixes
            job.model.loss_and_grads(
                tokens, targets, lengths, recompute=recompute, seed=0, finished=discard, share=share
            )
        finally:
            job.model.zero_grad()

    return run
