"""The result files of a class: what counts, what does not and why, and that nothing in them reaches the page as markup."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from handgrad.errors import HandgradError
from handgrad.learn.classroom import class_page, collect
from handgrad.learn.course import COURSE
from handgrad.learn.progress import Entry
from handgrad.learn.result_file import canonical, digest, read_result, result_text

WHEN = "2026-01-31T10:00:00+00:00"
PROGRESS = {name: Entry() for name in COURSE} | {
    "softmax": Entry(3, WHEN, 2, False, "later", digest("right")),
    "loss": Entry(1, "", 0, True, "wrong"),
}


def write(folder: Path, name: str, who: str, /, **changes: Any) -> Path:
    """A file with changes, and the hash that fits them."""
    stored = json.loads(result_text(who, PROGRESS)) | changes
    content = {key: value for key, value in stored.items() if key != "sha256"}
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({**stored, "sha256": digest(canonical(content))}))
    return folder / name


def item(**changes: Any) -> dict[str, Any]:
    plain = {"name": "softmax", "solved": "", "attempts": 1, "hints": 0, "solution": False, "answer": ""}
    return plain | changes


def test_a_result_says_what_was_done(tmp_path: Path) -> None:
    (tmp_path / "learn.json").write_text(result_text('Zoë ␣ "x"', PROGRESS))
    result = read_result(tmp_path / "learn.json")
    assert result.student == 'Zoë ␣ "x"' and result.numbers == ()
    one, other = result.exercise("softmax"), result.exercise("loss")
    assert (one.solved, one.attempts, one.hints, one.solution, one.answer) == (WHEN, 3, 2, False, digest("right"))
    assert (other.solved, other.solution, other.answer) == ("", True, digest("wrong"))
    assert result.exercise("block").attempts == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"student": 3}, "fields"), ({"student": "x" * 201}, "fields"), ({"more": 1}, "fields"),
        ({"version": 2}, "another version"), ({"format": "x"}, "not a result"), ({"exercises": [3]}, "damaged"),
        ({"exercises": [item(name="hack")]}, "does not know"), ({"exercises": [item(), item()]}, "twice"),
        ({"exercises": [item(attempts=-1)]}, "not possible"), ({"exercises": [item(attempts=True)]}, "fields"),
        ({"exercises": [item(solved="today")]}, "not a time"), ({"written": "x"}, "not a time"),
        ({"exercises": [item(solved=WHEN)]}, "without an answer"), ({"numbers": [item(name="")]}, "not possible"),
        ({"numbers": [item(name=str(i)) for i in range(1001)]}, "1,001 entries"),
    ],
)  # fmt: skip
def test_a_file_with_the_right_hash_is_still_checked(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(HandgradError, match=words):
        read_result(write(tmp_path, "x.json", "Ada", **changes))


def test_a_class_with_files_that_do_not_count(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\x1b[31m"
    number = item(name="<b>sum</b>", solved=WHEN, answer="ab")
    write(tmp_path, "evil.json", evil, numbers=[number])
    ada = write(tmp_path, "ada/learn.json", "Ada").read_text()
    write(tmp_path, "ada again.json", "Ada", written="2026-02-01T10:00:00+00:00")
    (tmp_path / "copy.json").write_text(ada)
    (tmp_path / "changed.json").write_text(ada.replace('"attempts": 1', '"attempts": 0'))
    (tmp_path / "half.json").write_text(ada[:300])
    (tmp_path / "foreign.json").write_text('{"a": 1}')
    (tmp_path / "own.json").write_text('{"format": 1, "exercises": {}}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / os.fsdecode(b"bytes\xff.json")).write_text("[]")
    (tmp_path / "large.json").write_text(" " * 1_000_001)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    (tmp_path / "link.json").symlink_to("/etc/passwd")
    (tmp_path / "notes.txt").write_text("left alone")
    found = collect(tmp_path)
    assert sorted(found.results) == ["ada again.json", "ada/learn.json", "evil.json"]
    reasons = {
        "copy.json": "the same content as ada/learn.json", "changed.json": "changed after it was written",
        "half.json": "not valid JSON", "foreign.json": "not a result", "own.json": "handgrad learn --export",
        "list.json": "JSON object", "large.json": "larger than", "binary.json": "not UTF-8", "link.json": "a link",
        r"bytes\udcff.json": "JSON object",
    }  # fmt: skip
    assert found.problems.keys() == reasons.keys()
    for name, words in reasons.items():
        assert words in found.problems[name] and str(tmp_path) not in found.problems[name], found.problems[name]
    assert any("2 files of Ada" in note for note in found.notes)
    assert any("The same answer to softmax" in note for note in found.notes)
    page = class_page(found, "<i>class</i>")
    assert "<script" not in page and "<i>" not in page and "&lt;script&gt;alert(1)" in page and "1 of 1" in page
    assert page.count("✔ 3 · 2 h") == 3 and page.count("… 1 · s") == 3 and "no signature" in page
    assert all(name in page for name in reasons) and page.encode()


def test_a_folder_without_results(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    found = collect(tmp_path)
    assert found.results == {} and "Files that do not count" in class_page(found, "x")
