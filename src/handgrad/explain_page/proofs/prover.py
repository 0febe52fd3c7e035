"""The checks of every station on the current sentence, computed in a background thread.

Autograd and the identities are checked for all stations at once, then finite differences station by station: all stations
of a small model, the stations being viewed of a large one. The newest request is served first.
"""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...errors import HandgradError
from ...machine import trim_heap
from ...proof.checker import Checker
from ...proof.wide_layers import float64_copy, shared_copy
from ..json_types.course import Check, Proof, ProofSummary
from ..session.session import Session, TracedSentence
from ..stations.table import Station
from .checks import compare_with_differences, compare_with_reference

MAX_RESULTS = 32  # sentences whose results are cached; they are small
IDLE_BEFORE_START, IDLE_BEFORE_RESUME = 1.0, 0.25  # seconds without a request
MAX_QUEUE = 64  # pending checks of small models; the page repeats requests that were dropped


class CheckResults:
    """The results for one sentence so far."""

    def __init__(self) -> None:
        self.checks: dict[str, list[Check]] = {}  # by station
        self.complete: set[str] = set()  # stations that need no more checks
        self.without_differences: set[str] = set()  # of these, those that were not compared with finite differences
        self.problem = ""


class Prover:
    """Returns the results so far and computes the missing ones in the background."""

    def __init__(self, session: Session):
        self.session = session
        self._known: OrderedDict[str, CheckResults] = OrderedDict()
        self._queue: list[tuple[str, str]] = []  # sentence id and station id, newest last
        self._checker: tuple[str, Checker] | None = None
        self._checking = False  # in the background
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._on_worker: Callable[..., Any] = lambda f, *arguments: f(*arguments)

    def request(self, sentence: TracedSentence, station: Station, wait: float = 0.0) -> Proof:
        """Return the results of one station. Missing ones are queued and awaited for `wait` seconds."""
        with self._changed:
            return report(self._results(sentence, [station.id], wait), station.id)

    def request_all(self, sentence: TracedSentence, wait: float = 0.0) -> dict[str, ProofSummary]:
        """Return the results of all stations in brief. Those of a large model get autograd's checks only."""
        ids = [station.id for station in self.session.stations]
        with self._changed:
            results = self._results(sentence, ids[:1] if self.session.large else ids, wait)
            return {id: summary(results, id) for id in ids}

    def _results(self, sentence: TracedSentence, wanted: list[str], wait: float) -> CheckResults:
        """The results of a sentence so far. Missing ones of these stations are queued first."""
        results = self._known.setdefault(sentence.id, CheckResults())
        self._known.move_to_end(sentence.id)
        while len(self._known) > MAX_RESULTS:
            self._known.popitem(last=False)
        missing = [id for id in wanted if id not in results.complete]
        if missing and not results.problem:
            self._queue = [q for q in self._queue if q not in {(sentence.id, id) for id in missing}]
            self._queue += [(sentence.id, id) for id in reversed(missing)]
            waiting = len(missing) + (0 if self.session.large else MAX_QUEUE)
            del self._queue[:-waiting]
            self._start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(id in results.complete for id in missing) or results.problem, wait)
        return results

    def release(self) -> None:
        """Free the checker of the last sentence, which holds its version of the weights, unless it is at work."""
        with self._changed:
            if not self._checking:
                self._checker = None

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ── in the background ───────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="prover", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        with ThreadPoolExecutor(1, "checker", _lower_priority) as worker:
            self._on_worker = lambda f, *arguments: worker.submit(f, *arguments).result()
            self._run_queue()

    def _run_queue(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._stopping)
                if self._stopping:
                    return
                id, station = self._queue.pop()
                results = self._known.get(id)
            if results is None or station in results.complete or results.problem:
                continue
            if not self._may_start():
                with self._changed:
                    self._queue.append((id, station))
                    self._changed.wait(0.2)
                continue
            with self._changed:
                self._checking = True
            try:
                self.check_now(self.session.find(id), results, self.session.by_id[station])
            except Exception as reason:  # the page must report it instead of waiting forever
                results.problem = f"{reason}".splitlines()[0] if isinstance(reason, HandgradError) else repr(reason)
            with self._changed:
                self._checking = False
                self._changed.notify_all()

    def _may_start(self) -> bool:
        """Return whether to start a check. Checks of a large model wait until the page is idle."""
        return not self.session.large or self.session.idle_for(IDLE_BEFORE_START)

    def _wait_until_idle(self) -> None:
        """Let requests go first, in the middle of a check of a large model."""
        while self.session.large and not self.session.idle_for(IDLE_BEFORE_RESUME) and not self._stopping:
            time.sleep(0.02)
        if self._stopping:
            raise HandgradError("the server stopped before the checks were complete")

    def check_now(
        self, sentence: TracedSentence, results: CheckResults, station: Station, differences: bool = True
    ) -> None:
        """Add the results of one station; the first call adds autograd's for all stations."""
        checker = self._checker_for(sentence)
        if not results.checks:
            checks = self._on_worker(
                lambda: {
                    s.id: compare_with_reference(self.session, checker, sentence, s) for s in self.session.stations
                }
            )
            with self._changed:
                results.checks = checks
                self._changed.notify_all()
        more = self._on_worker(compare_with_differences, self.session, checker, station) if differences else []
        with self._changed:
            results.checks[station.id] = [*results.checks[station.id], *more]
            results.complete.add(station.id)
            if not differences and (station.incoming or station.outgoing):
                results.without_differences.add(station.id)

    def _checker_for(self, sentence: TracedSentence) -> Checker:
        if self._checker is None or self._checker[0] != sentence.id:
            self._checker = None  # free the old one before the new one is made
            with self.session.model_at(
                sentence.version
            ) as model:  # checking takes long; meanwhile others use the model
                frozen = (shared_copy if self.session.large else float64_copy)(model)
                dtype = model.dtype
            made = self._on_worker(
                lambda: Checker(
                    frozen,
                    sentence.tokens,
                    sentence.targets,
                    sentence.trace,
                    objective=sentence.objective,
                    dtype=dtype,
                    pause=self._wait_until_idle,
                )
            )
            self._checker = (sentence.id, made)
            if self.session.large:
                trim_heap()  # autograd held as many gradients as the model has parameters
        return self._checker[1]


def summary(results: CheckResults, id: str) -> ProofSummary:
    """Whether the checks of a station passed. Its state is "measuring" until finite differences were computed, then "done";
    "autograd" if they are not, and "failed" if the checks broke off."""
    checks = results.checks.get(id, [])
    passed = all(c["passed"] for c in checks) if checks else None
    if id not in results.complete:
        return {"passed": passed, "state": "failed" if results.problem else "measuring"}
    return {"passed": passed, "state": "autograd" if id in results.without_differences else "done"}


def report(results: CheckResults, id: str) -> Proof:
    """The results of one station as the page shows them."""
    return {**summary(results, id), "problem": results.problem, "checks": results.checks.get(id, [])}


def _lower_priority() -> None:
    """Lower the priority of the checking thread, so that requests are answered first."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
