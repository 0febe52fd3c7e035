"""Write the folder of a run: lock it, record settings and metrics. `checkpoint.py` writes its checkpoints, and
`formats/run_folder.py` describes its layout and reads it."""

import contextlib
import errno
import fcntl
import json
import os
import uuid
from pathlib import Path
from typing import Any

from ..errors import HandgradError, option
from ..files import manifest
from ..files.atomic import sweep, write_text
from ..formats.run_folder import CONFIG, LOCK, METRICS, RunFolder


class LockedError(HandgradError):
    """Another process holds the lock of the folder."""


class Run(RunFolder):
    """A run folder that this process writes."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._lock: int | None = None
        self._made: list[Path] = []  # folders that `lock` created, the innermost first

    # ── lock ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def lock(self) -> None:
        """Create the folder if necessary and lock it, until the process ends for whatever reason."""
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        above = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise HandgradError(f"cannot write to {above}: choose another {option('out')}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as reason:
            raise HandgradError(
                f"cannot create the folder {self.folder}: {reason.strerror}; choose another {option('out')}"
            ) from None
        self._made = missing
        try:
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise LockedError(f"another process is training in {self.folder}: wait for it, or stop it") from None
        except OSError as reason:
            self.release()
            why = "it is a symbolic link; remove it" if reason.errno == errno.ELOOP else reason.strerror
            raise HandgradError(f"cannot lock {self.folder / LOCK}: {why}") from None

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def sweep(self) -> None:
        """Delete temporary files of killed processes. Requires the lock."""
        for folder in (self.folder, self.checkpoints):
            if folder.is_dir():
                sweep(folder, owned=True)

    def abandon(self) -> None:
        """Undo what was written for a run that failed to start. run.json goes after the metrics: if one cannot be deleted,
        the folder is still a run."""
        for path in (self.folder / METRICS, self.folder / CONFIG, self.folder / LOCK):
            path.unlink(missing_ok=True)
        for path in (self.checkpoints, *self._made):
            with contextlib.suppress(OSError):  # missing, or not empty
                path.rmdir()
        self.release()

    # ── configuration ───────────────────────────────────────────────────────────────────────────────────────────────

    def is_empty(self) -> bool:
        """Whether the folder is new: nothing in it but what `lock` and `create` write before run.json."""
        if any(self.checkpoints.glob("*")):
            return False
        inside = self.folder.iterdir() if self.folder.is_dir() else ()
        return all(path.name in (LOCK, "checkpoints") or path.name.startswith(".handgrad-") for path in inside)

    def create(self, settings: dict[str, Any]) -> None:
        """Write run.json of a new run."""
        self.checkpoints.mkdir(exist_ok=True)
        self.configure({"id": uuid.uuid4().hex, **settings})

    def configure(self, settings: dict[str, Any]) -> None:
        """Write run.json, with a digest."""
        text = json.dumps({**settings, "digest": manifest.digest(settings)}, indent=1) + "\n"
        write_text(self.folder / CONFIG, text, follow=False)

    # ── metrics ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(self.folder / METRICS, flags, 0o666), "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def drop_metrics_after(self, step: int) -> None:
        """Drop the metrics of later steps, which will be repeated."""
        remaining = [record for record in self.records() if record["step"] <= step]
        write_text(self.folder / METRICS, "".join(json.dumps(record) + "\n" for record in remaining), follow=False)
