"""Writing files so that nothing is ever half-written."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from .errors import HandgradError


def sync(path: Path) -> None:
    """Make sure it is on the disk, not only in the system's memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: Path) -> None:
    """Say before the work begins that its result could not be written."""
    try:
        path = path.resolve()  # a link is followed
    except (OSError, RuntimeError):
        raise HandgradError(f"cannot write {path}: it is a link that leads nowhere") from None
    if path.is_dir():
        raise HandgradError(f"cannot write {path}: it is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise HandgradError(f"cannot write {path}: the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise HandgradError(f"cannot write {path}: no permission")


def write_text(path: Path, text: str) -> None:
    """Put the text where `path` says, whole or not at all. A link is followed; a device or pipe is written into."""
    check_writable(path)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(partial, mode)
        sync(Path(partial))
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def write_folder(folder: Path, fill: Callable[[Path], None], stale: Iterable[str] = ()) -> None:
    """A folder filled by `fill`, in place of the one that was there, whole or not at all. Files of the old folder that
    `fill` does not write come along, unless they match a pattern of `stale`: they are what the new ones replace."""
    folder = folder.resolve()
    if folder == Path.cwd():
        raise HandgradError(f"{folder} is the folder you are in, which cannot be replaced whole: write from outside it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(partial)
        for file in partial.iterdir():
            sync(file)
        os.chmod(partial, folder.stat().st_mode & 0o777 if folder.exists() else 0o777 & ~_umask())
        if folder.exists():
            for other in folder.iterdir():
                if not (partial / other.name).exists() and not any(other.match(pattern) for pattern in stale):
                    if other.is_dir() and not other.is_symlink():
                        shutil.copytree(other, partial / other.name, symlinks=True)
                    else:
                        shutil.copy2(other, partial / other.name, follow_symlinks=False)
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            os.replace(folder, old / "was")
            os.replace(partial, folder)
            shutil.rmtree(old)
        else:
            os.replace(partial, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
