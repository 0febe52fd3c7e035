"""Atomic writing: complete or not at all; nothing else is overwritten; leftovers of killed processes are removed."""

import os
import stat
from pathlib import Path

import pytest

from handgrad.errors import HandgradError
from handgrad.files.atomic import LEFTOVER, check_writable, exchange, sweep, write_folder, write_text
from runs import leftovers


def test_write_text_replaces_the_file_and_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_text(file, "one")
    file.chmod(0o600)
    write_text(file, "two")
    assert file.read_text() == "two" and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [f.name for f in tmp_path.iterdir()] == ["a.json"]


def test_write_text_follows_links(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_write_text_writes_to_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through")
    assert os.read(reader, 100) == b"through" and pipe.is_fifo()
    os.close(reader)


@pytest.mark.parametrize("name", [".", "", "no/such/folder/x"])
def test_check_writable_rejects_invalid_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HandgradError, match="cannot write"):
        check_writable(Path(name))


def test_broken_links_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "no" / "x")
    for name in ("loop", "gone"):
        with pytest.raises(HandgradError, match="cannot write"):
            write_text(tmp_path / name, "x")


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HandgradError, match="is the current folder"):
        write_folder(Path("."), lambda f: None)
    assert Path.cwd() == tmp_path


def test_write_folder_keeps_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, lambda f: (f / "a").write_text("1") and None)
    (folder / "notes.txt").write_text("mine")
    (folder / "deep").mkdir()
    (folder / "deep" / "x").write_text("mine too")
    write_folder(folder, lambda f: (f / "a").write_text("2") and None)
    assert {f.name for f in folder.iterdir()} == {"a", "notes.txt", "deep"}
    assert (folder / "a").read_text() == "2" and (folder / "deep" / "x").read_text() == "mine too"
    assert [f.name for f in tmp_path.iterdir()] == ["m"]


def test_write_folder_follows_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_folder(tmp_path / "link", lambda f: (f / "a").write_text("1") and None)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "a").exists()


def test_a_failed_write_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder, lambda f: (f / "a").write_text("1") and None)

    def fail(f: Path) -> None:
        (f / "a").write_text("2")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_folder(folder, fail)
    assert (folder / "a").read_text() == "1" and [f.name for f in tmp_path.iterdir()] == ["m"]


def test_exchange_swaps_two_folders(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists() and (tmp_path / "b" / "a").exists()
    assert not exchange(tmp_path / "a", tmp_path / "none")


@pytest.mark.parametrize("crash", [1, 2, 3])
def test_write_folder_without_exchange_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: int
) -> None:
    """Without an atomic exchange, a kill at any of the three renames loses no folder."""
    write_folder(tmp_path / "m", lambda f: (f / "a").write_text("old") and None)
    monkeypatch.setattr("handgrad.files.atomic.exchange", lambda one, other: False)
    calls = 0
    rename = os.rename

    def rename_or_exit(*names: object) -> None:
        nonlocal calls
        calls += 1
        if calls == crash:
            os._exit(9)
        rename(*names)

    monkeypatch.setattr("handgrad.files.atomic.os.rename", rename_or_exit)
    child = os.fork()
    if child == 0:
        write_folder(tmp_path / "m", lambda f: (f / "a").write_text("new") and None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.setattr("handgrad.files.atomic.os.rename", rename)
    sweep(tmp_path, owned=True)
    assert (tmp_path / "m" / "a").read_text() == ("old" if crash < 3 else "new")
    assert not leftovers(tmp_path)


def test_sweep_removes_only_abandoned_leftovers(tmp_path: Path) -> None:
    (tmp_path / f"{LEFTOVER}new.dead").write_text("x")
    os.utime(tmp_path / f"{LEFTOVER}new.dead", (0, 0))

    def fill(partial: Path) -> None:
        os.utime(partial, (0, 0))
        write_text(tmp_path / "other.txt", "x")  # this sweeps too, and must keep the folder in use
        (partial / "a").write_text("1")

    write_folder(tmp_path / "m", fill)
    assert {p.name for p in tmp_path.iterdir()} == {"m", "other.txt"}
