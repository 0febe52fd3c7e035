"""The folder of a run: its configuration, its metrics, and its checkpoints, of which there is always a whole one.

    run.json                       the resolved configuration
    metrics.jsonl                  a line for every step that was logged, every evaluation, every sample
    checkpoints/step-00000250/     a Hugging Face directory, or PEFT's for an adapter, and what training needs to go on:
        optimizer.safetensors      the optimizer's memory and the state of the random numbers
        training.json              step, seconds, and the size of every file: what tells a whole checkpoint
    checkpoints/best.json          which of them had the lowest validation loss
    report.html

A checkpoint is filled under another name, brought to the disk, and then renamed: one that has its name is whole.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from . import lora
from .checkpoint import write_model
from .errors import HandgradError
from .files import write_folder, write_text
from .gpt import GPT
from .tokenizer import Tokenizer

PREFIX = "step-"
RUNS = Path("runs")  # where runs go that nobody has named


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    facts: dict[str, Any]  # of training.json


class Run:
    def __init__(self, folder: Path):
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self._lock: TextIO | None = None

    # ── beginning ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def exists(self) -> bool:
        return (self.folder / "run.json").exists()

    def check_free(self) -> None:
        """Before any work is done: whether a new run can be put here."""
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            remedy = "choose another --out, or go on with it by --resume" if self.exists else "choose another --out"
            raise HandgradError(f"{self.folder} exists already: {remedy}")
        above = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise HandgradError(f"nothing can be written in {above}: choose another --out")

    def create(self, settings: dict[str, Any]) -> None:
        self.check_free()
        self.checkpoints.mkdir(parents=True)
        write_text(self.folder / "run.json", json.dumps(settings, indent=1) + "\n")

    def settings(self) -> dict[str, Any]:
        file = self.folder / "run.json"
        if not file.exists():
            raise HandgradError(f"{self.folder} is not the folder of a run: there is no run.json to resume from")
        try:
            settings: dict[str, Any] = json.loads(file.read_text())
        except ValueError as reason:
            raise HandgradError(f"{file} is not valid JSON: {reason}") from None
        return settings

    def go_on(self, settings: dict[str, Any], step: int) -> None:
        """Take a run up again at a step: on the same tokens, perhaps for longer."""
        began = self.settings()
        for what, name in (("tokens", "data"), ("validation", "data for validation")):
            if began.get(what, settings[what]) != settings[what]:
                raise HandgradError(
                    f"the {name} is not what {self.folder} began with: bring it back, or begin a new run"
                )
        write_text(self.folder / "run.json", json.dumps(settings, indent=1) + "\n")
        self._forget_after(step)

    def hold(self) -> None:
        """Only one process may train into a folder; the lock goes with the process, however it ends."""
        self._lock = open(self.folder / ".lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise HandgradError(f"another process is training into {self.folder}: wait for it, or stop it") from None
        self.checkpoints.mkdir(exist_ok=True)
        for left in self.checkpoints.glob(f".{PREFIX}*"):  # of a process that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()

    # ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────────

    def save(
        self, step: int, model: GPT, tokenizer: Tokenizer, memory: dict[str, Tensor], facts: dict[str, Any]
    ) -> Path:
        """A new checkpoint; those before it stay as they are."""
        folder = self.checkpoints / f"{PREFIX}{step:08d}"
        if folder.exists():
            if _whole(folder) is not None:
                return folder  # a step is what it is: the same one is there
            shutil.rmtree(folder)

        def fill(partial: Path) -> None:
            write_result(model, tokenizer, partial)
            save_file(memory, partial / "optimizer.safetensors")
            sizes = {file.name: file.stat().st_size for file in partial.iterdir()}
            (partial / "training.json").write_text(json.dumps({"step": step, **facts, "files": sizes}, indent=1) + "\n")

        try:
            write_folder(folder, fill)
        except (OSError, SafetensorError) as reason:
            raise HandgradError(
                f"step {step} could not be saved: {reason}. Earlier checkpoints are untouched: make room, then --resume"
            ) from None
        return folder

    def whole(self) -> Iterator[Checkpoint]:
        """The checkpoints that are complete, the newest first."""
        for folder in sorted(self.checkpoints.glob(f"{PREFIX}*"), reverse=True):
            facts = _whole(folder)
            if facts is not None:
                yield Checkpoint(folder, facts["step"], facts)

    def damaged(self) -> list[Path]:
        return [f for f in sorted(self.checkpoints.glob(f"{PREFIX}*")) if _whole(f) is None]

    def best(self) -> dict[str, Any] | None:
        file = self.checkpoints / "best.json"
        try:
            found: dict[str, Any] = json.loads(file.read_text())
            return found
        except (OSError, ValueError):
            return None

    def mark_best(self, step: int, val_loss: float) -> None:
        write_text(self.checkpoints / "best.json", json.dumps({"step": step, "val_loss": val_loss}) + "\n")

    def prune(self, keep: int) -> None:
        """Let go of all but the newest `keep` and the best."""
        best = (self.best() or {}).get("step")
        for old in list(self.whole())[keep:]:
            if old.step != best:
                doomed = old.folder.with_name(f".{old.folder.name}.old")
                os.replace(old.folder, doomed)  # so that no half-deleted checkpoint ever bears the name of one
                shutil.rmtree(doomed, ignore_errors=True)

    # ── metrics ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def log(self, record: dict[str, Any]) -> None:
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict[str, Any]]:
        if not self.metrics.exists():
            return []
        found = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # the last line of a process that was killed while it wrote
        return found

    def _forget_after(self, step: int) -> None:
        """Metrics of steps that will be taken again."""
        kept = [record for record in self.records() if record["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))


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


def _whole(folder: Path) -> dict[str, Any] | None:
    """What training.json says, if every file it lists is there with its size."""
    try:
        facts: dict[str, Any] = json.loads((folder / "training.json").read_text())
        sizes = facts["files"]
        if all((folder / name).stat().st_size == size for name, size in sizes.items()):
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def newest_run(with_checkpoint: bool = False) -> Path | None:
    """The run in runs/ that was begun or taken up last."""
    runs = [path.parent for path in RUNS.glob("*/run.json")]
    if with_checkpoint:
        runs = [path for path in runs if next(Run(path).whole(), None) is not None]
    return max(runs, key=lambda path: (path / "run.json").stat().st_mtime, default=None)


def model_folder(path: Path) -> Path:
    """Where the model lies: the folder itself, or in the folder of a run the best checkpoint, or the newest."""
    if (path / "config.json").exists() or not (path / "checkpoints").is_dir():
        return path
    run = Run(path)
    found = list(run.whole())
    if not found:
        raise HandgradError(f"{path} is the folder of a run that has no whole checkpoint yet")
    best = (run.best() or {}).get("step")
    return next((c.folder for c in found if c.step == best), found[0].folder)
