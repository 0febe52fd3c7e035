"""The proof behind every number: the judge's verdict for each station on this very sentence, made in the background.

First autograd and the identities for all stations at once, then finite differences station by station: for a small model
all of them, for a large one those somebody looks at. The newest question is answered first.
"""

import contextlib
import copy
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..errors import HandgradError
from ..machine import trim_heap
from ..proof.checker import Checker
from ..proof.oracles import relative_error
from ..tolerances import ENTRY_FLOOR
from .session import Look, Session
from .stations import Station
from .views import LARGE

KEPT = 32  # verdicts on whole sentences; small: numbers only
QUIET, BREATH = 1.0, 0.25  # seconds without a reader before a judgement begins, and before it goes on
MOST_AT_ONCE = 20_000_000  # parameters moved together; finite differences hold them several times over
WAITING = 64  # older questions that wait, of small models; whoever still wants to know asks again


class Verdict:
    """All that is known about one look so far."""

    def __init__(self) -> None:
        self.checks: dict[str, list[dict[str, Any]]] = {}  # by station
        self.complete: set[str] = set()  # stations whose finite differences are taken too
        self.problem = ""


class Prover:
    """Answers at once with what is known, and finds out the rest."""

    def __init__(self, session: Session):
        self.session = session
        self._known: OrderedDict[str, Verdict] = OrderedDict()
        self._questions: list[tuple[str, str]] = []  # the newest last
        self._judge: tuple[str, Checker] | None = None
        self._news = threading.Condition()
        self._ends = False
        self._thread: threading.Thread | None = None
        self._run: Callable[..., Any] = lambda f, *arguments: f(*arguments)

    def ask(self, look: Look, station: Station | None, patience: float = 0.0) -> dict[str, Any]:
        """The verdict on one station, or on all; if it is not there yet, wait a little, and say that it is being made."""
        with self._news:
            verdict = self._known.setdefault(look.id, Verdict())
            self._known.move_to_end(look.id)
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
            wanted = [station.id] if station else [s.id for s in self.session.stations]
            if self.session.size > LARGE and station is None:
                wanted = wanted[:1]  # of a large model the first is enough to have autograd's verdict on all
            missing = [id for id in wanted if id not in verdict.complete]
            if missing and not verdict.problem:
                self._questions = [q for q in self._questions if q not in {(look.id, id) for id in missing}]
                self._questions += [(look.id, id) for id in reversed(missing)]
                waiting = len(missing) + (0 if self.session.size > LARGE else WAITING)
                del self._questions[:-waiting]
                self._start()
                self._news.notify_all()
                self._news.wait_for(lambda: all(id in verdict.complete for id in missing) or verdict.problem, patience)
            if station is not None:
                return self.verdict(verdict, station.id)
            return {id: self.verdict(verdict, id, brief=True) for id in (s.id for s in self.session.stations)}

    def verdict(self, verdict: Verdict, id: str, brief: bool = False) -> dict[str, Any]:
        checks = verdict.checks.get(id, [])
        passed = all(c["passed"] for c in checks) if checks else None
        state = "measuring" if id not in verdict.complete and not verdict.problem else "done"
        if brief:
            return {"passed": passed, "state": state}
        return {"passed": passed, "state": state, "problem": verdict.problem, "checks": checks}

    def stop(self) -> None:
        with self._news:
            self._ends = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ── in the background ───────────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="prover", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        with ThreadPoolExecutor(1, "judge", _step_back) as judge:
            self._run = lambda f, *arguments: judge.submit(f, *arguments).result()
            self._answer_questions()

    def _answer_questions(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: bool(self._questions) or self._ends)
                if self._ends:
                    return
                id, station = self._questions.pop()
                verdict = self._known.get(id)
            if verdict is None or station in verdict.complete or verdict.problem:
                continue
            if not self._quiet():
                with self._news:
                    self._questions.append((id, station))
                    self._news.wait(0.2)
                continue
            try:
                self.answer_now(self.session.find(id), verdict, self.session.by_id[station])
            except Exception as reason:  # whatever it is, the page has to say it instead of waiting for ever
                verdict.problem = f"{reason}".splitlines()[0] if isinstance(reason, HandgradError) else repr(reason)
            with self._news:
                self._news.notify_all()

    def _quiet(self) -> bool:
        """A large model is judged when nobody is waiting for a page."""
        return self.session.size <= LARGE or self.session.quiet(QUIET)

    def _pause(self) -> None:
        """Once begun, it is done with between two readings."""
        while self.session.size > LARGE and not self.session.quiet(BREATH) and not self._ends:
            time.sleep(0.02)
        if self._ends:
            raise HandgradError("the page was closed before this was proven")

    def answer_now(self, look: Look, verdict: Verdict, station: Station, differences: bool = True) -> None:
        judge = self._judge_for(look)
        if not verdict.checks:
            found = {s.id: self._against_autograd(judge, look, s) for s in self.session.stations}
            with self._news:
                verdict.checks = found
                self._news.notify_all()
        more = self._run(self._by_differences, judge, station) if differences else []
        with self._news:
            verdict.checks[station.id] = [*verdict.checks[station.id], *more]
            verdict.complete.add(station.id)

    def _judge_for(self, look: Look) -> Checker:
        if self._judge is None or self._judge[0] != look.id:
            self._judge = None  # let go of the old one before the new one is made
            with self.session.at(look.version) as model:
                still = copy.deepcopy(model)  # the judge takes its time; meanwhile others may use the model
            made = self._run(
                lambda: Checker(still, look.tokens, look.targets, look.trace, in_place=True, pause=self._pause)
            )
            self._judge = (look.id, made)
            if self.session.size > LARGE:
                trim_heap()  # autograd's gradients are as large as the model
        return self._judge[1]

    def _against_autograd(self, judge: Checker, look: Look, station: Station) -> list[dict[str, Any]]:
        checks = []

        def add(what: str, kind: str, error: float, limit: float) -> None:
            checks.append({"what": what, "kind": kind, "error": error, "limit": limit, "passed": bool(error <= limit)})

        if station.id == "a_0":
            text = self.session.tokenizer.decode(look.ids)
            add("the tokens spell the sentence again", "identity", float(text != look.text), 0.0)
            return checks
        if station.id == "loss":
            add("loss", "twin", judge.errors["loss"], judge.limit)
        elif station.a in judge.errors:
            add(f"{_short(station.a)}", "twin", judge.errors[station.a], judge.limit)
        for name in dict.fromkeys([station.arrives, *station.leaves]):
            if name is not None and name in judge.errors:
                way = "arrives" if name == station.arrives else "leaves"
                add(f"{_short(name)}, which {way}", "autograd", judge.errors[name], judge.limit)
        for name in _trained(station, judge):
            add(f"gradient of {name.removeprefix('transformer.')}", "autograd", judge.errors[name], judge.limit)
        if station.arrives in judge.rounding:
            add(f"{_short(station.arrives)} as the model computed it", "rounding",
                judge.rounding[station.arrives], judge.rounding_limit)  # fmt: skip
        for what, error in self._identities(judge, station):
            add(what, "identity", error, judge.limit)
        return checks

    def _by_differences(self, judge: Checker, station: Station) -> list[dict[str, Any]]:
        checks = []
        signals = [name for name in dict.fromkeys([*station.leaves, station.arrives]) if name and name in judge.errors]
        for name in signals[: 1 if self.session.size > LARGE else None]:
            error = judge.difference(name)
            checks.append((f"{_short(name)} along a random direction", error))
        names = _trained(station, judge)
        if names and sum(judge.grads[name].numel() for name in names) <= MOST_AT_ONCE:
            checks.append(("the gradients here along a random direction", judge.difference_of(names)))
        limit = judge.difference_limit
        return [
            {"what": what, "kind": "differences", "error": error, "limit": limit, "passed": bool(error <= limit)}
            for what, error in checks
        ]

    def _identities(self, judge: Checker, station: Station) -> list[tuple[str, float]]:
        """What must hold whatever the numbers are, in float64."""
        ours, config = judge.ours, self.session.model.config
        found = []
        if station.arrives is not None and config.causal:
            found.append(("the row of the last token, which has no target, is 0", _largest(ours[station.arrives][-1])))
        if station.stream and station.arrives is not None:
            found.append((f"rows of {_short(station.arrives)} sum to 0", _row_sums(ours[station.arrives])))
        if station.index in (2, 6, 11):
            found.append((f"rows of {_short(station.leaves[0])} sum to 0", _row_sums(ours[station.leaves[0]])))
        if station.id in ("a_12", "loss"):
            found.append(("rows of Δ₁₂ sum to 0", _row_sums(ours["delta_12"])))
        if station.index == 3:
            here = f"blocks.{station.block}."
            causal, rho = ours[f"{here}delta_causal"], ours[f"{here}rho"]
            # where only one token is seen Δ_causal is nothing but rounding, of what ρ had multiplied
            size = _largest(ours[f"{here}delta_3"]) * _largest(ours[f"{here}v"])
            found.append(("rows of Δ_causal sum to 0 (26)", _row_sums(causal, ENTRY_FLOOR * size)))
            found.append(("rows of ρ sum to 1 (14)", _largest(rho.sum(2) - 1)))
            if config.causal:
                found.append(("ρ is 0 above the diagonal", _largest(rho.triu(1))))
            name = next((n for p in station.parameters if p.symbol == "b_k" for n in p.names), "")
            if name in judge.grads:
                keys = next(p for p in station.parameters if p.symbol == "b_k")
                assert keys.columns is not None
                found.append(("∂b_k is 0 (29)", _largest(judge.grads[name][slice(*keys.columns)])))
        if station.id in ("a_1", "a_12") and config.tied and "transformer.wte.weight" in judge.grads:
            found.append(("∂w_tok is the sum of both its uses (R9)", self._tied(judge)))
        return found

    def _tied(self, judge: Checker) -> float:
        """∂w_tok = ohe(a_0)ᵗ Δ_1 + Δ_12ᵗ a_11. Where it trains, there is no adapter beside the head."""
        ours = judge.ours
        picked = torch.zeros_like(judge.grads["transformer.wte.weight"])
        picked.index_add_(0, ours["a_0"], ours["blocks.0.delta_1"])
        picked.addmm_(ours["delta_12"].t(), ours["a_11"])
        return relative_error(judge.grads["transformer.wte.weight"], picked)


def _step_back() -> None:
    """For the thread that judges: whoever is waiting for a page comes first."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _trained(station: Station, judge: Checker) -> list[str]:
    return [name for name in dict.fromkeys(n for p in station.parameters for n in p.names) if name in judge.grads]


def _row_sums(x: Tensor, least: float = 0.0) -> float:
    """The largest sum of a row, measured against the size of the largest row, or against `least`."""
    return (x.sum(-1).abs().max() / x.abs().sum(-1).max().clamp(min=max(least, 1e-300))).item()


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def _short(name: str | None) -> str:
    """blocks.0.delta_5 → Δ₅"""
    last = (name or "").rpartition(".")[2]
    kind, _, index = last.partition("_")
    low = "".join("₀₁₂₃₄₅₆₇₈₉"[int(c)] for c in index) if index.isdigit() else f"_{index}"
    return ("Δ" if kind == "delta" else kind) + low
