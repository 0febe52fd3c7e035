"""The command `handgrad finetune` against the same fine-tuning by transformers + peft: the same model, examples and order,
initial factors, AdamW and clipping. Each runs in its own process, in turns."""

import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handgrad.errors import HandgradError

from .bases import Base, base_of, lengths_of
from .cases import Row
from .measure import Watch
from .peers import RANK
from .process import run_alone, with_torch
from .sizes import Size

LR, BATCH = 1e-4, 8  # BATCH examples are computed at once by the peer
PACKED, RECOMPUTE = ("--packed",), ("--recompute", "blocks")
METHOD = (
    "equal losses at every step; the peer takes turns with torch's memory settings and handgrad's, the better ones count;"
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

    def take_turns(self, rounds: int, watch: Watch) -> None:
        """Run every contender in every round; raise if a loss differs."""
        for i in watch(range(rounds)):
            for name, run in self.contenders.items():
                self.found.setdefault(name, []).append(run(self, i))
        reference = self.found[list(self.contenders)[min(1, len(self.contenders) - 1)]][0].losses
        for name, runs in self.found.items():
            for found in runs:
                check_losses(f"{self.name}, {name}", found.losses, reference)

    def rows(self, scenario: str, note: str) -> list[Row]:
        """The best of all rounds of every contender, compared with the second's."""
        data = self.base.read(self.data)
        tokens = [data.size(step * self.batch, self.batch)[0] for step in range(self.steps)]
        best = {name: min(found.per_step for found in runs) for name, runs in self.found.items()}
        peak = {name: min(found.memory for found in runs) for name, runs in self.found.items()}
        above = {name: max(1, bytes_ - with_torch()) for name, bytes_ in peak.items()}
        rows = []
        for name, runs in self.found.items():
            row = Row(scenario, self.name, name, round(statistics.mean(tokens[1:])), best[name])
            row.median = statistics.median(found.per_step for found in runs)
            row.memory, row.above_torch, row.note = peak[name], above[name], note
            if len(best) > 1:
                reference = list(best)[1]
                row.ratio = best[reference] / best[name]
                row.memory_ratio = peak[name] / peak[reference]
                row.above_torch_ratio = above[name] / above[reference]
            rows.append(row)
        return rows


def check_losses(name: str, losses: list[float], reference: list[float]) -> None:
    """Raise if the losses of a step differ."""
    for step, (a, b) in enumerate(zip(losses, reference, strict=True), 1):
        if not abs(a - b) <= 1e-4 * abs(b):
            raise HandgradError(f"{name}: the losses of step {step} differ: {a} and {b}; nothing is reported")


# ── the contenders ──────────────────────────────────────────────────────────────────────────────────────────────────


def ours(*options: str) -> Run:
    """`handgrad finetune` with further options."""

    def run(work: Work, round_: int) -> Found:
        with tempfile.TemporaryDirectory(dir=work.base.folder) as scratch:
            given = {
                "model": work.base.path, "data": work.data, "out": Path(scratch) / "run", "steps": work.steps,
                "rank": RANK, "batch-examples": work.batch, "lr": LR, "schedule": "constant", "warmup": 0,
                "val-share": 0, "log-every": 1, "sample-tokens": 0, "save-every": 1000,
            }  # fmt: skip
            arguments = [str(x) for name, value in given.items() for x in (f"--{name}", value)]
            code = "from handgrad.cli.app import main; main()"
            _, memory = run_alone("handgrad finetune", code, ["finetune", *arguments, *options])
            return of_steps(step_records(Path(scratch) / "run"), memory)

    return run


def step_records(run: Path) -> list[dict[str, Any]]:
    """The records of a run's steps, without evaluations."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def of_steps(records: list[dict[str, Any]], memory: int) -> Found:
    seconds = [0.0, *(record["seconds"] for record in records)]
    return Found([record["loss"] for record in records], [b - a for a, b in itertools.pairwise(seconds)], memory)


def options_of(options: tuple[str, ...]) -> str:
    """The name of handgrad finetune with these options."""
    return f"… {' '.join(options)}"


def theirs(checkpointing: bool = False) -> Run:
    """transformers + peft on batches of BATCH examples, each padded to its longest."""

    def run(work: Work, round_: int) -> Found:
        settings = MEMORY_SETTINGS[round_ % 2]
        return run_peer(work.base, work.data, work.batch, [LR] * work.steps, settings, checkpointing)

    return run


def run_peer(
    base: Base,
    data: Path,
    batch: int,
    lrs: list[float],
    memory_settings: dict[str, str] = MEMORY_SETTINGS[0],
    checkpointing: bool = False,
) -> Found:
    """The first steps of fine-tuning on the examples of a file by transformers + peft, one for each learning rate."""
    found, folder = base.read(data), base.folder
    steps = []
    for step in range(len(lrs)):
        tokens, targets, lengths = found.batch(step * batch, batch)
        pairs = zip(tokens.split(lengths), targets.split(lengths), strict=True)
        steps.append([(ids.tolist(), expected.tolist()) for ids, expected in pairs])
    work = {"base": str(folder / "base"), "start": str(folder / "start"), "lrs": lrs, "batch": BATCH}
    (folder / "work.json").write_text(json.dumps(work | {"checkpointing": checkpointing, "steps": steps}))
    code = "from bench.peft_peer import main; main()"
    out, memory = run_alone("transformers + peft", code, [folder / "work.json"], memory_settings)
    return Found(**json.loads(out.splitlines()[-1]), memory=memory)


# ── the work ────────────────────────────────────────────────────────────────────────────────────────────────────────


def finetune(size: Size, watch: Watch) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        base = base_of(size, Path(scratch))
        base.write_peers_copy()
        for work in on_instructions(base, size) if size.base else [on_pieces(base, size)]:
            work.take_turns(size.process_rounds, watch)
            found = work.rows("finetune", METHOD + memory_note())
            lengths = lengths_of(base.read(work.data))
            found[0].note = (
                f"{work.name}: {base.name}, LoRA r={RANK} on all linear layers, examples of {min(lengths)} to"
                f" {max(lengths)} tokens, {work.steps} steps, the first not timed"
            )
            rows += found
    return rows


def memory_note() -> str:
    return f"memory: of the process; above torch: above an interpreter with torch loaded, {with_torch() / 1e6:,.0f} MB"


def on_pieces(base: Base, size: Size) -> Work:
    """All examples in every step."""
    count, steps = size.finetune
    contenders = {"handgrad finetune": ours(), "transformers + peft": theirs()}
    return Work(f"{count} examples per step", base, base.write(base.records, "data"), count, steps, contenders)


def on_instructions(base: Base, size: Size) -> list[Work]:
    """BATCH real examples per step: in random order, sorted by length, and with the weights packed."""
    rng, steps = random.Random(0), size.instruction_steps
    chosen = rng.sample(range(len(base.records)), BATCH * steps)
    lengths, records = base.lengths, base.records
    # the longest first, as by transformers' trainer; the first step is not timed, so it repeats the longest examples
    ordered = sorted(chosen[BATCH:], key=lambda i: -lengths[i])
    work = [
        Work(
            f"batches of {BATCH}", base, base.write([records[i] for i in chosen], "data"), BATCH, steps,
            {"handgrad finetune": ours(), "transformers + peft": theirs()},
        ),
        Work(
            "sorted by length", base, base.write([records[i] for i in ordered[:BATCH] + ordered], "sorted"), BATCH, steps,
            {"handgrad finetune": ours(), "transformers + peft, checkpointing": theirs(checkpointing=True)},
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
        contenders = {
            options_of(PACKED): ours(*PACKED),
            "handgrad finetune": ours(),
            options_of(PACKED + RECOMPUTE): ours(*PACKED, *RECOMPUTE),
        }
        work.append(Work(f"≤ {limit:,} tokens per step", base, base.write(records, "packed"), BATCH, steps, contenders))
    return work
