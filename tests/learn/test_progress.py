"""The record of what was solved: written atomically, shared, and never lost to bad content."""

import json
import multiprocessing
from hashlib import sha256
from pathlib import Path

import pytest

from handgrad.learn.course import COURSE
from handgrad.learn.grading import Grade, Part
from handgrad.learn.progress import Entry, Progress

SOFTMAX = COURSE["softmax"]
SOLVED = Grade("softmax", (Part("delta_scores", "right", "", 0.0, 0.0, None),))
WRONG = Grade("softmax", (Part("delta_scores", "wrong", "", 1.0, 1.0, None),))
UNWRITTEN = Grade("softmax", (Part("delta_scores", "unwritten", "", None, None, None),))


def test_attempts_hints_and_solutions_are_counted(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "deep" / "learn.json")
    assert progress.read() == dict.fromkeys(COURSE, Entry())
    progress.judged(SOFTMAX, "first", WRONG)
    progress.judged(SOFTMAX, "second", UNWRITTEN)
    for _ in range(9):
        progress.hint_shown(SOFTMAX)
    progress.solution_shown(SOFTMAX)
    solved = progress.judged(SOFTMAX, "third", SOLVED).solved
    entry = progress.judged(SOFTMAX, "fourth", WRONG)
    assert entry == Entry(
        3, solved, len(SOFTMAX.hints), True, "fourth", sha256(b"third").hexdigest()
    ) and solved.startswith("20")
    assert Progress(progress.path).read()["softmax"] == entry
    assert [p.name for p in progress.path.parent.iterdir()] == ["learn.json"], "no temporary file is left"


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"exercises": 3}', "\xff\xfe", '{"exercises": []}', "null"])
def test_a_damaged_file_is_kept_and_replaced(content: str, tmp_path: Path) -> None:
    path = tmp_path / "learn.json"
    path.write_bytes(content.encode("latin-1"))
    progress = Progress(path)
    assert progress.read() == dict.fromkeys(COURSE, Entry())
    assert path.read_bytes() == content.encode("latin-1"), "reading changes nothing"
    progress.judged(SOFTMAX, "", SOLVED)
    assert progress.read()["softmax"].solved
    assert progress.damaged is not None and progress.damaged.read_bytes() == content.encode("latin-1")


def test_wrong_values_are_left_out_and_unknown_ones_kept(tmp_path: Path) -> None:
    path = tmp_path / "learn.json"
    stored = {"softmax": {"attempts": "many", "hints": 2, "solved": None}, "linear": 7, "later": {"stars": 3}}
    path.write_text(json.dumps({"format": 2, "exercises": stored, "theme": "dark"}))
    progress = Progress(path)
    assert progress.read()["softmax"] == Entry(hints=2) and progress.read()["linear"] == Entry()
    progress.hint_shown(SOFTMAX)
    after = json.loads(path.read_text())
    assert after["theme"] == "dark" and after["exercises"]["later"] == {"stars": 3}
    assert progress.read()["softmax"].hints == 3 and progress.damaged is None


def _solve(path: Path, name: str) -> None:
    for _ in range(20):
        Progress(path).judged(COURSE[name], "", WRONG)


def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "learn.json"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_solve, args=(path, name)) for name in ("softmax", "softmax", "loss")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = Progress(path).read()
    assert (found["softmax"].attempts, found["loss"].attempts) == (40, 20)
