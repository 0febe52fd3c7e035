"""hg.verify of a model in mixed precision: right formulas pass, and wrong ones fail although everything is rounded."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import make_batch, perturb
from handgrad.kernels import library
from handgrad.model.layers import linear as layers
from handgrad.ops import attention, gated, layernorm, linear, loss, rmsnorm, rotary
from handgrad.proof.check_report import Report
from handgrad.proof.verify import verify

pytestmark = pytest.mark.skipif(
    library.why_not(torch.bfloat16) is not None, reason="LEFT OUT: this machine does not multiply bfloat16"
)
SHAPE = {"n_vocab": 61, "n_context": 40, "d_model": 32, "n_heads": 2, "n_blocks": 2}
FAMILIES = {"gpt2": "nano", "llama": "nano-llama"}


def model_of(family: str, **changes: Any) -> hg.GPT:
    model = hg.GPT(hg.preset(FAMILIES[family], **{**SHAPE, **changes}), seed=3)
    perturb(model, scale=0.05)  # biases and gains that are not 0 and 1
    model.precision = "mixed"
    return model


def verified(model: hg.GPT) -> Report:
    tokens, targets = make_batch(model, [17, 9, 1, 12])
    return verify(model, tokens, targets, [17, 9, 1, 12], watch=lambda names: [])


@pytest.mark.parametrize("family", FAMILIES)
def test_right_formulas_pass(family: str) -> None:
    report = verified(model_of(family))
    failed = [c.id for c in report.failed if not c.id.endswith("along u")]
    sections = {c.section for c in report.checks}
    assert failed == [] and {"Products in mixed precision", "Computed in mixed precision"} <= sections
    products = [c for c in report.checks if c.section == "Products in mixed precision" and "of q, k, v" not in c.id]
    assert max(c.error for c in products) <= 1e-6  # float32 sums, as the tests of the products have it


def test_adapters_and_a_packed_base_pass() -> None:
    model = model_of("llama")
    hg.lora.inject(model, rank=2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("up"):
                p.normal_(std=0.1)
    assert [c.id for c in verified(model).failed if not c.id.endswith("along u")] == []


def wrong(found: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **options: change(found(*args, **options))


def half_rotation(x: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Tensor:
    return ROTATE(x, cos, sin * 0.9, *args, **options)


ROTATE = rotary.backward
BROKEN: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "5 % of Δ wᵗ": (linear, "backward", wrong(linear.backward, lambda x: x.mul_(1.05)), "gpt2"),
    "∂w without its last token": (
        layers.linear, "grad_w", lambda d, a, *r: linear_grad_w(d[:-1], a[:-1], *r), "gpt2",
    ),
    "LayerNorm without the mean": (
        layernorm, "backward", lambda d, a_bar, inv, w: rmsnorm.backward(d, a_bar, inv, w), "gpt2",
    ),
    "RMSNorm without its correction": (rmsnorm, "backward", lambda d, a_bar, inv, w: d * w * inv, "llama"),
    "softmax without its target": (
        loss, "forward_and_delta", lambda z, t, w: (loss_of(z.clone(), t, w)[0], torch.softmax(z, 1) * w), "gpt2",
    ),
    "rotation by other angles": (rotary, "backward", half_rotation, "llama"),
    "the gate's slope is 1": (
        gated, "backward", lambda d, g, u, name: (d.to(g.dtype) * u, *gated_backward(d, g, u, name)[1:]), "llama",
    ),
    "attention without Δ ⊖ a": (
        attention, "backward",
        lambda d, s, *r: attention_backward(d, s._replace(a=torch.zeros_like(s.a)), *r), "gpt2",
    ),
}  # fmt: skip
linear_grad_w, loss_of, gated_backward, attention_backward = (
    linear.grad_w, loss.forward_and_delta, gated.backward, attention.backward,
)  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_wrong_formulas_fail_in_mixed_precision(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the checks in mixed precision alone: they compare what was computed in it."""
    module, name, other, family = BROKEN[fault]
    model = model_of(family)
    before = {c.id for c in verified(model).failed}
    monkeypatch.setattr(module, name, other)
    failed = [c for c in verified(model).failed if "mixed" in c.section and c.id not in before]
    assert failed, fault


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
