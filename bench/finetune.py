"""`handgrad finetune` as a user runs it, against transformers + peft doing the same: the same model, the same lines of
JSON in the same order, the same initial factors, AdamW and clipping. Each in a process of its own."""

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
from handgrad import examples, tokenizer
from handgrad.errors import HandgradError
from handgrad.material import get

RANK, LR, MICRO = 16, 1e-4, 8
ROOT = Path(__file__).parent.parent


def prepare(folder: Path, count: int, small: bool) -> None:
    """A GPT-2 of 124M random weights (or a tiny one, for tests), its vocabulary, and uneven examples: stretches of
    Shakespeare whose lengths are spread as those of instructions are, the first eighth of each as its prompt."""
    words = tokenizer.make("gpt2", [])
    shape = {"n_context": 1024, "d_model": 24, "n_heads": 2, "n_blocks": 2} if small else {}
    hg.save(hg.GPT(hg.preset("gpt2", **shape), seed=0), folder / "base")
    words.write(folder / "base")
    text = get("shakespeare")[0].read_text()
    draw = random.Random(0)
    with open(folder / "data.jsonl", "w") as file:
        for _ in range(count):
            length = 3 * int(min(900, max(20, draw.lognormvariate(4.9, 0.85))))  # about three characters a token
            at = draw.randrange(len(text) - length)
            cut = at + max(30, length // 8)
            file.write(json.dumps({"prompt": text[at:cut], "completion": text[cut : at + length]}) + "\n")
    model = hg.load(folder / "base")
    hg.lora.inject(model, RANK)
    hg.lora.save(model, folder / "start")


def ours(folder: Path, count: int, steps: int) -> dict[str, Any]:
    """Every step's loss and seconds, and the highest point of the process's memory."""
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
        raise HandgradError(f"handgrad finetune failed: {done.stderr.strip()}")
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [0.0, *(r["seconds"] for r in records)]
    return {
        "losses": [r["loss"] for r in records],
        "seconds": [b - a for a, b in itertools.pairwise(seconds)],
        "memory": max(r["memory"] for r in records),
    }


def theirs(folder: Path, count: int, steps: int) -> dict[str, Any]:
    code = f"from bench.finetune import peer; peer({str(folder)!r}, {count}, {steps})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise HandgradError(f"transformers + peft failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def peer(place: str, count: int, steps: int) -> None:
    """Run in a process of its own: batches of MICRO examples padded to the longest of each, as its trainer makes them,
    accumulated to the same step."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from .peers import padded

    folder = Path(place)
    words = tokenizer.read(folder / "base")
    data, _ = examples.read([folder / "data.jsonl"], words, 1024)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="sdpa")
    network = PeftModel.from_pretrained(base, folder / "start", is_trainable=True).eval()  # its dropout is not ours
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


def side_by_side(count: int, steps: int, small: bool = False) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Both, after their losses were found equal, and how many tokens a step has."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder, count, small)
        hand, peft = ours(folder, count, steps), theirs(folder, count, steps)
        for step, (a, b) in enumerate(zip(hand["losses"], peft["losses"], strict=True), 1):
            if abs(a - b) > 1e-4 * abs(b):
                raise HandgradError(f"finetune: the losses of step {step} differ: {a} and {b}; nothing is reported")
        data, _ = examples.read([folder / "data.jsonl"], tokenizer.read(folder / "base"), 1024)
        return hand, peft, data.size(0, count)[0]
