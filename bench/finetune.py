"""The command `handgrad finetune` against the same fine-tuning by transformers + peft: the same model, examples and order,
initial factors, AdamW and clipping. Each runs in its own process, in turns."""

import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from handgrad.display.run_progress import Silent
from handgrad.errors import HandgradError
from handgrad.formats import models
from handgrad.gguf.file import is_gguf
from handgrad.model.precision import why_not_mixed
from handgrad.plan.estimate import Plan
from handgrad.plan.timing import predict
from handgrad.training.config import FinetuneOptions
from handgrad.training.distributed import Ranks
from handgrad.training.finetune import prepare
from handgrad.training.lifecycle import Request, dry_run
from handgrad.training.run_plan import plan_job

from .attempts import Attempts, WrongError, fill_in
from .bases import Base, base_of, lengths_of
from .cases import PEFT
from .compete import ROUNDED_LOSS
from .in_transformers import RANK
from .measure import Timing, timed_rows
from .peers import BATCH
from .process import run_alone, with_torch
from .row import AUTOCAST, MIXED, TWO_BYTES, Row, is_rounded
from .sizes import Size

LR = 1e-4
Options = dict[str, Any]  # of handgrad finetune
PACKED: Options = {"packed": True}
RECOMPUTE: Options = {"recompute": "blocks"}
IN_MIXED: Options = {"precision": MIXED}
METHOD = (
    "equal losses at every step, except for rounding to bfloat16; the peer takes turns with torch's memory settings and"
    " handgrad's, the better ones count;"
    " best and tokens/s: of a step, padding not counted; "
)
# Peers take turns with the default memory settings of torch and the C library, and with handgrad's (handgrad/machine.py).
MEMORY_SETTINGS: tuple[dict[str, str], ...] = (
    {"THP_MEM_ALLOC_ENABLE": "0"},
    {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)},
)


@dataclass
class Found:
    """What a process reports."""

    losses: list[float]
    seconds: list[float]  # of each step
    memory: int  # peak of the process

    @property
    def per_step(self) -> float:
        """Seconds of a step; the first one warms up and does not count."""
        return statistics.mean(self.seconds[1:])


Run = Callable[["Work", int], Found]  # of a contender in a round


@dataclass
class Work:
    """Examples in a file, and the contenders that fine-tune on them; the second is the reference."""

    name: str
    base: Base
    data: Path
    batch: int  # examples per step
    steps: int
    contenders: dict[str, Run]
    found: dict[str, list[Found]] = field(default_factory=dict)

    def take_turns(self, rounds: int, attempts: Attempts) -> None:
        """Run every contender in every round; one with other losses than the reference is wrong."""
        for i in attempts.rounds(rounds):
            for name, run in self.contenders.items():
                if (found := attempts(name, partial(run, self, i))) is not None:
                    self.found.setdefault(name, []).append(found)
        reference = self.reference
        if reference in attempts.competing(self.contenders):
            expected = self.found[reference][0].losses
            for name, runs in self.found.items():
                for found in runs:
                    attempts(name, partial(check_losses, name, found.losses, expected))

    @property
    def reference(self) -> str:
        return list(self.contenders)[1]

    def rows(self, scenario: str, note: str, attempts: Attempts, budget: float) -> list[Row]:
        """The best of all rounds of every contender, compared with the second's, and what handgrad plan predicts."""
        data = self.base.read(self.data)
        tokens = [data.size(step * self.batch, self.batch)[0] for step in range(self.steps)]
        well = {name: self.found[name] for name in attempts.competing(self.contenders)}
        timings = {name: Timing([found.per_step for found in runs]) for name, runs in well.items()}
        peak = {name: min(found.memory for found in runs) for name, runs in well.items()}
        above = {name: max(1, bytes_ - with_torch()) for name, bytes_ in peak.items()}
        mean = round(statistics.mean(tokens[1:]))
        rows = timed_rows(scenario, self.name, mean, self.contenders, timings, self.reference, attempts)
        for row, (name, run) in zip(rows, self.contenders.items(), strict=True):
            row.note = note
            if name in well:
                row.memory, row.above_torch = peak[name], above[name]
                if self.reference in well:
                    row.memory_ratio = peak[name] / peak[self.reference]
                    row.above_torch_ratio = above[name] / above[self.reference]
            if isinstance(run, Ours):
                fill_in(row, partial(self.predict, row, run, budget))
        return rows

    def predict(self, row: Row, run: "Ours", budget: float) -> None:
        """Fill in what handgrad plan says of these steps."""
        plan = run.plan(self)
        row.predicted_seconds = predict(plan, budget)
        row.predicted_memory = plan.bytes_peak + with_torch()


def check_losses(name: str, losses: list[float], reference: list[float]) -> None:
    """Raise if the losses of a step differ."""
    tolerance = ROUNDED_LOSS if is_rounded(name) else 1e-4
    for step, (a, b) in enumerate(zip(losses, reference, strict=True), 1):
        if not abs(a - b) <= tolerance * abs(b):
            raise WrongError(f"{name}: the losses of step {step} differ: {a} and {b}; nothing is reported")


# ── the contenders ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Ours:
    """`handgrad finetune` with further options."""

    options: Options = field(default_factory=dict)

    def __call__(self, work: Work, round_: int) -> Found:
        with tempfile.TemporaryDirectory(dir=work.base.folder) as scratch:
            given = {**self.given(work), "out": Path(scratch) / "run"}
            code = "from handgrad.cli.app import main; main()"
            _, memory = run_alone("handgrad finetune", code, ["finetune", *command_line(given)])
            return of_steps(step_records(Path(scratch) / "run"), memory)

    def given(self, work: Work) -> Options:
        """All options by name."""
        return {
            "model": str(work.base.path), "data": (str(work.data),), "steps": work.steps, "rank": RANK,
            "batch_examples": work.batch, "lr": LR, "schedule": "constant", "warmup": 0, "val_share": 0.0,
            "log_every": 1, "sample_tokens": 0, "save_every": 1000, **self.options,
        }  # fmt: skip

    def plan(self, work: Work) -> Plan:
        """What `handgrad finetune --dry-run` plans."""
        job = dry_run(Request(FinetuneOptions, prepare, self.given(work)), Ranks(), Silent(Console()))
        return plan_job(job)


def command_line(options: Options) -> list[str]:
    """Options as words of the command line."""
    words: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            words += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    return words


def step_records(run: Path) -> list[dict[str, Any]]:
    """The records of a run's steps, without evaluations."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def of_steps(records: list[dict[str, Any]], memory: int) -> Found:
    seconds = [0.0, *(record["seconds"] for record in records)]
    return Found([record["loss"] for record in records], [b - a for a, b in itertools.pairwise(seconds)], memory)


def name_of(options: Options) -> str:
    """The name of handgrad finetune with these options."""
    return f"… {' '.join(command_line(options))}"


def theirs(checkpointing: bool = False, autocast: bool = False, two_bytes: bool = False) -> Run:
    """transformers + peft on batches of BATCH examples, each padded to its longest."""

    def run(work: Work, round_: int) -> Found:
        settings = MEMORY_SETTINGS[round_ % 2]
        return run_peer(
            work.base, work.data, work.batch, [LR] * work.steps, settings, checkpointing, autocast, two_bytes
        )

    return run


def ours_and_theirs(size: Size, checkpointing: bool = False) -> dict[str, Run]:
    """handgrad finetune and transformers + peft, in float32 and `in_mixed` precision."""
    name = PEFT + ", checkpointing" * checkpointing
    found: dict[str, Run] = {"handgrad finetune": Ours(), name: theirs(checkpointing)}
    if in_mixed(size):
        found[name_of(IN_MIXED)] = Ours(IN_MIXED)
        found[name + AUTOCAST] = theirs(checkpointing, autocast=True)
    return found


def in_mixed(size: Size) -> bool:
    """Whether the size and this machine have contenders with operands in bfloat16."""
    return "finetune" in size.mixed and why_not_mixed() is None


def run_peer(
    base: Base,
    data: Path,
    batch: int,
    lrs: list[float],
    memory_settings: dict[str, str] = MEMORY_SETTINGS[0],
    checkpointing: bool = False,
    autocast: bool = False,
    two_bytes: bool = False,
) -> Found:
    """The first steps of fine-tuning on the examples of a file by transformers + peft, one for each learning rate."""
    found, folder = base.read(data), base.folder
    steps = []
    for step in range(len(lrs)):
        tokens, targets, lengths = found.batch(step * batch, batch)
        pairs = zip(tokens.split(lengths), targets.split(lengths), strict=True)
        steps.append([(ids.tolist(), expected.tolist()) for ids, expected in pairs])
    weights, dtype = ("bfloat16", "bfloat16") if two_bytes else ("base", "float32")
    work = {"base": str(folder / weights), "dtype": dtype, "start": str(folder / "start"), "lrs": lrs, "batch": BATCH}
    work |= {"checkpointing": checkpointing, "autocast": autocast, "steps": steps}
    (folder / "work.json").write_text(json.dumps(work))
    code = "from bench.peft_peer import main; main()"
    out, memory = run_alone(PEFT, code, [folder / "work.json"], memory_settings)
    return Found(**json.loads(out.splitlines()[-1]), memory=memory)


# ── the work ────────────────────────────────────────────────────────────────────────────────────────────────────────


def cases(size: Size) -> dict[str, Callable[[Attempts], list[Row]]]:
    names = [on_pieces_name(size)]
    if size.base:
        names = [f"batches of {BATCH}", "sorted by length"]
        if size.name == "tiny" or is_gguf(models.weights_folder(size.base)):
            names.append(packed_name(size))
    return {name: partial(measure, name, size) for name in names}


@cache
def works(size: Size) -> dict[str, Work]:
    """The base model and all work with it, prepared once for all cases of a process."""
    base = base_of(size, Path(tempfile.mkdtemp()))
    base.write_peers_copy()
    return {work.name: work for work in (on_instructions(base, size) if size.base else [on_pieces(base, size)])}


def measure(name: str, size: Size, attempts: Attempts) -> list[Row]:
    work = works(size)[name]
    work.take_turns(size.process_rounds, attempts)
    rows = work.rows("finetune", METHOD + memory_note(), attempts, size.measure_seconds)
    lengths = lengths_of(work.base.read(work.data))
    rows[0].note = (
        f"{work.name}: {work.base.name}, LoRA r={RANK} on all linear layers, examples of {min(lengths)} to"
        f" {max(lengths)} tokens, {work.steps} steps, the first not timed"
    )
    return rows


def memory_note() -> str:
    return (
        "memory: of the process, with the pages of mapped files; above torch: above an interpreter with torch loaded,"
        f" {with_torch() / 1e6:,.0f} MB"
    )


def on_pieces_name(size: Size) -> str:
    return f"{size.finetune[0]} examples per step"


def packed_name(size: Size) -> str:
    return f"≤ {size.packed_tokens:,} tokens per step"


def on_pieces(base: Base, size: Size) -> Work:
    """All examples in every step."""
    count, steps = size.finetune
    return Work(on_pieces_name(size), base, base.write(base.records, "data"), count, steps, ours_and_theirs(size))


def on_instructions(base: Base, size: Size) -> list[Work]:
    """BATCH real examples per step: in random order, sorted by length, and with the weights packed, beside the peer in its
    least memory."""
    rng, steps = random.Random(0), size.instruction_steps
    chosen = rng.sample(range(len(base.records)), BATCH * steps)
    lengths, records = base.lengths, base.records
    # the longest first, as by transformers' trainer; the first step is not timed, so it repeats the longest examples
    ordered = sorted(chosen[BATCH:], key=lambda i: -lengths[i])
    work = [
        Work(
            f"batches of {BATCH}", base, base.write([records[i] for i in chosen], "data"), BATCH, steps,
            ours_and_theirs(size),
        ),
        Work(
            "sorted by length", base, base.write([records[i] for i in ordered[:BATCH] + ordered], "sorted"), BATCH, steps,
            ours_and_theirs(size, checkpointing=True),
        ),
    ]  # fmt: skip
    if base.is_packed:
        limit = size.packed_tokens
        draws = [rng.sample(range(len(records)), BATCH) for _ in range(2000)]
        fitting = [draw for draw in draws if sum(lengths[i] for i in draw) <= limit]
        if not fitting:
            raise HandgradError(f"no {BATCH} of the examples have at most {limit} tokens")
        fitting.sort(key=lambda draw: -sum(lengths[i] for i in draw))
        records = [records[i] for draw in itertools.islice(itertools.cycle(fitting), steps) for i in draw]
        least = PACKED | RECOMPUTE
        contenders: dict[str, Run] = {
            name_of(PACKED): Ours(PACKED),
            "handgrad finetune": Ours(),
            name_of(least): Ours(least),
        }
        if in_mixed(size):
            contenders[name_of(PACKED | IN_MIXED)] = Ours(PACKED | IN_MIXED)
            contenders[f"{PEFT}, checkpointing{TWO_BYTES}"] = theirs(checkpointing=True, two_bytes=True)
        work.append(Work(packed_name(size), base, base.write(records, "packed"), BATCH, steps, contenders))
    return work
