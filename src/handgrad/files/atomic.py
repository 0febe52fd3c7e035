"""Writing files so that a reader finds the old content or the new, never a part of either.

Whatever is being written, replaced or deleted bears a name that begins with LEFTOVER until it is complete or gone. A
process that is killed leaves such names behind and nothing else: `sweep` removes them.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import HandgradError

LEFTOVER = ".handgrad-"
REPLACED = f"{LEFTOVER}old."  # followed by the name the folder had
SETTLED = 10  # seconds after which an unlocked leftover of a running process has no owner


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: Path) -> None:
    """Raise before the work begins if its result could not be written."""
    try:
        path = path.resolve()  # a link is followed
        is_folder = path.is_dir()
    except (OSError, RuntimeError, ValueError):
        raise HandgradError(f"cannot write {path}: it is a link that leads nowhere, or no file name") from None
    if is_folder:
        raise HandgradError(f"cannot write {path}: it is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise HandgradError(f"cannot write {path}: the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise HandgradError(f"cannot write {path}: no permission")


def write_text(path: Path, text: str, follow: bool = True) -> None:
    """Write a text file atomically. A link is followed and a device or pipe is written into, unless `follow` is False:
    then the file takes the link's place."""
    if not follow:
        _replace(path, text)
        return
    check_writable(path)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    _replace(path.resolve(), text)


def _replace(path: Path, text: str) -> None:
    with new_file(path.parent) as file:
        file.write(text.encode())
        if path.is_file() and not path.is_symlink():
            os.chmod(file.name, path.stat().st_mode & 0o777)
        rename_onto(file, path)


@contextlib.contextmanager
def new_file(folder: Path) -> Iterator[BinaryIO]:
    """A file without a name yet, open for writing; gone afterwards, unless `rename_onto` gives it one."""
    sweep(folder)
    handle, partial = tempfile.mkstemp(prefix=f"{LEFTOVER}new.{os.getpid()}.", dir=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.chmod(partial, 0o666 & ~_umask())
        with open(partial, "wb", opener=lambda *_: handle) as file:
            yield file
    finally:
        Path(partial).unlink(missing_ok=True)


def rename_onto(file: BinaryIO, path: Path) -> None:
    """Flush a file of `new_file` to the disk and give it its name."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)
    sync(path.parent)


def write_folder(folder: Path, fill: Callable[[Path], None], stale: Iterable[str] = (), follow: bool = True) -> None:
    """Write a folder atomically: `fill` puts its files into an empty one, which then takes the place of the old. Files of
    the old folder that `fill` does not write are copied over, unless they match a pattern of `stale`. A link to a folder
    is followed, unless `follow` is False: then the folder takes the link's place."""
    if not follow and folder.is_symlink():
        folder.unlink()
    folder = folder.resolve()
    if folder == Path.cwd():
        raise HandgradError(f"{folder} is the folder you are in, which cannot be replaced whole: write from outside it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    partial = Path(tempfile.mkdtemp(prefix=f"{LEFTOVER}new.{os.getpid()}.", dir=folder.parent))
    try:
        with _claimed(partial):
            fill(partial)
            for path in partial.iterdir():
                if path.is_file() and not path.is_symlink():
                    os.chmod(path, 0o666 & ~_umask())  # some libraries keep what they write to their user
            os.chmod(partial, folder.stat().st_mode & 0o777 if folder.exists() else 0o777 & ~_umask())
            if folder.exists():
                _copy_others(folder, partial, stale)
            for path in (*sorted(partial.rglob("*")), partial):
                if not path.is_symlink() and (path.is_file() or path.is_dir()):
                    sync(path)
            if folder.exists():
                _swap(partial, folder)  # what was replaced is now in `partial`
            else:
                os.rename(partial, folder)
            sync(folder.parent)
            shutil.rmtree(partial, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Delete a folder so that a half-deleted one never bears its name."""
    doomed = Path(tempfile.mkdtemp(prefix=f"{LEFTOVER}gone.{os.getpid()}.", dir=folder.parent))
    os.rename(folder, doomed)  # onto an empty folder
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path, owned: bool = False) -> None:
    """Remove what killed processes left in a folder; put a folder back that was moved away and not replaced. `owned`: the
    caller holds a lock on the folder, so that every leftover is without an owner. Otherwise those in use are spared."""
    for left in [Path(entry.path) for entry in os.scandir(folder) if entry.name.startswith(LEFTOVER)]:
        if not owned and not _abandoned(left):
            continue
        name, _, number = left.name.removeprefix(REPLACED).rpartition(".")
        with contextlib.suppress(OSError):
            if left.name.startswith(REPLACED) and number.isdigit() and not (folder / name).exists():
                os.rename(left, folder / name)
            elif left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _abandoned(path: Path) -> bool:
    """Whether the process that made a leftover has ended: it holds a lock on it while it works."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if _is_running(path) and time.time() - os.fstat(handle).st_mtime < SETTLED:
            return False  # perhaps it was made just now, and the lock comes next
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _is_running(path: Path) -> bool:
    """Whether the process that a leftover names is there, or may be."""
    number = next((part for part in path.name.split(".") if part.isdigit()), "")
    try:
        os.kill(int(number or os.getpid()), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


@contextlib.contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _copy_others(old: Path, new: Path, stale: Iterable[str]) -> None:
    for other in old.iterdir():
        if (new / other.name).exists() or any(other.match(pattern) for pattern in stale):
            continue
        kind = other.lstat().st_mode
        if stat.S_ISDIR(kind):
            shutil.copytree(other, new / other.name, symlinks=True)
        elif stat.S_ISREG(kind) or stat.S_ISLNK(kind):
            shutil.copy2(other, new / other.name, follow_symlinks=False)


def _swap(new: Path, old: Path) -> None:
    """Exchange two folders' names in one step, where the system can; else in two, which `sweep` can undo."""
    if exchange(new, old):
        return
    away = Path(f"{old.with_name(REPLACED + old.name)}.{os.getpid()}")
    os.rename(old, away)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(away, old)
        raise
    os.rename(away, new)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically. False if this system or file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    with contextlib.suppress(AttributeError):  # a C library without it
        if sys.platform == "darwin":
            return bool(libc.renamex_np(*names, swap) == 0)
        return bool(libc.renameat2(at_cwd, names[0], at_cwd, names[1], swap) == 0)
    return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
