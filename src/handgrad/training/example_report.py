"""What a run has found out about its examples: outlying gradients, and which examples pushed validation answers."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import HandgradError, option
from ..files.atomic import write_text
from ..files.reading import read_json
from ..formatting import plural
from ..per_example import page, ranking
from ..per_example.inputs import as_text
from ..per_example.outliers import LISTED, Measurement, Outlier, Outlying, ranked
from ..text.examples import Examples
from .config import VALIDATION
from .job import Job
from .run import Run

INFLUENCE = "influence.json"
SHOWN = 5  # examples that are listed if fewer are outlying


def record_of(step: int, found: list[float]) -> dict[str, Any]:
    """The line of metrics.jsonl with the norms and then the losses of a step's examples, each in the order of the batch."""
    rounded = [float(f"{x:.6g}") for x in found]
    half = len(rounded) // 2
    return {"step": step, "example_norms": rounded[:half], "example_losses": rounded[half:]}


def outlying(job: Job, run: Run) -> Outlying | None:
    """The examples that fit the others least, as text; None if they were not measured."""
    found = ranking_of(job, run)
    if not found or not isinstance(job.training, Examples):
        return None
    far = sum(outlier.outlying for outlier in found)
    listed = found[: min(LISTED, max(SHOWN, far))]
    rows = [(outlier, as_text(job.training, job.tokenizer, outlier.example)) for outlier in listed]
    return Outlying(rows, far, len(found))


def ranking_of(job: Job, run: Run) -> list[Outlier]:
    """The examples by the norms of their gradients and their losses in the run's metrics."""
    if not job.options.example_norms or not isinstance(job.training, Examples):
        return []
    data = job.training
    targets = [int(np.count_nonzero(data.example(i)[1])) for i in range(data.per_epoch)]
    measured = []
    for record in run.records():
        first = (record["step"] - 1) * job.batch
        norms = record.get("example_norms", ())
        losses = record.get("example_losses", ())
        for i, (norm, loss) in enumerate(zip(norms, losses, strict=True), first):
            example = data.index(i, True)
            measured.append(Measurement(example, i // data.per_epoch, targets[example], norm, loss))
    return ranked(measured)


def check_influence(job: Job) -> None:
    """Raise before training if there are no answers whose examples could be ranked."""
    if job.options.influence and job.validation is None:
        raise HandgradError(f"{option('influence')} {VALIDATION}")


def write_influence(job: Job, run: Run, say: Callable[[str], None]) -> None:
    """Rank the training examples by how much they push the first validation answers, with the weights of the last step.
    Safe to repeat: what this step's weights have given is kept."""
    training, validation = job.training, job.validation
    if not job.options.influence or not isinstance(training, Examples) or not isinstance(validation, Examples):
        return
    file = run.folder / INFLUENCE
    count = min(job.options.influence, validation.per_epoch)
    kept = read_json(file) if file.exists() else {}
    if (kept.get("step"), kept.get("by"), len(kept.get("queries", ()))) == (job.step, "score", count):
        return
    say(f"ranking {plural(training.per_epoch, 'training example')} by their influence on {plural(count, 'answer')}")
    queries = validation.part(range(count))
    found = ranking.influence(job.model, training, queries, tokenizer=job.tokenizer)
    write_text(file, json.dumps({"step": job.step, **page.as_data(found)}) + "\n", follow=False)


def sections(job: Job, run: Run) -> str:
    """The parts of report.html about examples, or nothing."""
    parts = []
    if (found := outlying(job, run)) is not None:
        parts.append(page.outliers(found))
    file = run.folder / INFLUENCE
    if job.options.influence and file.exists():
        parts.append(page.influence(read_json(file)))
    return "".join(parts)
