"""Plans of models whose matrices stay packed: bytes against the model and against what a step allocates."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import handgrad as hg
import tiny_gguf
from conftest import handgrad, plan_of
from handgrad.families import FAMILIES
from handgrad.model.precision import why_not_mixed
from handgrad.plan import packing, timing
from handgrad.plan.estimate import Plan, make_plan
from handgrad.plan.memory import workspace
from handgrad.plan.packing import kinds_of, two_bytes, uses

SHAPE = {
    "n_vocab": 4096,
    "n_context": 256,
    "d_model": 128,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_blocks": 6,
    "d_hidden": 320,
}


def allocated(step: Callable[[], object]) -> int:
    """Bytes of the tensors that a call allocates, at their peak."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def held(model: hg.GPT) -> int:
    """Bytes of a model's weights."""
    matrices = {x.packed for x in model.modules() if getattr(x, "packed", None) is not None and x is not model}
    return sum(x.nbytes for x in matrices) + sum(p.nbytes for p in model.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for tied in (True, False):
        hg.save(hg.GPT(hg.preset("nano-llama", **SHAPE, tied=tied)), path / ("tied" if tied else "untied"))
    choices = {**FAMILIES["qwen3_moe"].fixed, "qkv_bias": False, "out_bias": False, "activation": "silu", "dense": (0,)}
    experts = {"d_expert": 2048, "n_experts": 6, "experts_per_token": 2}
    mixture = hg.ModelConfig(family="qwen3_moe", **{**choices, **SHAPE, **experts})
    hg.save(hg.GPT(mixture), path / "mixture")
    return path


def planned(model: hg.GPT, batch: int, tokens: int, recompute: str) -> Plan:
    ranks = {name: layer.down.shape[1] for name, layer in hg.lora.adapters_of(model).items()}
    mixed = model.operand is not None
    return make_plan(model.config, batch, tokens, ranks=ranks, recompute=recompute, kinds=kinds_of(model), mixed=mixed)


@pytest.mark.parametrize("precision", ["float32", "mixed"])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("name", ["tied", "untied", "mixture"])
@pytest.mark.some_cases(5)
def test_bytes_match_a_real_step(name: str, recompute: str, precision: str, folder: Path) -> None:
    if precision == "mixed" and why_not_mixed() is not None:
        pytest.skip(f"no mixed precision: {why_not_mixed()}")
    model = hg.load(folder / name, base_dtype="bfloat16", precision=precision)
    hg.lora.inject(model, 4)
    batch, length = 12, 256  # three pieces, processed together
    plan = planned(model, batch, length, recompute)
    assert plan.kinds == two_bytes(model.config, "bfloat16") and plan.bytes_weights == held(model)
    tokens = torch.randint(4096, (batch, length))
    peak = allocated(lambda: model.loss_and_grads(tokens, tokens, recompute=recompute))
    predicted = (
        plan.bytes_gradients + plan.bytes_saved + plan.bytes_temporary - workspace(plan.config, plan.dtype, plan.mixed)
    )
    assert 0.85 < predicted / peak < 1.15, (predicted, peak)
    unpacked = make_plan(plan.config, batch, length, ranks=plan.ranks, recompute=recompute)
    assert unpacked.bytes_weights > 1.9 * (plan.bytes_weights - 4 * plan.adapters)


def test_seconds_include_unpacking(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hg.load(folder / "tied", base_dtype="bfloat16")
    hg.lora.inject(model, 4)
    plan = planned(model, 1, 8, "none")
    assert uses(plan.config, plan.kinds, 1)["BF16", (128, 128)] == 2 * 2 * 6, "q and out, both passes, six blocks"
    assert uses(plan.config, plan.kinds, 3)["BF16", (4096, 128)] == 1, "a tied head, once"
    monkeypatch.setattr(packing, "ROWS_OF_PART", 1000)
    assert uses(plan.config, plan.kinds, 3)["BF16", (4096, 128)] == 6, "in parts: both passes of three groups of rows"
    assert 0 < timing.unpack_seconds("BF16", (8192, 128), "float32") < 10
    monkeypatch.setattr(timing, "unpack_seconds", lambda *_: 100.0)
    assert timing.predict(plan, 0.0) > 100 * sum(uses(plan.config, plan.kinds, 1).values())


def test_the_command_reads_the_types_of_a_gguf_file(folder: Path, tmp_path: Path) -> None:
    tiny_gguf.write_tiny_smollm2(tmp_path / "tiny.gguf")
    model = hg.load(tmp_path / "tiny.gguf", packed=True)
    hg.lora.inject(model, 2)
    found = plan_of("--model", tmp_path / "tiny.gguf", "--packed", "--rank", 2)
    assert found["packed"] == ["Q8_0"] and found["bytes_weights"] == held(model)
    hg.lora.save(model, tmp_path / "adapter")
    assert plan_of("--model", tmp_path / "adapter", "--packed")["bytes_weights"] == held(model)
    two = plan_of("--model", folder / "tied", "--base-dtype", "float16", "--rank", 2)
    preset = [f"--{name.replace('_', '-')}={SHAPE[name]}" for name in ("n_vocab", "n_blocks", "d_hidden", "n_context")]
    assert two["packed"] == ["F16"]
    assert two["bytes_weights"] < plan_of("--model", folder / "tied", "--rank", 2)["bytes_weights"]
    assert plan_of("--model", "nano-llama", *preset, "--base-dtype", "float16", "--rank", 2)["packed"] == ["F16"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nano-llama", "--packed", "--rank", 2), "nano-llama is a preset, and --packed is for a GGUF file"),
        (("--model", "nano-llama", "--base-dtype", "int8", "--rank", 2), "--base-dtype must be bfloat16 or float16"),
        (("--model", "nano-llama", "--base-dtype", "float16"), "packed weights are frozen.* give --rank"),
        (
            ("--model", "{}/tied", "--packed", "--rank", 2),
            "is not a GGUF file, .* leave out --packed, or keep .* --base-dtype bf",
        ),
        (("--model", "{}.gguf", "--base-dtype", "float16", "--rank", 2), "is a GGUF file, .* --packed"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[object, ...], message: str, folder: Path) -> None:
    tiny_gguf.write_tiny_smollm2(folder.with_name(f"{folder.name}.gguf"))
    run = handgrad("plan", *(str(x).format(folder) for x in arguments))
    assert run.returncode == 1
    assert re.search(message, " ".join(run.stderr.split())), run.stderr
