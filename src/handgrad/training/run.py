"""The folder of a run: its configuration, its metrics, and its checkpoints.

    .lock                          held by the process that trains into the folder
    run.json                       what the run was started with, and the resolved configuration; under its digest
    metrics.jsonl                  a line for every logged step, every evaluation, every sample
    checkpoints/step-00000250/     a Hugging Face directory, or PEFT's for an adapter, and what training needs to go on:
        optimizer.safetensors      the optimizer's state and the state of the random numbers
        handgrad-manifest.json     step, run, time, validation loss, settings, and the SHA-256 of every file
    report.html

A checkpoint is filled under another name, flushed to the disk, and then renamed. `Run.checkpoint` reads one: it is usable,
damaged for a reason, or absent. Damaged checkpoints are never deleted.
"""

import contextlib
import errno
import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..adapters import peft
from ..errors import HandgradError
from ..files import manifest
from ..files.atomic import remove_folder, sweep, write_folder, write_text
from ..files.manifest import DamagedError
from ..formats.checkpoint import write_model
from ..formats.run_folder import CONFIG, LOCK, METRICS, OPTIMIZER, PREFIX, RunFolder
from ..model.gpt import GPT
from ..text.tokenizer import Tokenizer


class LockedError(HandgradError):
    """Another process is training into the folder."""


class Run(RunFolder):
    """The folder of a run, to write into."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._lock: int | None = None
        self._made: list[Path] = []  # folders that `lock` created, the innermost first

    # ── lock ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def lock(self) -> None:
        """Create the folder if need be and keep other processes out of it, until this one ends, however it ends."""
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        above = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise HandgradError(f"cannot write in {above}: choose another --out")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as reason:
            raise HandgradError(
                f"cannot make the folder {self.folder}: {reason.strerror}; choose another --out"
            ) from None
        self._made = missing
        try:
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise LockedError(f"another process is training into {self.folder}: wait for it, or stop it") from None
        except OSError as reason:
            self.release()
            why = "it is a symbolic link; remove it" if reason.errno == errno.ELOOP else reason.strerror
            raise HandgradError(f"cannot lock {self.folder / LOCK}: {why}") from None

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def sweep(self) -> None:
        """Remove what killed processes left in the folder. Needs the lock."""
        for folder in (self.folder, self.checkpoints):
            if folder.is_dir():
                sweep(folder, owned=True)

    def abandon(self) -> None:
        """Undo `lock` and `create` for a run that could not begin: leave the folder as it was found."""
        for path in (self.folder / CONFIG, self.folder / LOCK):
            path.unlink(missing_ok=True)
        for path in (self.checkpoints, *self._made):
            with contextlib.suppress(OSError):  # not there, or no longer empty
                path.rmdir()
        self.release()

    # ── configuration ───────────────────────────────────────────────────────────────────────────────────────────────

    def is_empty(self) -> bool:
        """Whether the folder holds nothing but what starting a run leaves there before its run.json."""
        if any(self.checkpoints.glob("*")):
            return False
        return all(path.name in (LOCK, "checkpoints") or path.name.startswith(".handgrad-") for path in self._inside())

    def _inside(self) -> Iterator[Path]:
        return self.folder.iterdir() if self.folder.is_dir() else iter(())

    def create(self, settings: dict[str, Any]) -> None:
        """Start a run: write run.json, before any other work."""
        self.checkpoints.mkdir(exist_ok=True)
        self.configure({"id": uuid.uuid4().hex, **settings})

    def configure(self, settings: dict[str, Any]) -> None:
        text = json.dumps({**settings, "digest": manifest.digest(settings)}, indent=1) + "\n"
        write_text(self.folder / CONFIG, text, follow=False)

    # ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────────

    def save(
        self, step: int, model: GPT, tokenizer: Tokenizer, optimizer_state: dict[str, Tensor], facts: dict[str, Any]
    ) -> Path:
        """Write a checkpoint. A damaged one in its place is moved aside; a usable one is this very step."""
        folder = self.checkpoints / f"{PREFIX}{step:08d}"
        if folder.exists():
            try:
                return self.checkpoint(folder).folder
            except DamagedError:
                self.set_aside(folder)
        settings = self.settings()

        def fill(partial: Path) -> None:
            write_result(model, tokenizer, partial)
            save_file(optimizer_state, partial / OPTIMIZER)
            manifest.write(partial, step=step, **facts, settings=settings)

        try:
            write_folder(folder, fill)
        except (OSError, SafetensorError) as reason:
            raise HandgradError(
                f"step {step} could not be saved: {reason}. Earlier checkpoints are untouched: make room, then --resume"
            ) from None
        return folder

    def set_aside(self, folder: Path) -> Path:
        """Rename a damaged checkpoint, so that its step can be saved anew."""
        names = (folder.with_name(f"damaged-{folder.name}{f'-{i}' if i else ''}") for i in range(1 << 30))
        place = next(path for path in names if not path.exists())
        os.rename(folder, place)
        return place

    def prune(self, keep: int) -> None:
        """Delete all usable checkpoints but the newest `keep` and the best."""
        found = list(self.usable())
        best = self.best().folder if found else None
        for old in found[keep:]:
            if old.folder != best:
                remove_folder(old.folder)

    # ── metrics ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def log(self, record: dict[str, Any]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(self.folder / METRICS, flags, 0o666), "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the metrics of steps that will be taken again."""
        kept = [record for record in self.records() if record["step"] <= step]
        write_text(self.folder / METRICS, "".join(json.dumps(record) + "\n" for record in kept), follow=False)


def write_result(model: GPT, tokenizer: Tokenizer, folder: Path) -> None:
    """What other tools open: the model, or its adapter alone if it has one, and the tokenizer."""
    if model.adapter is not None:
        peft.write(model, folder)
    else:
        write_model(model, folder)
        end = {} if tokenizer.end is None else {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
        generation = {"do_sample": True, "max_length": model.config.n_context, **end}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.write(folder)
