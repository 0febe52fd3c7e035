"""Atomic writes of folders: exchange, kills between renames, and sweeping of leftovers."""

import os
from pathlib import Path

import pytest

from handgrad.files.atomic import LEFTOVER, exchange, sweep, write_folder, write_text
from runs import leftovers


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
