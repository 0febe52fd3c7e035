"""Compiled kernels in the cache: whole and this user's own, or compiled again. A damaged file is never loaded."""

import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from handgrad.errors import HandgradError
from handgrad.kernels import compiler, library

if compiler.command() is None:
    pytest.skip("LEFT OUT: no C compiler, so there are no kernels to test", allow_module_level=True)

FLIPS = int(os.environ.get("HANDGRAD_FLIPS", "25"))


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernels for float32 in a cache that a test may damage. Compiling means copying the ones that exist, so that a
    test can try many files."""
    path = library._path("float")
    assert library.load(torch.float32) is not None
    whole = path.read_bytes()
    mine = tmp_path / "kernels" / path.name
    mine.parent.mkdir()
    mine.write_bytes(whole)
    mine.chmod(0o600)

    monkeypatch.setattr(library, "_path", lambda real: mine)
    monkeypatch.setattr(compiler, "build", lambda real, out, log: out.write_bytes(whole[: -library.DIGEST_BYTES]))
    return mine


def load() -> object:
    """As the first load of a process."""
    return library.load.__wrapped__(torch.float32)


def assert_whole(path: Path, whole: bytes) -> None:
    assert path.read_bytes() == whole and stat.S_ISREG(path.lstat().st_mode) and path.stat().st_mode & 0o777 == 0o600
    assert [x.name for x in path.parent.iterdir()] == [path.name], "nothing is left beside it"


def test_a_whole_file_is_used_as_it_is(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library.prepared(torch.float32) and load() is not None


def test_flipped_bits_are_found(compiled: Path) -> None:
    """Anywhere, the digest included."""
    whole, chance = compiled.read_bytes(), random.Random(0)
    places = [0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(FLIPS))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        compiled.write_bytes(damaged)
        assert not library.prepared(torch.float32), place
        assert load() is not None
        assert_whole(compiled, whole)


def other_name(path: Path) -> bytes:
    """Whole kernels, for another dtype."""
    content = path.read_bytes()[: -library.DIGEST_BYTES]
    return content + library._digest(path.with_name("kernels-double-0123.so"), content)


def replaced_by(content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content(path.read_bytes())) and None


def link(path: Path) -> None:
    target = path.parent.parent / "elsewhere.so"
    path.rename(target)
    path.symlink_to(target)


def without(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.unlink()
        make(path)

    return put


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


ODD: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": replaced_by(lambda x: b""),
    "one byte": replaced_by(lambda x: x[:1]),
    "half": replaced_by(lambda x: x[: len(x) // 2]),
    "a page less": replaced_by(lambda x: x[:-4096]),
    "a byte less": replaced_by(lambda x: x[:-1]),
    "a byte more": replaced_by(lambda x: x + b"\0"),
    "zeros": replaced_by(lambda x: bytes(len(x))),
    "zeros at the end, as after a crash": replaced_by(lambda x: x[:8192] + bytes(len(x) - 8192)),
    "without a digest": replaced_by(lambda x: x[: -library.DIGEST_BYTES]),
    "text": replaced_by(lambda x: b"#!/bin/sh\necho kernels\n"),
    "another architecture": replaced_by(lambda x: x[:18] + b"\xb7\x00" + x[20:]),
    "another library": replaced_by(lambda x: Path(torch.__file__).read_bytes()),
    "another dtype": lambda path: path.write_bytes(other_name(path)),
    "larger than any": lambda path: os.truncate(path, library.LARGEST + 1),
    "a pipe": without(os.mkfifo),
    "a link": link,
    "a link to itself": without(lambda path: path.symlink_to(path.name)),
    "a link to nothing": without(lambda path: path.symlink_to("nowhere")),
    "a link to a device": without(lambda path: path.symlink_to("/dev/zero")),
    "a socket": without(bind),
    "writable by others": lambda path: path.chmod(0o666),
    "writable by a group": lambda path: path.chmod(0o660),
    "unreadable": lambda path: path.write_bytes(b"") or path.chmod(0),
    "an empty folder": without(lambda path: path.mkdir()),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_replaced_or_refused(name: str, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compiled.read_bytes()
    ODD[name](compiled)
    assert not library.prepared(torch.float32)
    if name == "an empty folder":
        with pytest.raises(HandgradError, match="cannot be replaced: delete it"):
            load()
        return
    assert load() is not None
    assert_whole(compiled, whole)


def test_a_file_of_another_user_is_not_used(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compiled.read_bytes()
    monkeypatch.setattr(os, "geteuid", lambda: compiled.stat().st_uid + 1)
    assert not library.prepared(torch.float32)
    with pytest.raises(HandgradError, match="is not what handgrad compiled"):
        load()
    assert compiled.read_bytes() == whole


def test_the_file_that_was_checked_is_loaded(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another one that has its name by then; and each library under a path of its own."""
    checked = library._open

    def exchange(path: Path) -> int | None:
        handle = checked(path)
        compiled.unlink()
        compiled.write_bytes(b"something else")
        return handle

    monkeypatch.setattr(library, "_open", exchange)
    if not Path("/proc/self/fd").exists():
        pytest.skip("LEFT OUT: files have no path by their number on this system")
    first = load()
    assert first is not None and hasattr(first, "hg_softmax_loss")


def test_both_dtypes_are_loaded() -> None:
    """The loader knows a library by its path: float64 must not get the kernels for float32."""
    assert library.load(torch.float32)._handle != library.load(torch.float64)._handle  # type: ignore[union-attr]


def test_what_is_compiled_is_on_disk_before_it_has_its_name(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: done.append("fsync") or fsync(handle))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("rename") or rename(*paths))
    compiled.unlink()
    assert load() is not None
    assert done[:2] == ["fsync", "rename"]
