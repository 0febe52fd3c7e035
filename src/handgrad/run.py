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
import math
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from . import lora, manifest
from .checkpoint import write_model
from .errors import HandgradError, MissingError
from .files import remove_folder, sweep, write_folder, write_text
from .gpt import GPT
from .manifest import DamagedError
from .reading import MB, open_regular, parse_json, read_json
from .tokenizer import Tokenizer

PREFIX = "step-"
LOCK, CONFIG, METRICS = ".lock", "run.json", "metrics.jsonl"
OPTIMIZER = "optimizer.safetensors"
RUNS = Path("runs")  # where runs go that have no --out
METRICS_BYTES = 1000 * MB


class LockedError(HandgradError):
    """Another process is training into the folder."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    facts: dict[str, Any]  # of the manifest

    @property
    def val_loss(self) -> float:
        """At this step, if it was evaluated; else infinite."""
        found = self.facts.get("val_loss")
        return math.inf if found is None else float(found)


class Run:
    def __init__(self, folder: Path):
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
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

    def damage(self) -> HandgradError | None:
        """What is wrong with run.json, if anything is."""
        try:
            manifest.check_digest(read_json(self.folder / CONFIG), self.folder / CONFIG)
        except HandgradError as reason:
            return reason
        return None

    def settings(self) -> dict[str, Any]:
        """What run.json says; if it is damaged or missing, what the newest usable checkpoint says it said."""
        reason = self.damage()
        if reason is not None:
            for folder in reversed(self.folders()):
                with contextlib.suppress(HandgradError):
                    return dict(manifest.read(folder)["settings"])
            if isinstance(reason, MissingError):
                raise HandgradError(f"{self.folder} is not the folder of a run: it has no {CONFIG}") from None
            raise HandgradError(f"{reason}. Restore it, or start a new run with another --out") from None
        return {name: value for name, value in read_json(self.folder / CONFIG).items() if name != "digest"}

    # ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────────

    def folders(self) -> list[Path]:
        """Of all checkpoints, usable or not, oldest first."""
        found = self.checkpoints.iterdir() if self.checkpoints.is_dir() else iter(())
        return sorted(path for path in found if re.fullmatch(rf"{PREFIX}\d{{8,}}", path.name))

    def checkpoint(self, folder: Path, contents: bool = True) -> Checkpoint:
        """A usable checkpoint. DamagedError with the reason if it is not; `contents=False` compares sizes only."""
        try:
            facts = manifest.check(folder, [OPTIMIZER], contents)
        except MissingError:
            raise DamagedError(f"{folder} has no {manifest.FILE}") from None
        step, settings = facts.get("step"), facts.get("settings")
        if not isinstance(step, int) or not isinstance(settings, dict) or folder.name != f"{PREFIX}{step:08d}":
            raise DamagedError(f"{folder} is not a checkpoint of step {folder.name.removeprefix(PREFIX)}")
        if settings.get("id") != self.settings().get("id"):
            raise DamagedError(f"{folder} belongs to another run")
        return Checkpoint(folder, step, facts)

    def usable(self, contents: bool = False) -> Iterator[Checkpoint]:
        """The usable checkpoints, newest first."""
        for folder in reversed(self.folders()):
            with contextlib.suppress(DamagedError):
                yield self.checkpoint(folder, contents)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest usable checkpoint, and why newer ones are not. An error if there are checkpoints and none is usable."""
        reasons: list[str] = []
        for folder in reversed(self.folders()):
            try:
                return self.checkpoint(folder), reasons
            except DamagedError as reason:
                reasons.append(str(reason))
        if reasons:
            raise HandgradError(
                f"none of the {len(reasons)} checkpoints in {self.folder} is usable, and nothing was changed: {reasons[0]}."
                " Restore one, or start a new run with another --out"
            )
        return None, reasons

    def best(self) -> Checkpoint:
        """The usable checkpoint with the lowest validation loss; the newest if none was evaluated."""
        found = list(self.usable())
        if not found:
            raise HandgradError(f"{self.folder} is the folder of a run that has no usable checkpoint")
        return min(found, key=lambda checkpoint: (checkpoint.val_loss, -checkpoint.step))

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

    def records(self) -> list[dict[str, Any]]:
        """The readable lines of metrics.jsonl: a killed process may leave half of one, a bad disk anything."""
        found = []
        with contextlib.suppress(MissingError), open_regular(self.folder / METRICS) as file:
            for line in file.read(METRICS_BYTES).split(b"\n"):
                with contextlib.suppress(HandgradError):
                    record = parse_json(line.decode(errors="replace"), METRICS)
                    if _is_record(record):
                        found.append(record)
        return found

    def forget_after(self, step: int) -> None:
        """Drop the metrics of steps that will be taken again."""
        kept = [record for record in self.records() if record["step"] <= step]
        write_text(self.folder / METRICS, "".join(json.dumps(record) + "\n" for record in kept), follow=False)


NUMBERS = ("loss", "val_loss", "lr", "tokens_per_second", "tokens", "seconds", "memory")


def _is_record(record: Any) -> bool:
    """An evaluation, or a logged step with everything the report shows."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    needed = ("val_loss",) if "val_loss" in record else tuple(name for name in NUMBERS if name != "val_loss")
    norms = record.get("grad_norms", {})
    return (
        all(isinstance(record.get(name), int | float) and math.isfinite(record[name]) for name in needed)
        and isinstance(record.get("sample", ""), str)
        and isinstance(norms, dict)
        and all(isinstance(x, int | float) for x in norms.values())
    )


def write_result(model: GPT, tokenizer: Tokenizer, folder: Path) -> None:
    """What other tools open: the model, or its adapter alone if it has one, and the tokenizer."""
    if model.adapter is not None:
        lora.files.write(model, folder)
    else:
        write_model(model, folder)
        end = {} if tokenizer.end is None else {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
        generation = {"do_sample": True, "max_length": model.config.n_context, **end}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.write(folder)


def newest_run(with_checkpoint: bool = False, launch: str | None = None) -> Path | None:
    """The run in runs/ that was started or resumed last; with `launch`, by this launch of torchrun."""
    runs = [path.parent for path in RUNS.glob(f"*/{CONFIG}")]
    if with_checkpoint:
        runs = [path for path in runs if next(Run(path).usable(), None) is not None]
    if launch is not None:
        runs = [path for path in runs if _launch_of(path) == launch]
    return max(runs, key=lambda path: (path / CONFIG).stat().st_mtime, default=None)


def _launch_of(folder: Path) -> str | None:
    try:
        return Run(folder).settings().get("launch")
    except HandgradError:
        return None


def model_folder(path: Path) -> Path:
    """The folder of the model: the path itself, or the best checkpoint if it is a run's."""
    if (path / "config.json").exists() or not (path / "checkpoints").is_dir():
        return path
    return Run(path).best().folder
