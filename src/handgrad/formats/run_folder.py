"""Read the folder of a run: settings, metrics and checkpoints. `training/run.py` writes it.

.lock                          locked by the process that trains in the folder
run.json                       options as given and as decided, with a digest
metrics.jsonl                  one line per logged step and per evaluation
checkpoints/step-00000250/     a Hugging Face or PEFT directory, plus what resuming needs:
    optimizer.safetensors      state of the optimizer and of torch's random numbers
    handgrad-manifest.json     step, run, time, validation loss, settings, SHA-256 of every file
report.html
adapter/ or model/             the result of fine-tuning
"""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import HandgradError, MissingError, option
from ..files import manifest
from ..files.manifest import DamagedError
from ..files.reading import MB, open_regular, parse_json, read_json

PREFIX = "step-"
LOCK, CONFIG, METRICS = ".lock", "run.json", "metrics.jsonl"
OPTIMIZER = "optimizer.safetensors"
RUNS = Path("runs")  # parent of runs without --out
METRICS_BYTES = 1000 * MB  # most that is read


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    step: int
    facts: dict[str, Any]  # of the manifest

    @property
    def val_loss(self) -> float:
        """Validation loss at this step; infinite if it was not evaluated."""
        found = self.facts.get("val_loss")
        return math.inf if found is None else float(found)


class RunFolder:
    """The folder of a run, read-only. A checkpoint is usable, damaged for a reason, or missing."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.checkpoints = folder / "checkpoints"

    def damage(self) -> HandgradError | None:
        """The reason why run.json is unusable, or None."""
        try:
            manifest.check_digest(read_json(self.folder / CONFIG), self.folder / CONFIG)
        except HandgradError as reason:
            return reason
        return None

    def settings(self) -> dict[str, Any]:
        """The contents of run.json; if it is damaged or missing, the copy in the newest usable checkpoint."""
        reason = self.damage()
        if reason is not None:
            for folder in reversed(self.folders()):
                with contextlib.suppress(HandgradError):
                    return dict(manifest.read(folder)["settings"])
            if isinstance(reason, MissingError):
                raise HandgradError(f"{self.folder} is not a run folder: it has no {CONFIG}") from None
            raise HandgradError(
                f"{reason.message}. Restore it, or start a new run with another {option('out')}"
            ) from None
        return {name: value for name, value in read_json(self.folder / CONFIG).items() if name != "digest"}

    def folders(self) -> list[Path]:
        """Folders of all checkpoints, usable or not, oldest first."""
        found = self.checkpoints.iterdir() if self.checkpoints.is_dir() else iter(())
        return sorted(path for path in found if re.fullmatch(rf"{PREFIX}\d{{8,}}", path.name))

    def checkpoint(self, folder: Path, contents: bool = True) -> Checkpoint:
        """Read a checkpoint; raise DamagedError with the reason if it is not usable. `contents=False` checks sizes only."""
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
        """Usable checkpoints, newest first."""
        for folder in reversed(self.folders()):
            with contextlib.suppress(DamagedError):
                yield self.checkpoint(folder, contents)

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest usable checkpoint, and why newer ones are not usable. Raises if there are checkpoints and none is."""
        reasons: list[str] = []
        for folder in reversed(self.folders()):
            try:
                return self.checkpoint(folder), reasons
            except DamagedError as reason:
                reasons.append(reason.message)
        if reasons:
            raise HandgradError(
                f"none of the {len(reasons)} checkpoints in {self.folder} is usable (nothing was changed): {reasons[0]}."
                f" Restore one, or start a new run with another {option('out')}"
            )
        return None, reasons

    def best(self) -> Checkpoint:
        """The usable checkpoint with the lowest validation loss; the newest if none was evaluated."""
        found = list(self.usable())
        if not found:
            raise HandgradError(
                f"{self.folder} is a run without a usable checkpoint: train longer, or name another model"
            )
        return min(found, key=lambda checkpoint: (checkpoint.val_loss, -checkpoint.step))

    def records(self) -> list[dict[str, Any]]:
        """The valid lines of metrics.jsonl. A killed process may leave half a line; invalid lines are skipped."""
        found = []
        with contextlib.suppress(MissingError), open_regular(self.folder / METRICS) as file:
            while file.tell() < METRICS_BYTES and (line := file.readline(MB)):
                with contextlib.suppress(HandgradError):
                    record = parse_json(line.decode(errors="replace"), METRICS)
                    if _is_record(record):
                        found.append(record)
        return found


_METRICS = ("loss", "val_loss", "lr", "tokens_per_second", "tokens", "seconds", "memory")


def _is_record(record: Any) -> bool:
    """Whether a line is an evaluation, the norms of a step's examples, or a logged step with everything the report shows."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    if "example_norms" in record:
        norms, losses = record["example_norms"], record.get("example_losses")
        if not isinstance(norms, list) or not isinstance(losses, list) or len(norms) != len(losses):
            return False
        return all(isinstance(x, int | float) and math.isfinite(x) for x in (*norms, *losses))
    needed = ("val_loss",) if "val_loss" in record else tuple(name for name in _METRICS if name != "val_loss")
    norms = record.get("grad_norms", {})
    return (
        all(isinstance(record.get(name), int | float) and math.isfinite(record[name]) for name in needed)
        and all(isinstance(record.get(name), str) for name in ("sample", "prompt") if "sample" in record)
        and isinstance(norms, dict)
        and all(isinstance(x, int | float) for x in norms.values())
    )


def newest_run(with_checkpoint: bool = False, launch: str | None = None) -> Path | None:
    """The run in runs/ that was started or resumed last, optionally by a given launch of torchrun."""
    runs = [path.parent for path in RUNS.glob(f"*/{CONFIG}")]
    if with_checkpoint:
        runs = [path for path in runs if next(RunFolder(path).usable(), None) is not None]
    if launch is not None:
        runs = [path for path in runs if _launch_of(path) == launch]
    return max(runs, key=lambda path: (path / CONFIG).stat().st_mtime, default=None)


def _launch_of(folder: Path) -> str | None:
    try:
        return RunFolder(folder).settings().get("launch")
    except HandgradError:
        return None


def model_folder(path: Path) -> Path:
    """The path itself, or the best checkpoint if it is a run folder."""
    if (path / "config.json").exists() or not (path / "checkpoints").is_dir():
        return path
    return RunFolder(path).best().folder
