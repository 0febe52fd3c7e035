"""The command: list, write, judge, hint, solution."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from conftest import handgrad
from handgrad.learn.course import COURSE
from handgrad.learn.result_file import read_result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HANDGRAD_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_session(folder: Path) -> None:
    listed = handgrad("learn").stdout
    assert all(name in listed for name in COURSE) and "0 of 12 solved. Next: handgrad learn softmax" in listed
    written = handgrad("learn", "softmax")
    path = folder / "learn" / "softmax.py"
    assert (
        written.returncode == 0 and "Wrote learn/softmax.py" in written.stdout and "def backward(" in path.read_text()
    )
    unfinished = handgrad("learn", "softmax")
    assert (
        unfinished.returncode == 0 and "nothing is written yet" in unfinished.stdout and "--hint" in unfinished.stdout
    )
    path.write_text("def backward(delta_rho, rho):\n    return delta_rho * rho\n")
    wrong = handgrad("learn", "softmax")
    assert wrong.returncode == 1 and "one of its terms is missing" in wrong.stdout and "✘" in wrong.stdout
    assert "second term" not in wrong.stdout and "After two hints" in wrong.stdout
    assert "Hint 1 of 3" in handgrad("learn", "softmax", "--hint").stdout
    assert "Hint 2 of 3" in handgrad("learn", "softmax", "--hint").stdout
    again = handgrad("learn", "softmax")
    assert "lacks the second term" in again.stdout and "After two hints" not in again.stdout
    solution = handgrad("learn", "softmax", "--solution").stdout
    assert solution == COURSE["softmax"].solution()
    (folder / "mine.py").write_text(solution)
    solved = handgrad("learn", "softmax", "--file", "mine.py")
    assert solved.returncode == 0 and "Solved. Next: handgrad learn loss" in solved.stdout
    after = handgrad("learn").stdout
    assert "1 of 12 solved. Next: handgrad learn loss" in after and "solved, 3 attempts, 2 hints" in after
    assert path.read_text().endswith("return delta_rho * rho\n"), "an answer is never overwritten"
    (folder / "results").mkdir()
    assert (
        handgrad("learn", "--export", "results/learn.json", "--student", "Ada").stdout == "Wrote results/learn.json.\n"
    )
    result = read_result(folder / "results" / "learn.json")
    assert result.student == "Ada" and result.exercise("softmax").answer == sha256(solution.encode()).hexdigest()
    shown = handgrad("learn", "--collect", "results", "--html", "class.html")
    assert shown.returncode == 0 and "1 of 12" in shown.stdout and "Ada" in (folder / "class.html").read_text()


def test_json_and_mistakes(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "x.py").write_text("def backward(delta, a, w):\n    return delta @\n")
    found = handgrad("learn", "linear", "--file", "x.py", "--json", "-")
    assert found.returncode == 1 and json.loads(found.stdout)["problem"]["line"] == 2
    for arguments, words in [
        (["sofmax"], "did you mean softmax"), (["softmax", "--hint", "--solution"], "exclude each other"),
        (["--hint"], "name an exercise"), (["softmax", "--json", "-"], "nothing to judge"),
        (["softmax", "--export", "x.json"], "without other options"), (["--html", "x.html"], "with --collect FOLDER"),
        (["--collect", "no"], "is not a folder"), (["--collect", "empty"], "has 0 .json files"),
        (["--export", "no/x.json"], "does not exist"), (["--export", "x", "--student", "x" * 201], "limit is 200"),
        (["softmax", "--file", "no/where.py"], "does not exist"), (["softmax", "--file", "."], "it is a folder"),
    ]:  # fmt: skip
        failed = handgrad("learn", *arguments)
        assert failed.returncode == 1 and words in failed.stderr, (arguments, failed)


def test_a_damaged_record_is_mentioned(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "learn.json").write_text("{")
    assert "0 of 12 solved" in handgrad("learn").stdout
    found = handgrad("learn", "softmax", "--hint")
    assert found.returncode == 0 and "kept as learn-damaged-1.json" in " ".join(found.stderr.split())
