"""Finished runs of train and finetune for tests, and functions that inspect a run folder."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from conftest import handgrad, link_kernels
from handgrad.display.run_progress import Silent
from handgrad.files.atomic import LEFTOVER
from handgrad.training.config import TrainOptions
from handgrad.training.distributed import Ranks
from handgrad.training.job import Job
from handgrad.training.pretrain import prepare

TEXT = "".join(f"{n} green bottles hanging on the wall, and if {n % 7} of them should fall\n" for n in range(400))
SMALL = ["--n-blocks", "1", "--d-model", "8", "--n-heads", "1", "--n-context", "16", "--batch-tokens", "64"]
OFTEN = ["--eval-every", "2", "--eval-batches", "1", "--save-every", "2", "--sample-tokens", "0", "--log-every", "2"]


def make_runs(folder: Path) -> Path:
    """Run train and finetune to their end in `folder`, which also gets their data and cache."""
    link_kernels(folder / "cache")
    os.environ["HANDGRAD_CACHE"] = str(folder / "cache")
    try:
        (folder / "text.txt").write_text(TEXT)
        lines = [json.dumps({"prompt": f"{i} + 1 =", "completion": f" {i + 1}"}) for i in range(40)]
        (folder / "examples.jsonl").write_text("\n".join(lines))
        assert handgrad("train", *train_options(folder), "--out", folder / "train").returncode == 0
        assert handgrad("finetune", *finetune_options(folder), "--out", folder / "finetune").returncode == 0
    finally:
        del os.environ["HANDGRAD_CACHE"]
    return folder


def small_job(text: Path, **options: Any) -> Job:
    """A job of a tiny model, ready to start."""
    shape = (("d_model", 16), ("n_blocks", 2), ("n_context", 16), ("n_heads", 2))
    config = TrainOptions(data=(str(text),), shape=shape, **{"batch_tokens": 64, "steps": 100, **options})
    return prepare(config, Ranks(), Silent(Console()))


def train_options(folder: Path) -> list[object]:
    return ["--data", folder / "text.txt", "--steps", 6, *SMALL, *OFTEN]


def finetune_options(folder: Path) -> list[object]:
    few = ["--eval-every", 2, "--save-every", 2, "--log-every", 1, "--sample-tokens", 0, "--batch-examples", 4]
    return ["--model", folder / "train", "--data", folder / "examples.jsonl", "--steps", 6, "--rank", 2, *few]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Copies of the weights in the checkpoint of a step: a test may change the file."""
    (file,) = (run / "checkpoints" / f"step-{step:08d}").glob("*model.safetensors")
    return {name: tensor.clone() for name, tensor in load_file(file).items()}


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def leftovers(folder: Path) -> list[Path]:
    """Temporary files and folders of interrupted writes."""
    return [path for path in folder.rglob("*") if path.name.startswith(LEFTOVER)]
