"""Change single bytes at random in every file of a run, its checkpoints, its adapter and its token cache.

Each change must be detected or have no effect, and never cause a traceback. `make long` does ten thousand.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import handgrad as hg
from handgrad import lora
from handgrad.formats import models
from handgrad.text import corpus
from handgrad.training.run import Run
from runs import make_runs

CHANGES = int(os.environ.get("HANDGRAD_CORRUPTIONS", "600"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of train and of finetune, a saved adapter and model, and token caches."""
    folder = make_runs(tmp_path_factory.mktemp("corruption"))
    model = hg.load(folder / "train")
    hg.save(model, folder / "saved")
    lora.inject(model, rank=2, targets="all-linear")
    lora.save(model, folder / "adapter")
    return folder


def run_state(folder: Path) -> Any:
    """What a resumed run starts from."""
    run = Run(folder)
    checkpoint, _ = run.newest()
    assert checkpoint is not None
    return checkpoint.step, run.settings(), run.records()


def model_state(folder: Path) -> Any:
    model = hg.load(folder)
    return {name: p.clone() for name, p in model.named_parameters()}, models.tokenizer_of(folder).to_json()


def adapter_state(model: hg.GPT) -> Callable[[Path], Any]:
    def state(folder: Path) -> Any:
        lora.load(model, folder)
        found = {name: p.clone() for name, p in model.named_parameters()}
        lora.remove(model)
        return found

    return state


def tokens_state(file: Path) -> Any:
    found = corpus.read(file)
    return found.vocabulary, found.ids.dtype.str, found.ids.tolist()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and any(isinstance(x, torch.Tensor) for x in one.values()):
        return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_every_changed_byte_is_detected_or_harmless(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDGRAD_CACHE", str(made / "cache"))
    cases: list[tuple[Path, Path, Callable[[Path], Any]]] = []  # file, what to read, how
    for name in ("train", "finetune"):
        run = made / name
        inside = [run / "run.json", run / "metrics.jsonl", *(f for c in Run(run).folders() for f in c.iterdir())]
        cases += [(file, run, run_state) for file in inside]
    best = Run(made / "train").best().folder
    for folder in (best, made / "finetune" / "adapter", made / "saved"):
        read = model_state if folder.name != "saved" else lambda f: dict(hg.load(f).named_parameters())
        unread = ("optimizer.safetensors",)  # only training reads it
        cases += [(file, folder, read) for file in folder.iterdir() if file.name not in unread]
    read = adapter_state(hg.load(made / "train"))
    cases += [(file, made / "adapter", read) for file in (made / "adapter").iterdir()]
    cases += [(file, file, tokens_state) for file in (made / "cache" / "tokens").iterdir()]

    expected = {(target, read): read(target) for _, target, read in cases}
    generator = random.Random(CHANGES)
    detected = harmless = 0
    for i in range(CHANGES):
        file, target, read = cases[i % len(cases)]
        original = file.read_bytes()
        changed = bytearray(original)
        changed[generator.randrange(len(changed))] ^= generator.randrange(1, 256)
        file.unlink()  # the old file may be memory-mapped
        file.write_bytes(changed)
        truth = expected[target, read]
        try:
            found = read(target)
        except hg.HandgradError:
            detected += 1
        else:
            if equal(found, truth):
                harmless += 1
            elif read is run_state and "checkpoints" in file.parts:
                assert found[0] < truth[0] and equal(found[1:], truth[1:]), f"{file}: an older checkpoint is used"
                detected += 1
            elif file.name == "metrics.jsonl":  # a log: a line may be lost, or show another number
                assert equal(found[:2], truth[:2])
                harmless += 1
            else:
                raise AssertionError(f"{file} was changed, and this was not detected")
        file.unlink()
        file.write_bytes(original)
    assert detected > CHANGES / 2, (detected, harmless)


def test_without_manifests_changes_go_undetected(made: Path) -> None:
    """Shows that the test above can fail."""
    folder = made / "unchecked"
    shutil.copytree(made / "saved", folder)
    (folder / "handgrad-manifest.json").unlink()
    truth = {name: p.clone() for name, p in hg.load(folder).named_parameters()}
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[-3] ^= 0x10
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(raw)
    assert not equal(dict(hg.load(folder).named_parameters()), truth)
