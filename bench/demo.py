"""`make finetune-demo`: SmolLM2 learns from real instructions in a few minutes. `make coder-demo`: Qwen2.5-Coder 1.5B learns
the style of a code base. Prints the validation loss and answers before and after, time and memory.

    python -m bench.demo [finetune-demo|coder-demo] [--out FOLDER] [--peer]

--peer takes the first steps of the finished finetune-demo again, by transformers + peft.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.formats import models
from handgrad.formatting import clock, count, loss, percent, plural, size
from handgrad.machine import peak_memory
from handgrad.model.precision import why_not_mixed
from handgrad.plan.thread_count import using
from handgrad.text import chat_template, tokenizer
from handgrad.text.chat_template import Message
from handgrad.text.downloads import fetch
from handgrad.text.records import Location, convert
from handgrad.training.job import Job
from handgrad.training.lifecycle import Result

from .bases import Base
from .finetune import check_losses, command_line, of_steps, run_peer, step_records
from .house_style import functions
from .in_transformers import RANK
from .machine import Machine

Record = dict[str, str]

HELD_OUT = 20  # one record in so many is never trained on
QUESTIONS = 5  # the first held-out records are asked
PEER_STEPS = 3
COMMON = {
    "packed": True, "gguf": True, "rank": RANK, "steps": 32, "eval_every": 16, "log_every": 1, "sample_tokens": 0,
}  # fmt: skip
OPTIONS = {**COMMON, "recompute": "blocks", "lr": 2e-3, "batch_examples": 8}
CODER = {**COMMON, "lr": 5e-4, "batch_examples": 4}  # about 1,024 tokens a step


@dataclass(frozen=True)
class Demo:
    """What is fine-tuned on what, and where the results go."""

    folder: Path
    model: str = "smollm2"
    records: list[Record] = field(default_factory=list)  # in Alpaca's format
    options: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))
    answer_tokens: int = 40
    bits: int | None = None  # of the weights that answer
    prompt: str = "Name three primary colours."  # to try afterwards
    exports: bool = False  # times a step both ways and writes the tuned model as GGUF; otherwise a peer can be compared

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def held_out(self) -> list[Record]:
        return self.records[::HELD_OUT]

    @property
    def training(self) -> list[Record]:
        """The other records, without copies of held-out ones."""
        return [record for record in self.records if record not in self.held_out]

    def write_data(self) -> dict[str, Path]:
        """Write both parts as files; return their paths as options of hg.finetune."""
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = {"data": self.folder / "train.jsonl", "val_data": self.folder / "validation.jsonl"}
        for path, records in zip(paths.values(), (self.training, self.held_out), strict=True):
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return paths


def instructions() -> list[Record]:
    records: list[Record] = json.loads(fetch("instructions")[0].read_text())
    return records


# ── the story ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tell(demo: Demo, out: Console) -> None:
    """Fine-tune, then ask the model before and after; print everything."""
    data, machine, before = demo.write_data(), Machine.now(), peak_memory()
    say(out, command("finetune", {"model": demo.model, **data, "out": demo.run, **demo.options}), style="bold")
    begin = time.perf_counter()
    result = hg.finetune(demo.model, out=demo.run, **data, **demo.options)
    seconds = time.perf_counter() - begin
    if not result.outcome.finished:
        raise HandgradError(f"{demo.run} was stopped at step {result.job.step}: run the command again")
    peak = peak_of(step_records(demo.run))
    used = f"{size(peak)}, the whole process; {size(peak - before)} of it since the model was opened"
    with using(result.job.threads[-1][1]):
        steps = steps_both_ways(result.job) if demo.exports else ""
    ask(demo, result.path, out)
    facts(
        out,
        demo,
        result,
        {
            "time": f"{clock(seconds)} for {plural(result.job.step, 'step')}, {count(result.job.tokens)} tokens:"
            f" {result.job.tokens / result.job.seconds:,.0f} tokens/s in the steps",
            **({"a step": steps} if steps else {}),
            "peak memory": used,
            "machine": machine.after().state,
        },
    )
    next_commands(out, demo)
    if demo.exports:
        export(demo, out)


def steps_both_ways(job: Job) -> str:
    """Time the gradient of the first batch, keeping all activations and keeping those of one block at a time."""
    tokens, targets, lengths = job.training.batch(0, job.batch)

    def seconds(recompute: str) -> float:
        begin = time.perf_counter()
        job.model.loss_and_grads(tokens, targets, lengths, recompute=recompute, finished=discard)
        return time.perf_counter() - begin

    def discard(layer: list[torch.nn.Parameter]) -> None:
        for p in layer:
            p.grad = None

    kept, computed = seconds("none"), seconds("blocks")
    return f"{kept:.1f} s for {tokens.numel():,} tokens, {computed:.1f} s with --recompute blocks"


def export(demo: Demo, out: Console) -> None:
    """Write the tuned model as one GGUF file, as a user would."""
    file = demo.folder / "tuned.gguf"
    arguments = ["convert", str(demo.run), "--gguf", str(file), "--type", "Q4_K"]
    say(out, f"\n{shlex.join(['handgrad', *arguments])}", style="bold")
    if subprocess.run([sys.executable, "-m", "handgrad", *arguments], check=False).returncode:
        raise HandgradError(f"{file} was not written")
    say(out, f"{file}: {size(file.stat().st_size)}, for llama.cpp and Ollama")


def ask(demo: Demo, adapter: Path, out: Console) -> None:
    """Print the answers to the first held-out instructions, without and with the adapter."""
    asked = demo.held_out[:QUESTIONS]
    questions = [messages_of(record) for record in asked]
    model = hg.load(demo.model, bits=demo.bits)
    before = answers(model, adapter, questions, demo.answer_tokens)
    hg.lora.load(model, adapter)
    after = answers(model, adapter, questions, demo.answer_tokens)
    out.rule(f"the first {plural(len(asked), 'held-out instruction')}, answered before and after", style="dim")
    for record, messages, *found in zip(asked, questions, before, after, strict=True):
        out.print(side_by_side(messages[-1]["content"], [*found, shortened(record["output"], 5 * demo.answer_tokens)]))
    rounded = f", weights rounded to {demo.bits} bits" if demo.bits else ""
    say(out, f"greedy, at most {plural(demo.answer_tokens, 'token')} each{rounded}\n", style="dim")


def shortened(text: str, length: int) -> str:
    """About as much as an answer holds."""
    return text if len(text) <= length else f"{text[:length].rstrip()} …"


def messages_of(record: Record) -> list[Message]:
    """What handgrad finetune makes of a record, without the answer."""
    messages: list[Message] = convert(Location(Path("validation.jsonl"), 1), record, chat=True)["messages"]
    return messages[:-1]


def answers(model: hg.GPT, folder: Path, questions: Sequence[list[Message]], tokens: int) -> list[str]:
    """The most probable answers, through the tokenizer and the chat template in `folder`."""
    vocabulary = tokenizer.read(folder)
    template = chat_template.of_files(vocabulary.extra_files, folder)
    found = []
    for messages in questions:
        ids = vocabulary.encode(template.render(messages, add_generation_prompt=True))
        new = hg.generate(model, torch.tensor([ids]), tokens)[0].tolist()
        ended = new.index(vocabulary.end) if vocabulary.end in new else None
        found.append(vocabulary.decode(new[:ended]).strip() + ("" if ended is not None else " …"))
    return found


def side_by_side(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, expand=True, pad_edge=False
    )
    for name in ("before", "after", "in the data"):
        table.add_column(name, ratio=1, overflow="fold", header_style="dim")
    table.add_row(*map(Text, columns))
    return table


def facts(out: Console, demo: Demo, result: Result, measured: dict[str, str]) -> None:
    """Print loss, what was measured, and files."""
    job = result.job
    assert result.val_loss is not None
    fall = 1 - result.val_loss / job.initial
    files = [file for file in result.path.iterdir() if file.suffix == ".safetensors"]
    weights = size(sum(file.stat().st_size for file in files))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in {
        "validation loss": f"{loss(job.initial)} before, {loss(result.val_loss)} after ({percent(fall)} lower),"
        f" on {plural(len(demo.held_out), 'held-out example')}",
        **measured,
        "adapter": f"{result.path} ({weights}, PEFT's format)",
        "for llama.cpp": str(demo.run / "adapter.gguf"),
        "report": str(demo.run / "report.html"),
    }.items():
        table.add_row(name, value)
    out.print(table, highlight=False)


def peak_of(records: list[dict[str, Any]]) -> int:
    """Peak memory of the process up to the last of these steps."""
    return max(record["memory"] for record in records)


def next_commands(out: Console, demo: Demo) -> None:
    say(out, "\nnext", style="bold")
    for line in (
        command("generate", {"model": demo.run, "chat": demo.prompt, "temperature": 0}),
        f"handgrad merge {demo.run} --out {demo.folder / 'merged'}",
        *([] if demo.exports else ["make finetune-demo-peer    # the first steps again, by transformers + peft"]),
    ):
        say(out, f"  {line}")


# ── beside transformers + peft ──────────────────────────────────────────────────────────────────────────────────────


def compare(demo: Demo, out: Console) -> None:
    """Take the first steps of the finished run again with transformers + peft; print losses, times and memory of both."""
    if not (demo.run / "adapter").exists():
        raise HandgradError(f"{demo.run} holds no finished run: start with make finetune-demo")
    machine = Machine.now()
    records, data = step_records(demo.run)[:PEER_STEPS], demo.folder / "train.jsonl"
    ours, batch = of_steps(records, peak_of(records)), demo.options["batch_examples"]
    with tempfile.TemporaryDirectory(dir=demo.folder) as scratch:
        base = Base(demo.model, models.weights_folder(demo.model), Path(scratch), "", [])
        base.write_peers_copy()
        examples = base.read(data)
        say(
            out,
            f"{plural(len(records), 'step')} by transformers + peft (15 GB for SmolLM2) …",
            style="dim",
        )
        peer = run_peer(base, data, batch, [record["lr"] for record in records])
    check_losses(demo.model, ours.losses, peer.losses)

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "tokens", "handgrad", "transformers + peft", "handgrad", "transformers + peft"):
        table.add_column(name, justify="right")
    for i, (a, b) in enumerate(zip(ours.losses, peer.losses, strict=True)):
        tokens = examples.size(i * batch, batch)[0]
        times = (f"{found.seconds[i]:.1f} s" for found in (ours, peer))
        table.add_row(str(i + 1), count(tokens), f"loss {a:.5f}", f"loss {b:.5f}", *times)
    table.add_row("", "", "", "", size(ours.memory), size(peer.memory))
    out.print(table, highlight=False)
    say(out, f"memory of the process: {ours.memory / peer.memory:.2f} of the peer's; {machine.state}", style="dim")
    if machine.busy:
        say(out, machine.warning, style="bold red")
    else:
        say(out, f"a step: {peer.per_step / ours.per_step:.1f} times as fast, without the first", style="dim")
    say(
        out,
        "handgrad's steps are those of make finetune-demo, timed then; handgrad bench finetune --model smollm2 takes turns",
        style="dim",
    )


# ── the demos ───────────────────────────────────────────────────────────────────────────────────────────────────────


def coder(folder: Path) -> Demo:
    """Qwen2.5-Coder learns how one code base writes functions. In mixed precision, if this processor has it."""
    options = CODER if why_not_mixed() else {**CODER, "precision": "mixed"}
    prompt = "Write the Python function second_largest(numbers): Return the second largest number."
    return Demo(folder, "qwen-coder", functions(), options, answer_tokens=160, bits=8, prompt=prompt, exports=True)


DEMOS: dict[str, Callable[[Path], Demo]] = {
    "finetune-demo": lambda folder: Demo(folder, records=instructions()),
    "coder-demo": coder,
}


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def command(name: str, options: dict[str, Any]) -> str:
    """The same on the command line: lr=1e-3, packed=True → --lr 1e-3 --packed"""
    return shlex.join(["handgrad", name, *command_line(options)])


def say(out: Console, text: str, style: str = "") -> None:
    out.print(text, style=style, highlight=False, soft_wrap=True, markup=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__)
    parser.add_argument("name", nargs="?", choices=DEMOS, default="finetune-demo")
    parser.add_argument("--out", type=Path, help="folder for data and results (default: build/NAME)")
    parser.add_argument("--peer", action="store_true", help="take the first steps again, by transformers + peft")
    options = parser.parse_args(arguments)
    out = Console(emoji=False)
    try:
        demo = DEMOS[options.name](options.out or Path("build") / options.name)
        if not out.is_terminal:
            out.width = 150 if demo.exports else 100
        (compare if options.peer else tell)(demo, out)
    except HandgradError as mistake:
        sys.exit(f"{options.name}: {mistake}")


if __name__ == "__main__":
    main()
