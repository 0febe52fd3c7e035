"""A broken adapter is refused when it is loaded; one that breaks later fails its own requests only."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_server import open_tiny, post, write_models

import handgrad as hg
from conftest import handgrad
from handgrad.inference.engine import Engine, Options, Sampling
from handgrad.lora.layer import LoRA
from handgrad.lora.named import NamedAdapters
from handgrad.serve.routes import Server
from handgrad.serve.served_models import Models

SOUND = {"model": "one", "prompt": "To be, or not", "max_tokens": 24, "temperature": 0.8, "seed": 3, "logprobs": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_models(tmp_path)


def break_adapter(models: Models, name: str) -> None:
    """NaN in all of a factor: torch ignores a NaN in queries alone."""
    layer = next(m for m in models.network.modules() if isinstance(m, NamedAdapters) and name in m.branches)
    branch: LoRA = layer.branches[name]
    branch.up.data.fill_(torch.nan)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_adapter_is_refused_when_it_is_loaded(folder: Path, value: float) -> None:
    file = folder / "one" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[1]
    tensors[name].view(-1)[3] = value
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "one" / "handgrad-manifest.json").unlink()
    with pytest.raises(hg.HandgradError, match=f"{name.removeprefix('base_model.model.')} holds NaN or infinity"):
        open_tiny(folder)
    done = handgrad("serve", "--model", folder / "base", "--adapter", f"one={folder / 'one'}", "--port", 0)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "holds NaN or infinity" in done.stderr


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("broken", ["one", "two"])  # the second has a magnitude: DoRA
def test_sequences_beside_a_broken_one_are_what_they_are_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: bool, broken: str
) -> None:
    """Broken ones join at every second step, so that others take their places in the cache."""
    if not kernels:
        monkeypatch.setattr("handgrad.kernels.calls.fits", lambda *_, **__: False)
    sound = "two" if broken == "one" else "one"
    prompts = [list(b"To be, or not"), list(b"a"), list(b"A much longer prompt than the others")]

    def run(model: hg.GPT, faults: bool) -> list[Any]:
        engine = Engine(model, max_running=6)
        sequences, failed = [], []
        for step in range(40):
            if step < 6:
                options = Options(20, Sampling(0.8, seed=step), logprobs=1, adapter=[sound, None][step % 2])
                sequences.append(engine.add(prompts[step % 3], options))
            if faults and step % 2:
                failed.append(
                    engine.add(prompts[step % 3] * 2, Options(5, adapter=broken, prompt_logprobs=step % 4 == 1))
                )
            for event in engine.step():
                assert (event.finish == "error") == (event.sequence in failed)
        while engine.busy:
            engine.step()
        assert not engine.kept and not engine.cache.pools
        assert all("adapter " + broken in str(x.error) and not x.new for x in failed) and len(failed) == 20 * faults
        return [(x.new, [y.logprob for y in x.logprobs], x.finish) for x in sequences]

    models = open_tiny(folder)
    expected = run(models.network, faults=False)
    break_adapter(models, broken)
    found = run(models.network, faults=True)
    for (ids, logprobs, finish), (ids_beside, logprobs_beside, finish_beside) in zip(expected, found, strict=True):
        assert ids == ids_beside and finish == finish_beside == "length"
        assert logprobs == pytest.approx(logprobs_beside, abs=1e-10)


def test_requests_to_a_sound_adapter_beside_a_broken_one(folder: Path) -> None:
    models = open_tiny(folder)
    server = Server(models)
    with server:
        expected = post(server, "/v1/completions", SOUND)
        assert expected[0] == 200
        break_adapter(models, "two")
        bodies = [SOUND if i % 2 else {**SOUND, "model": "two"} for i in range(30)]
        bodies[0] = {**SOUND, "model": "two", "echo": True}
        with ThreadPoolExecutor(len(bodies)) as clients:
            found = list(clients.map(partial(post, server, "/v1/completions"), bodies))
        for body, (status, answer) in zip(bodies, found, strict=True):
            if body["model"] == "one":
                assert status == 200 and answer["choices"][0]["text"] == expected[1]["choices"][0]["text"]
            else:
                assert status == 500 and answer["error"]["code"] == "sequence_failed"
                assert "the adapter two holds NaN or infinity" in answer["error"]["message"]
        assert server.runner.count == 0 and not server.runner.engine.busy
