"""Write files and folders atomically: a reader sees the old content or the new, never a mixture or a part.

Everything that is being written, replaced or deleted has a name that starts with LEFTOVER until it is complete or removed.
A killed process leaves only files with such names, which `sweep` removes.
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
REPLACED = f"{LEFTOVER}old."  # followed by the original name of the folder
LOCK_GRACE = 10  # seconds: an unlocked leftover of a running process that is older than this has no owner


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        _flush(handle, path)
    finally:
        os.close(handle)


def _flush(handle: int, path: Path | str) -> None:
    try:
        os.fsync(handle)
    except OSError as reason:
        what = f"{reason.strerror} while flushing to disk: check the disk"
        raise OSError(reason.errno, what, str(path)) from None


def check_writable(path: Path) -> None:
    """Raise if a file cannot be written to `path`, so that this is known before the work starts."""
    try:
        path = path.resolve()  # follows links
        is_folder = path.is_dir()
    except (OSError, RuntimeError, ValueError):
        raise HandgradError(f"cannot write {path}: it is a broken link or not a valid file name") from None
    if is_folder:
        raise HandgradError(f"cannot write {path}: it is a folder; give a file name")
    if not path.parent.is_dir():
        raise HandgradError(f"cannot write {path}: the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise HandgradError(f"cannot write {path}: no permission")


def write_text(path: Path, text: str, follow: bool = True) -> None:
    """Write a text file atomically. Links are followed, and devices and pipes written to; with follow=False the file
    replaces them."""
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
    """Open a temporary file in `folder` for writing. It is deleted afterwards, unless `rename_onto` gave it its name."""
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
    """Flush a file from `new_file` to disk and rename it to `path`, replacing what is there."""
    file.flush()
    _flush(file.fileno(), path)
    os.replace(file.name, path)
    sync(path.parent)


def write_folder(folder: Path, fill: Callable[[Path], None], stale: Iterable[str] = (), follow: bool = True) -> None:
    """Write a folder atomically: `fill` writes the files into an empty folder, which then replaces the old one.

    Files of the old folder that `fill` does not write are copied, unless they match a pattern in `stale`. A link to a folder
    is followed; with follow=False the folder replaces the link."""
    if not follow and folder.is_symlink():
        folder.unlink()
    folder = folder.resolve()
    if folder == Path.cwd():
        raise HandgradError(
            f"{folder} is the current folder, which cannot be replaced: run the command from another folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    partial = Path(tempfile.mkdtemp(prefix=f"{LEFTOVER}new.{os.getpid()}.", dir=folder.parent))
    try:
        with locked(partial):
            fill(partial)
            for path in partial.iterdir():
                if path.is_file() and not path.is_symlink():
                    os.chmod(path, 0o666 & ~_umask())  # some libraries write files that only their owner can read
            os.chmod(partial, folder.stat().st_mode & 0o777 if folder.exists() else 0o777 & ~_umask())
            if folder.exists():
                _copy_others(folder, partial, stale)
            for path in (*sorted(partial.rglob("*")), partial):
                if not path.is_symlink() and (path.is_file() or path.is_dir()):
                    sync(path)
            if folder.exists():
                _swap(partial, folder)  # `partial` is now the old folder
            else:
                os.rename(partial, folder)
            sync(folder.parent)
            shutil.rmtree(partial, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_folder(folder: Path) -> None:
    """Delete a folder. It is renamed first, so that no partly deleted folder has its name."""
    trash = Path(tempfile.mkdtemp(prefix=f"{LEFTOVER}gone.{os.getpid()}.", dir=folder.parent))
    os.rename(folder, trash)  # replaces an empty folder
    shutil.rmtree(trash, ignore_errors=True)


def sweep(folder: Path, owned: bool = False) -> None:
    """Remove the leftovers of killed processes in a folder, and restore folders that were renamed but not replaced.

    Leftovers of running processes are spared. With owned=True the caller has locked the folder, so none is in use."""
    for leftover in [Path(entry.path) for entry in os.scandir(folder) if entry.name.startswith(LEFTOVER)]:
        if not owned and not _is_abandoned(leftover):
            continue
        name, _, number = leftover.name.removeprefix(REPLACED).rpartition(".")
        with contextlib.suppress(OSError):
            if leftover.name.startswith(REPLACED) and number.isdigit() and not (folder / name).exists():
                os.rename(leftover, folder / name)
            elif leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    """Whether the process that made a leftover has ended: it locks its leftover while it works."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if _is_running(path) and time.time() - os.fstat(handle).st_mtime < LOCK_GRACE:
            return False  # it may be new, and not locked yet
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def _is_running(path: Path) -> bool:
    """Whether the process named in a leftover runs, or may run."""
    number = next((part for part in path.name.split(".") if part.isdigit()), "")
    try:
        os.kill(int(number or os.getpid()), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, or wait for it."""
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
    """Exchange two folders atomically if the system can, else by renames that `sweep` can undo."""
    if exchange(new, old):
        return
    moved = Path(f"{old.with_name(REPLACED + old.name)}.{os.getpid()}")
    os.rename(old, moved)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(moved, old)
        raise
    os.rename(moved, new)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths atomically. Returns False if the system or file system does not support it."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = os.fsencode(one), os.fsencode(other)
    with contextlib.suppress(AttributeError):  # not in this C library
        if sys.platform == "darwin":
            return bool(libc.renamex_np(*names, swap) == 0)
        return bool(libc.renameat2(at_cwd, names[0], at_cwd, names[1], swap) == 0)
    return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
