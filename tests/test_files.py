"""Atomic writing: complete or not at all, and nothing else is overwritten."""

import os
import stat
from pathlib import Path

import pytest

from handgrad.errors import HandgradError
from handgrad.files.atomic import check_writable, write_folder, write_text


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
