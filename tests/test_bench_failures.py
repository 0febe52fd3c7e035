"""handgrad bench when contenders fail: raise, are wrong, are killed or are not installed. The rest goes on."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import cases, compete, scenarios, supervise
from bench.attempts import Attempts, MissingError, problem
from bench.cases import COMPILED, EAGER, PEFT
from bench.peers import Eager, Hand
from bench.row import AUTOCAST, Row, is_rounded
from bench.scenarios import Part
from bench.sizes import SIZES, TINY

from handgrad.model import precision
from handgrad.ops import attention
from test_bench import bench

TRAIN = ("train", "--case", "2x32", "--case", "nano")


@pytest.fixture(scope="module", autouse=True)
def _import_before_forking() -> None:
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])


def kill(*_: object) -> Any:
    os.kill(os.getpid(), 9)


def out_of_memory(*_: object) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes\nTraceback")


def doubled(self: Hand) -> float:
    return 2 * right(self)


right = Hand.gradients


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("owner", "call", "contender", "problem", "status"),
    [
        (Eager, out_of_memory, EAGER, "failed: RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", 0),
        (Eager, kill, EAGER, "failed: ended by signal 9, perhaps for lack of memory", 0),
        (Hand, kill, "handgrad", "failed: ended by signal 9, perhaps for lack of memory", 1),
        (Hand, doubled, "handgrad", "wrong: its loss is ", 1),
    ],
)
def test_a_failing_contender_is_reported_and_the_others_are_timed(
    owner: type, call: Callable[..., Any], contender: str, problem: str, status: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(owner, "gradients", call)
    monkeypatch.setattr(compete, "_predict", lambda *_: None)
    found, shown = bench(capsys, monkeypatch, *TRAIN, status=status)
    bad = [row for row in found["rows"] if row["contender"] == contender]
    assert len(bad) == len({row["case"] for row in found["rows"]}) == 2
    for row in bad:
        assert row["problem"].startswith(problem) and row["seconds"] is row["ratio"] is row["mfu"] is None, row
    for row in found["rows"]:
        if row not in bad:
            assert row["problem"] == "" and row["seconds"] > 0, row
            assert (row["ratio"] is None) == (contender == EAGER)
    assert ("2 of 3 measurements of handgrad failed" in shown) == bool(status)
    assert f"train, nano recipe, 2×16, {contender}: {problem}" in shown


@pytest.mark.filterwarnings("ignore")
def test_wrong_gradients_are_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    correct = attention.backward
    monkeypatch.setattr(attention, "backward", lambda delta, *rest: correct(1.001 * delta, *rest))
    found, shown = bench(capsys, monkeypatch, "attention", status=1)
    for row in found["rows"]:
        wrong = row["contender"] == "handgrad" and row["case"].startswith("backward")
        assert row["problem"].startswith("wrong: ∂q: the results differ by 1.0e-03" if wrong else "")
        assert (row["seconds"] is None) == wrong
    assert "2 of 4 measurements of handgrad failed" in shown


@pytest.mark.filterwarnings("ignore")
def test_missing_peers_are_notes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(compete, "_predict", lambda *_: None)
    monkeypatch.setattr(cases, "can_compile", lambda: False)
    monkeypatch.setitem(SIZES, "tiny", replace(TINY, compile_recipe=True, peaks=()))
    found, shown = bench(capsys, monkeypatch, "sft", "train", "--case", "uneven", "--case", "nano")
    missing = {row["contender"]: row["problem"] for row in found["rows"] if row["problem"]}
    assert set(missing) - {PEFT + AUTOCAST} == {PEFT, COMPILED} and all(
        text.startswith("missing: ") for text in missing.values()
    )
    assert "no C++ compiler" in missing[COMPILED] and "peft" in missing[PEFT]
    assert f"note: train, nano recipe, 2×16, {COMPILED}: missing: " in shown
    assert all(row["seconds"] > 0 for row in found["rows"] if not row["problem"])


@pytest.mark.filterwarnings("ignore")
def test_without_bfloat16_products_one_line_says_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (precision, cases, scenarios):
        monkeypatch.setattr(module, "why_not_mixed", lambda: "no AVX512_BF16")
    found, shown = bench(capsys, monkeypatch, "train", "products", "--case", "1x128", "--case", "c_fc")
    assert not any(is_rounded(row["contender"]) for row in found["rows"]) and len(found["rows"]) > 8
    assert (
        shown.count("no contenders in mixed precision or under autocast") == 1 and "bfloat16: no AVX512_BF16" in shown
    )


@pytest.mark.skipif(precision.why_not_mixed() is not None, reason="this machine does not multiply bfloat16")
def test_a_wrong_formula_in_mixed_precision_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss is right and its gradient wrong by a tenth: more than rounding explains."""

    def wrong(self: Hand) -> float:
        loss = right(self)
        for p in self.model.parameters():
            p.grad.mul_(1.1 if self.model.precision == "mixed" else 1.0)
        return loss

    monkeypatch.setattr(Hand, "gradients", wrong)
    monkeypatch.setattr(compete, "_predict", lambda *_: None)
    case = next(case for case in cases.train(TINY) if "handgrad, mixed" in case.make)
    rows = {row.contender: row for row in compete.compete("train", case, TINY, Attempts())}
    assert rows["handgrad, mixed"].problem.startswith("wrong: relative error 1.0e-01 of all gradients, cosine 1.0000")
    assert [name for name, row in rows.items() if row.problem] == ["handgrad, mixed"]


def test_memory_that_cannot_be_measured_leaves_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compete, "_peak_in_own_process", lambda *_: int("x"))
    monkeypatch.setattr(compete, "_predict", lambda *_: None)
    case = cases.memory(TINY)[0]
    rows = compete.compete("memory", case, TINY, Attempts())
    assert all(row.seconds > 0 and not row.memory and row.problem.startswith("failed: ValueError") for row in rows)


def test_a_prediction_that_fails_leaves_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compete, "predict", out_of_memory)
    case = cases.train(TINY)[0]
    rows = compete.compete("train", case, TINY, Attempts())
    assert all(row.seconds > 0 for row in rows)
    assert [row.problem[:20] for row in rows if row.problem] == ["failed: RuntimeError"] and rows[0].has_failed


def test_processes_of_a_killed_contender_end_with_it(tmp_path: Path) -> None:
    """They would run beside the next one."""

    def starts_another(attempts: Attempts) -> list[Row]:
        started = subprocess.Popen(["sleep", "600"])
        (tmp_path / "number").write_text(str(started.pid))
        return [kill()]

    (found,) = supervise.measure([Part("s", "case", starts_another)], lambda *_: None)
    assert found[1][0].problem == "failed: ended by signal 9, perhaps for lack of memory"
    status = Path("/proc", (tmp_path / "number").read_text(), "stat")
    gone = False
    for _ in range(1000):
        gone = not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
        if gone:
            break
        time.sleep(0.01)
    assert gone


def test_parts_go_on_after_a_crash_outside_the_contenders() -> None:
    def fine(attempts: Attempts) -> list[Row]:
        return [Row("s", "fine", "handgrad", seconds=attempts("handgrad", lambda: 1.0) or 0.0)]

    def raises(attempts: Attempts) -> list[Row]:
        raise ValueError("no base")

    parts = [Part("s", "killed", kill), Part("s", "fine", fine), Part("s", "raises", raises), Part("s", "again", fine)]
    told: list[tuple[int, str, float]] = []
    found = list(supervise.measure(parts, lambda *event: told.append(event)))
    assert [part for part, _ in found] == parts
    assert [rows[0].problem for _, rows in found] == [
        "failed: ended by signal 9, perhaps for lack of memory", "", "failed: ValueError: no base", "",
    ]  # fmt: skip
    assert all(rows[0].has_failed == bool(rows[0].problem) for _, rows in found)
    assert told == [(1, "handgrad", 0.0), (3, "handgrad", 0.0)]


def test_a_part_is_given_up_when_a_contender_kills_it_twice() -> None:
    def stubborn(attempts: Attempts) -> list[Row]:
        attempts.tell("peer", 0.0)  # as if the problem did not prevent the call
        return [kill()]

    found = list(supervise.measure([Part("s", "stubborn", stubborn)], lambda *_: None))
    assert [row.contender for _, rows in found for row in rows] == ["peer"]


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (MissingError("install it"), "missing: install it"),
        (ModuleNotFoundError("No module named 'peft'"), "missing: No module named 'peft'"),
        (
            ModuleNotFoundError("No module named 'handgrad.x'"),
            "failed: ModuleNotFoundError: No module named 'handgrad.x'",
        ),
        (ValueError(""), "failed: ValueError: "),
    ],
)
def test_problems_in_one_line(reason: Exception, text: str) -> None:
    assert problem(reason) == text
