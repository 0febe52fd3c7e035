"""hg.verify of a model in mixed precision: right formulas pass, and what is wrong in mixed precision alone is named.
`test_mixed_faults.py` has the wrong formulas."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import handgrad, make_batch, perturb
from handgrad.kernels import calls, library
from handgrad.model.storage.quantize import quantize
from handgrad.model.storage.rounded import round_frozen
from handgrad.proof.check_report import Report
from handgrad.proof.verify import verify

pytestmark = pytest.mark.skipif(
    library.why_not(torch.bfloat16) is not None, reason="LEFT OUT: this machine does not multiply bfloat16"
)
SHAPE = {"n_vocab": 61, "n_context": 40, "d_model": 32, "n_heads": 2, "n_blocks": 2}
FAMILIES = {"gpt2": "nano", "llama": "nano-llama", "lfm2": "nano-llama"}
STEPS, NETWORK = "Mixed precision, each step from what it read", "Mixed precision, the whole network"


def model_of(family: str, **changes: Any) -> hg.GPT:
    if family == "lfm2":
        changes = {"family": family, "qk_norm": True, "conv_blocks": (0,), "conv_bias": True, **changes}
    model = hg.GPT(hg.preset(FAMILIES[family], **{**SHAPE, **changes}), seed=3)
    perturb(model, scale=0.05)  # biases and gains that are not 0 and 1
    model.precision = "mixed"
    return model


def verified(model: hg.GPT, lengths: list[int]) -> Report:
    report = verify(model, *make_batch(model, lengths), lengths, watch=lambda names: [])
    report.checks = [c for c in report.checks if "mixed" in c.section.lower()]
    return report


@pytest.mark.parametrize("family", [*FAMILIES, "other scores"])
@pytest.mark.some_cases(3)
def test_right_formulas_pass(family: str) -> None:
    """Every signal and every parameter has both checks."""
    scores = {"attention_scale": 0.4, "score_cap": 2.0, "sinks": True}
    model = model_of("llama", **scores) if family == "other scores" else model_of(family)
    report = verified(model, [17, 9, 1, 12])
    assert [(c.id, c.error, c.note) for c in report.failed] == []
    steps = {c.id.removesuffix(", its step"): c for c in report if c.section == STEPS}
    network = {c.id.removesuffix(", mixed") for c in report if c.section == NETWORK}
    assert network >= {name for name, _ in model.named_parameters()} | {"delta_12", "blocks.0.delta_1"}
    assert network <= {*steps} and {"loss", "a_12", "blocks.1.q", "blocks.1.delta_v"} <= {*steps}
    assert max(c.error for c in steps.values() if not c.statement) <= 1e-6  # as tests of products have it
    tensors = {name.rpartition(".")[2]: c for name, c in steps.items() if not name.endswith("weight")}
    inside = {name for name, c in tensors.items() if c.statement}
    assert inside == {"a_3", "delta_v"} | ({"delta_q", "delta_k"} if family == "gpt2" else {"delta_x_q", "delta_x_k"})


@pytest.mark.parametrize(
    ("dora", "base"), [(False, "float32"), (False, "bfloat16"), (True, "bfloat16"), (True, "4 bits")]
)
@pytest.mark.some_cases(3)
def test_adapters_pass(dora: bool, base: str) -> None:
    model = model_of("llama", d_hidden=96, n_blocks=1)
    if base == "4 bits":
        quantize(model, 4)
    hg.lora.inject(model, rank=2, targets=("all-linear", "lm_head"), dora=dora)
    perturb(model, seed=2, scale=0.1)
    if base == "bfloat16":
        round_frozen(model)
    assert [(c.id, c.error, c.note) for c in verified(model, [10, 1, 7]).failed] == []


def test_one_entry_that_a_product_computes_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command fails, with the names of what it changes."""
    hg.save(model_of("gpt2", n_blocks=1), tmp_path / "model")
    right = calls.mixed_product

    def wrong(a: Tensor, b: Tensor, out: Tensor, *given: Any) -> None:
        right(a, b, out, *given)
        if out.shape == (16, 32):  # a_4, a_9 and the error signals of a_2, a_3 and a_6
            out[-1, -1] *= 1.1

    options = ("verify", "--model", tmp_path / "model", "--precision", "mixed", "--seed", 1)
    assert handgrad(*options).returncode == 0
    monkeypatch.setattr(calls, "mixed_product", wrong)
    found = handgrad(*options)
    assert found.returncode == 1
    failed = [x for x in re.split(r"\n(?=[✔✘])", found.stdout) if x.startswith("✘")]  # long names are folded
    assert all(", its step" in x or "mixed" in x for x in failed)
    assert {x.split()[1].rstrip(",") for x in failed if ", its step" in x} == {
        "blocks.0.a_4", "blocks.0.a_9", "blocks.0.delta_6", "blocks.0.delta_3", "blocks.0.delta_2",
    }  # fmt: skip
    assert re.search(r"checks FAILED in .* s: blocks\.0\.a_4, its step, ", found.stdout)


def test_the_gradient_points_the_same_way() -> None:
    """The cosine with float32's is almost 1."""
    model = model_of("gpt2", d_model=64, n_heads=4)
    tokens, targets = make_batch(model, [40, 40, 40], ignored=0.0)

    def gradients(precision: str) -> dict[str, Tensor]:
        model.precision = precision
        model.zero_grad()
        model.loss_and_grads(tokens, targets, [40, 40, 40])
        return {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}

    exact, mixed = gradients("float32"), gradients("mixed")
    dot = sum((exact[name] * mixed[name]).sum() for name in exact)
    norms = [math.sqrt(sum(x.square().sum().item() for x in grads.values())) for grads in (exact, mixed)]
    assert dot.item() / (norms[0] * norms[1]) >= 0.9995
