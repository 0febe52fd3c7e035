"""Mixtures of experts in train, finetune and serve: losses of their routers, several processes, checkpoints."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file

import handgrad as hg
from conftest import error_of, perturb, run_processes, save_with_bytes, succeed, use_empty_cache
from handgrad.families import FAMILIES
from handgrad.proof.oracles import relative_error
from handgrad.serve.routes import Server
from handgrad.serve.served_models import open_models
from handgrad.training.run import Run
from runs import TEXT, weights

SHAPE: dict[str, Any] = {
    "n_vocab": 256, "n_context": 32, "d_model": 16, "n_heads": 2, "n_blocks": 2, "d_hidden": 24, "qkv_bias": False,
    "out_bias": False, "mlp_bias": False, "activation": "silu", "n_experts": 5, "experts_per_token": 2,
}  # fmt: skip
OFTEN = ["--log-every", 1, "--eval-every", 3, "--save-every", 3, "--eval-batches", 2, "--sample-tokens", 0, "--keep", 5]
LOSSES = ["--balance-loss", 0.5, "--z-loss", 0.1]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a mixture in base/, text.txt and data.jsonl."""
    use_empty_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    model = hg.GPT(hg.ModelConfig(family="mixtral", **{**FAMILIES["mixtral"].fixed, **SHAPE}), dtype=torch.float64)
    perturb(model, scale=0.1)
    save_with_bytes(model, tmp_path / "base")
    Path("text.txt").write_text(TEXT)
    lines = ({"prompt": f"{i} + {i} =", "completion": f" {2 * i} bottles"[: 5 + i % 6]} for i in range(30))
    Path("data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def train(*options: object) -> list[object]:
    base = ["train", "--model", "base", "--data", "text.txt", "--steps", 3, "--dtype", "float64", *OFTEN]
    return [*base, "--batch-tokens", 32 * 7, *options]


def logged(folder: str, name: str) -> list[float]:
    return [r[name] for r in Run(Path(folder)).records() if name in r]


@pytest.mark.parametrize(("n", "options"), [(2, []), (3, ["--update-inside"]), (2, ["--recompute", "blocks"])])
@pytest.mark.long
def test_several_processes_train_the_same_weights(workdir: Path, n: int, options: list[str]) -> None:
    """f and P are those of the whole batch, which is divided unevenly, and cut into pieces in one process alone."""
    succeed(*train(*LOSSES, *options, "--out", "one"))
    done = run_processes(n, *train(*LOSSES, *options, "--out", "many"))
    assert done.returncode == 0, done.stderr
    one, many = weights(workdir / "one", 3), weights(workdir / "many", 3)
    assert all(relative_error(many[name], one[name]) < 1e-10 for name in one)
    for name in ("loss", "balance_loss", "z_loss", "val_loss"):
        assert logged("many", name) == pytest.approx(logged("one", name), rel=1e-10)
    start = load_file(workdir / "base" / "model.safetensors")
    assert all(not torch.equal(one[name], start[name]) for name in one if "gate" in name)


def test_the_text_loss_and_those_of_the_routers_are_reported_apart(workdir: Path) -> None:
    done = succeed(*train(*LOSSES, "--out", "with"))
    succeed(*train("--out", "without"))
    for name in ("loss", "val_loss"):  # before the first update
        assert logged("with", name)[0] == pytest.approx(logged("without", name)[0], rel=1e-12)
        assert logged("with", name)[-1] != logged("without", name)[-1]
    assert not logged("without", "balance_loss")
    first = logged("with", "balance_loss")[0]
    assert f"balance loss {first:.4f}"[:18] in done.stdout and "z-loss" in done.stdout
    assert "Balance loss of the routers" in (workdir / "with" / "report.html").read_text()
    assert "Balance loss" not in (workdir / "without" / "report.html").read_text()


def test_the_coefficients_stay_with_the_model_and_the_run(workdir: Path) -> None:
    succeed(*train("--balance-loss", 0.5, "--out", "whole"))
    saved = workdir / "whole" / "checkpoints" / "step-00000003"
    config = json.loads((saved / "config.json").read_text())
    assert (config["output_router_logits"], config["router_aux_loss_coef"]) == (True, 0.5)
    assert config["model_type"] == "mixtral"
    succeed(*train("--balance-loss", 0.5, "--out", "half", "--schedule", "constant", "--warmup", 0))
    succeed("train", "--resume", "--out", "half", "--steps", 6)
    succeed(*train("--balance-loss", 0.5, "--out", "long", "--schedule", "constant", "--warmup", 0, "--steps", 6))
    a, b = weights(workdir / "half", 6), weights(workdir / "long", 6)
    assert all(torch.equal(a[name], b[name]) for name in a)
    succeed("train", "--model", saved, "--data", "text.txt", "--steps", 1, *OFTEN, "--out", "more")
    assert logged("more", "balance_loss")
    succeed("train", "--model", saved, "--data", "text.txt", "--steps", 1, *OFTEN, "--balance-loss", 0, "--out", "off")
    assert not logged("off", "balance_loss")


def test_adapters_of_two_processes(workdir: Path) -> None:
    """Examples of different lengths, so that the processes have different numbers of rows and of targets."""
    base = ["finetune", "--model", "base", "--data", "data.jsonl", "--steps", 3, "--dtype", "float64", "--rank", 2]
    base += [*OFTEN, "--batch-examples", 7, *LOSSES]
    succeed(*base, "--out", "one")
    done = run_processes(2, *base, "--out", "two")
    assert done.returncode == 0, done.stderr
    a, b = (load_file(workdir / name / "adapter" / "adapter_model.safetensors") for name in ("one", "two"))
    assert all(relative_error(b[name], a[name]) < 1e-9 for name in a)
    assert logged("two", "balance_loss") == pytest.approx(logged("one", "balance_loss"), rel=1e-10)


def test_what_does_not_fit_is_refused_before_the_run(workdir: Path) -> None:
    save_with_bytes(hg.GPT(hg.preset("nano", d_model=16, n_heads=2, n_blocks=1)), workdir / "dense")
    found = error_of("train", "--model", "dense", "--data", "text.txt", "--balance-loss", 0.1, "--out", "r")
    assert "--balance-loss 0.1 is a loss of a router" in found and "no experts" in found
    base = ["finetune", "--model", "base", "--data", "data.jsonl", "--rank", 2, "--out", "r"]
    assert "--z-loss must be at least 0" in error_of(*base, "--z-loss", -1)
    found = error_of(*base, *LOSSES, "--example-norms")
    assert "--example-norms measures every example" in found
    assert not (workdir / "r").exists() or not any((workdir / "r").glob("checkpoints/*"))


def test_a_mixture_is_served(workdir: Path) -> None:
    """Log-probabilities and text are those of the model, whose coefficients change nothing."""
    model = hg.load("base", dtype="float64")
    model.config = replace(model.config, balance_loss=0.5, z_loss=0.1)
    save_with_bytes(model, workdir / "trained")
    text = "Ten green bottles"
    made = Server(open_models(Path("trained"), "mixture", {}), api_key="x")
    with made, openai.OpenAI(base_url=f"{made.url}v1", api_key="x", max_retries=0) as client:
        found = client.completions.create(
            model="mixture", prompt=[text, "naïve"], max_tokens=6, temperature=0, echo=True, logprobs=0
        )
    ids = list(text.encode())
    scores = torch.log_softmax(model.logits(torch.tensor([ids]))[0, :-1], 1)
    expected = [scores[t, id].item() for t, id in enumerate(ids[1:])]
    assert found.choices[0].logprobs is not None
    assert found.choices[0].logprobs.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-9)
    assert found.choices[0].text == text + hg.generate(model, text, 6, format="raw", temperature=0)
