"""The checks of every station on the current sentence, computed in a background thread.

Autograd and the identities are checked for all stations at once, then finite differences station by station: all stations
of a small model, the stations being viewed of a large one. The newest request is served first.
"""

import contextlib
import copy
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import HandgradError
from ..formatting import subscript
from ..machine import trim_heap
from ..proof.checker import Checker
from ..proof.layerwise import LayerwiseChecker, shared_copy
from ..proof.oracles import relative_error
from ..tolerances import ENTRY_FLOOR, TOLERANCE
from . import objectives
from .session import Session, TracedSentence
from .stations import Station
from .symbols import symbol
from .views import LARGE

AnyChecker = Checker | LayerwiseChecker
MAX_RESULTS = 32  # sentences whose results are cached; they are small
IDLE_BEFORE_START, IDLE_BEFORE_RESUME = 1.0, 0.25  # seconds without a request
MAX_DIFFERENCE_PARAMETERS = 20_000_000  # finite differences hold several copies
MAX_QUEUE = 64  # pending checks of small models; the page repeats requests that were dropped


class CheckResults:
    """The results for one sentence so far."""

    def __init__(self) -> None:
        self.checks: dict[str, list[dict[str, Any]]] = {}  # by station
        self.complete: set[str] = set()  # stations that need no more checks
        self.without_differences: set[str] = set()  # of these, those that were not compared with finite differences
        self.problem = ""


class Prover:
    """Returns the results so far and computes the missing ones in the background."""

    def __init__(self, session: Session):
        self.session = session
        self._known: OrderedDict[str, CheckResults] = OrderedDict()
        self._queue: list[tuple[str, str]] = []  # sentence id and station id, newest last
        self._checker: tuple[str, AnyChecker] | None = None
        self._checking = False  # in the background
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._on_worker: Callable[..., Any] = lambda f, *arguments: f(*arguments)

    def request(self, sentence: TracedSentence, station: Station | None, wait: float = 0.0) -> dict[str, Any]:
        """Return the results of one station, or of all in brief. Missing ones are queued and awaited for `wait` seconds."""
        with self._changed:
            results = self._known.setdefault(sentence.id, CheckResults())
            self._known.move_to_end(sentence.id)
            while len(self._known) > MAX_RESULTS:
                self._known.popitem(last=False)
            wanted = [station.id] if station else [s.id for s in self.session.stations]
            if self.session.size > LARGE and station is None:
                wanted = wanted[:1]  # one station is enough to get autograd's checks for all
            missing = [id for id in wanted if id not in results.complete]
            if missing and not results.problem:
                self._queue = [q for q in self._queue if q not in {(sentence.id, id) for id in missing}]
                self._queue += [(sentence.id, id) for id in reversed(missing)]
                waiting = len(missing) + (0 if self.session.size > LARGE else MAX_QUEUE)
                del self._queue[:-waiting]
                self._start()
                self._changed.notify_all()
                self._changed.wait_for(lambda: all(id in results.complete for id in missing) or results.problem, wait)
            if station is not None:
                return self.report(results, station.id)
            return {id: self.report(results, id, brief=True) for id in (s.id for s in self.session.stations)}

    def report(self, results: CheckResults, id: str, brief: bool = False) -> dict[str, Any]:
        """Return the results of one station as the page shows them. Its state is "measuring" until finite differences were
        computed, then "done"; "autograd" if they are not, and "failed" if the checks broke off."""
        checks = results.checks.get(id, [])
        passed = all(c["passed"] for c in checks) if checks else None
        state = "autograd" if id in results.without_differences else "done"
        if id not in results.complete:
            state = "failed" if results.problem else "measuring"
        if brief:
            return {"passed": passed, "state": state}
        return {"passed": passed, "state": state, "problem": results.problem, "checks": checks}

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
        return self.session.size <= LARGE or self.session.idle_for(IDLE_BEFORE_START)

    def _wait_until_idle(self) -> None:
        """Let requests go first, in the middle of a check of a large model."""
        while self.session.size > LARGE and not self.session.idle_for(IDLE_BEFORE_RESUME) and not self._stopping:
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
                lambda: {s.id: self._compare_with_autograd(checker, sentence, s) for s in self.session.stations}
            )
            with self._changed:
                results.checks = checks
                self._changed.notify_all()
        more = self._on_worker(self._compare_with_differences, checker, station) if differences else []
        with self._changed:
            results.checks[station.id] = [*results.checks[station.id], *more]
            results.complete.add(station.id)
            if not differences and (station.incoming or station.outgoing):
                results.without_differences.add(station.id)

    def _checker_for(self, sentence: TracedSentence) -> AnyChecker:
        if self._checker is None or self._checker[0] != sentence.id:
            self._checker = None  # free the old one before the new one is made
            with self.session.model_at(
                sentence.version
            ) as model:  # checking takes long; meanwhile others use the model
                by_layer = self.session.size > LARGE and not model.head.adapted
                frozen = shared_copy(model) if by_layer else copy.deepcopy(model)
            make: Any = LayerwiseChecker if by_layer else partial(Checker, in_place=True)
            made = self._on_worker(
                lambda: make(
                    frozen,
                    sentence.tokens,
                    sentence.targets,
                    sentence.trace,
                    objective=sentence.objective,
                    pause=self._wait_until_idle,
                )
            )
            self._checker = (sentence.id, made)
            if self.session.size > LARGE:
                trim_heap()  # autograd held as many gradients as the model has parameters
        return self._checker[1]

    def _compare_with_autograd(
        self, checker: AnyChecker, sentence: TracedSentence, station: Station
    ) -> list[dict[str, Any]]:
        checks = []

        def add(what: str, kind: str, error: float, limit: float) -> None:
            checks.append({"what": what, "kind": kind, "error": error, "limit": limit, "passed": bool(error <= limit)})

        if station.id == "a_0":
            text = self.session.tokenizer.decode(sentence.ids)
            add("decoding the tokens gives the sentence", "identity", float(text != sentence.text), 0.0)
            return checks
        if station.id == "loss":
            add("loss", "twin", checker.errors["loss"], checker.limit)
        else:
            for name in station.a:
                add(symbol(name), "twin", checker.errors[name], checker.limit)
        for name in dict.fromkeys([*station.incoming, *station.outgoing]):
            way = "incoming" if name in station.incoming else "outgoing"
            add(f"{symbol(name)}, {way}", "autograd", checker.errors[name], checker.limit)
        prefix = self.session.model.config.table.names["blocks"].rpartition(".")[0] + "."
        for name in _trained_names(station, checker):
            add(f"gradient of {name.removeprefix(prefix)}", "autograd", checker.errors[name], checker.limit)
        for name in station.incoming:
            limit, usual = checker.rounding_limits[name], TOLERANCE[self.session.model.dtype]
            why = "; limit: what rounding explains here" if limit > usual else ""
            add(f"{symbol(name)} as the model computed it{why}", "rounding", checker.rounding[name], limit)
        for what, error in self._identities(checker, sentence, station):
            add(what, "identity", error, checker.limit)
        return checks

    def _compare_with_differences(self, checker: AnyChecker, station: Station) -> list[dict[str, Any]]:
        checks = []
        signals = list(dict.fromkeys([*station.outgoing, *station.incoming]))
        for name in signals[: 1 if self.session.size > LARGE else None]:
            error = checker.difference(name)
            checks.append((f"{symbol(name)} along a random direction", error))
        names = [name for name in _trained_names(station, checker) if checker.can_differentiate(name)]
        if names and sum(checker.trained[name] for name in names) <= MAX_DIFFERENCE_PARAMETERS:
            checks.append(("all gradients here along a random direction", checker.difference_of(names)))
        limit = checker.difference_limit
        return [
            {"what": what, "kind": "differences", "error": error, "limit": limit, "passed": bool(error <= limit)}
            for what, error in checks
        ]

    def _identities(self, checker: AnyChecker, sentence: TracedSentence, station: Station) -> list[tuple[str, float]]:
        """Return the identities that hold for any numbers, with their errors in float64."""
        ours, config = checker.ours, self.session.model.config
        here = "" if station.block is None else f"blocks.{station.block}."
        centred = "mu_10" in ours  # the norms subtract the mean, so shifting a row of the stream changes nothing
        found = []
        after = objectives.rows_after(sentence)
        if station.incoming and config.causal and after < len(sentence.ids):
            last = max(_largest(ours[name][after:]) for name in station.incoming)
            found.append((objectives.about_rows_after(sentence), last))
        if station.stream and centred:
            (name,) = station.incoming
            found.append((f"each row of {symbol(name)} sums to 0", _largest_row_sum(ours[name])))
        if station.index in (2, 6, 11):
            found.append(self._norm_identity(ours, station, here, centred))
        if station.id in ("a_12", "loss"):
            found.append(("each row of Δ₁₂ sums to 0", _largest_row_sum(ours["delta_12"])))
        if station.index == 3:
            found += self._attention_identities(checker, station, here)
        if (
            station.id in ("a_1", "a_12")
            and config.tied
            and isinstance(checker, Checker)
            and self._embedding in checker.grads
        ):
            found.append(("∂w_tok is the sum of the gradients of both uses (R9)", self._tied_gradient_error(checker)))
        return found

    def _norm_identity(
        self, ours: Mapping[str, Tensor], station: Station, here: str, centred: bool
    ) -> tuple[str, float]:
        """A norm that subtracts the mean ignores shifts of a row. One that does not ignores its scale, but for ε: the error
        signal it sends back has the product ε/rms³ (G ⊖ ā) with ā."""
        (name,) = station.outgoing
        if centred:
            return f"each row of {symbol(name)} sums to 0", _largest_row_sum(ours[name])
        i, o = station.index - 1, station.index
        beside = {2: "delta_5", 6: "delta_10"}.get(o)  # what reaches the norm's input by the skip connection
        signal = ours[name] if beside is None else ours[name] - ours[here + beside]
        what = symbol(name) if beside is None else f"{symbol(name)} − {symbol(beside)}"
        a_bar, rms = ours[f"{here}a_bar_{i}"], ours[f"{here}rms_{i}"]
        through = (ours[f"{here}delta_{o}"] * ours[f"{here}a_{o}"]).sum(1)  # G ⊖ ā
        left = (signal * a_bar).sum(1) - self.session.model.config.eps / rms[:, 0] ** 3 * through
        size = ours[name].norm(dim=1) * a_bar.norm(dim=1)
        error = _largest(left) / max(_largest(size), 1e-300)
        return f"{what} has no part along ā{subscript(i)}, up to its share of ε", error

    def _attention_identities(self, checker: AnyChecker, station: Station, here: str) -> list[tuple[str, float]]:
        assert station.block is not None
        ours, attn = checker.ours, self.session.model.blocks[station.block].attn
        causal, rho = ours[f"{here}delta_causal"], ours[f"{here}rho"]
        # a row that sees only one token is 0 up to the rounding of what ρ was multiplied with
        size = _largest(ours[f"{here}delta_3"]) * _largest(ours[f"{here}v"])
        found = [
            ("each row of Δ_causal sums to 0 (26)", _largest_row_sum(causal, ENTRY_FLOOR * size)),
            ("each row of ρ sums to 1 (14)", _largest(rho.sum(2) - 1)),
        ]
        if attn.causal:
            found.append(("ρ is 0 above the diagonal", _largest(rho.triu(1))))
        if attn.window is not None:
            found.append((f"ρ is 0 more than {attn.window - 1} tokens back", _largest(rho.tril(-attn.window))))
        for keys in station.parameters:
            if keys.symbol == "b_k" and keys.name in checker.trained and not attn.rotated and not attn.normed:
                found.append(("∂b_k is 0 (29)", _largest(keys.view(checker.gradient(keys.name)))))
        return found

    @property
    def _embedding(self) -> str:
        """The name of the token table in the model; "" if it is packed."""
        return next((p.name for p in self.session.by_id["a_1"].parameters if p.symbol == "w_tok"), "")

    def _tied_gradient_error(self, checker: Checker) -> float:
        """Relative error of ∂w_tok = ohe(a_0)ᵗ Δ_1 + Δ_12ᵗ a_11. A trained table implies a head without an adapter."""
        ours, grad = checker.ours, checker.grads[self._embedding]
        picked = torch.zeros_like(grad)
        picked.index_add_(0, ours["a_0"], ours["blocks.0.delta_1"])
        picked.addmm_(ours["delta_12"].t(), ours["a_11"])
        return relative_error(grad, picked)


def _lower_priority() -> None:
    """Lower the priority of the checking thread, so that requests are answered first."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _trained_names(station: Station, checker: AnyChecker) -> list[str]:
    return [name for name in dict.fromkeys(p.name for p in station.parameters) if name in checker.trained]


def _largest_row_sum(x: Tensor, least: float = 0.0) -> float:
    """Return the largest |row sum|, relative to the largest sum of |entries| of a row or to `least`."""
    return (x.sum(-1).abs().max() / x.abs().sum(-1).max().clamp(min=max(least, 1e-300))).item()


def _largest(x: Tensor) -> float:
    return x.abs().max().item()
