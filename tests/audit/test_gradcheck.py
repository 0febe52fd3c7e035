"""`hg.check`: PyTorch's own functions pass, and ten kinds of mistakes are found and named."""

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from audited import function_of
from torch import Tensor
from torch.nn import functional as F

import handgrad as hg


def layer_norm(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(a, w.shape, w, b, 1e-5)


PYTORCH: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "layer_norm": (layer_norm, ("n d", "d", "d")),
    "rms_norm": (lambda a, w: F.rms_norm(a, w.shape, w, 1e-5), ("n d", "d")),
    "softmax": (lambda a: torch.softmax(a, -1), ("n d",)),
    "gelu": (F.gelu, ("n d",)),
    "relu": (F.relu, ("n d",)),
    "linear": (F.linear, ("n d", "f d", "f")),
    "broadcast product": (torch.mul, ("n d", "d")),
    "attention": (F.scaled_dot_product_attention, ("b n d", "b n d", "b n d")),
    "two outputs": (lambda a: torch.aminmax(a, dim=-1), ("n d",)),
    "embedding": (F.embedding, (torch.tensor([2, 0, 2]), torch.randn(4, 3))),
    "cross entropy": (F.cross_entropy, (torch.randn(3, 5), torch.tensor([1, 4, -100]))),
    "log of positive numbers": (torch.log, (torch.rand(3, 4) + 0.1,)),
    "standard deviation": (lambda a: a.std(-1), (torch.randn(4, 5),)),  # NaN where the axis has the size 1
    "convolution": (F.conv1d, (torch.randn(2, 3, 7), torch.randn(4, 3, 3))),
}


@pytest.mark.parametrize("name", PYTORCH)
def test_pytorchs_own_functions_pass(name: str) -> None:
    function, inputs = PYTORCH[name]
    report = hg.check(function, *inputs)
    assert report.passed, str(report)
    assert any("bfloat16" in case for case in report.results)


def norm_backward(change: str) -> Callable[..., Any]:
    """The backward pass of layer_norm with a mistake."""

    def backward(delta: Tensor, a: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor | None, ...]:
        sigma = (a.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        a_bar = (a - a.mean(-1, keepdim=True)) / sigma
        g = delta * w
        terms = [g, -g.mean(-1, keepdim=True), -a_bar * (g * a_bar).mean(-1, keepdim=True)]
        if change == "missing mean":
            del terms[1]
        if change == "missing variance":
            del terms[2]
        below = sum(terms) / sigma
        grad_w, grad_b = (delta * a_bar).sum(0), delta.sum(0)
        return {
            "right": (below, grad_w, grad_b),
            "missing mean": (below, grad_w, grad_b),
            "missing variance": (below, grad_w, grad_b),
            "sign": (-below, grad_w, grad_b),
            "factor": (below, 2 * grad_w, grad_b),
            "mean for sum": (below, grad_w, delta.mean(0)),
            "missing sum": (below, delta * a_bar, grad_b),
            "last row": (below, grad_w, delta[-1]),
            "zero": (below, 0 * grad_w, grad_b),
            "not computed": (below, None, grad_b),
            "reversed": (below, grad_w.flip(0), grad_b),
            "not finite": (below / 0, grad_w, grad_b),
            "ignored": (below, grad_w, torch.full_like(grad_b, float(len(a)))),
        }[change]

    return backward


MISTAKES = {  # the input whose gradient is wrong, the kind, words of the sentence
    "sign": (0, "sign", "has the wrong sign"),
    "factor": (1, "factor", "2 times too large"),
    "mean for sum": (2, "factor", "divided by the size 3"),
    "missing mean": (0, "missing term", "lacks a term: the error is, in every row, a multiple of 1"),
    "missing variance": (0, "missing term", "lacks a term"),
    "missing sum": (1, "missing sum", "lacks the sum over axis 0"),
    "last row": (2, "missing sum", "the last of 3 contributions"),
    "zero": (1, "zero", "is zero"),
    "not computed": (1, "not trained", "was never computed"),
    "reversed": (1, "permuted", "reversed"),
    "not finite": (0, "not finite", "infinite"),
    "ignored": (2, "known mistake", "the incoming gradient were taken as 1"),
}


@pytest.mark.parametrize("change", MISTAKES)
def test_mistakes_are_named(change: str) -> None:
    wrong_input, kind, words = MISTAKES[change]
    report = hg.check(layer_norm, torch.randn(3, 5), torch.randn(5), torch.randn(5), backward=norm_backward(change))
    assert report.first is not None, str(report)
    said = f"{report.first.diagnosis.kind}: {report.first.sentence()}"
    assert (report.first.input, report.first.output, report.first.diagnosis.kind) == (wrong_input, 0, kind), said
    assert words in report.first.sentence(), said
    assert any(line.startswith("smallest failing case") for line in report.example)


def test_the_right_pair_passes() -> None:
    report = hg.check(layer_norm, "n d", "d", "d", backward=norm_backward("right"))
    assert report.passed, str(report)


def test_named_terms() -> None:
    def mean_term(delta: Tensor, a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        sigma = (a.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return -(delta * w).mean(-1, keepdim=True).expand_as(a) / sigma

    report = hg.check(
        layer_norm, "n d", "d", "d", backward=norm_backward("missing mean"), terms={"the term of the mean": mean_term}
    )
    assert report.first is not None
    assert report.first.diagnosis.sentence == "lacks the term of the mean"


# a w, whose gradient of w is transposed where that fits
Transposed = function_of(torch.matmul, lambda delta, a, w: (delta @ w.t(), (a.t() @ delta).t()))
# 2 a, whose backward pass is right for contiguous memory only
IgnoresStrides = function_of(
    lambda a: 2 * a, lambda delta, a: 2 * delta if delta.is_contiguous() else torch.zeros_like(delta)
)
# exp(a), whose backward pass rounds to bfloat16 on the way
HalfInside = function_of(torch.exp, lambda delta, a: (delta * a.exp()).to(torch.bfloat16).to(delta.dtype))
ChangesInput = function_of(lambda a: a.mul_(a).clone(), lambda delta, a: 2 * a * delta)


def test_autograd_functions() -> None:
    report = hg.check(Transposed, "n d", "d d")
    assert report.first is not None
    assert (report.first.input, report.first.diagnosis.kind) == (1, "transpose"), str(report)
    report = hg.check(IgnoresStrides, "n d")
    assert report.first is not None
    assert "expanded memory" in report.first.case, str(report)
    assert not hg.check(HalfInside, "n d").passed
    assert hg.check(HalfInside, "n d", dtypes=["bfloat16"]).passed
    report = hg.check(ChangesInput, "n d")
    assert report.first is not None
    assert "changes input 0 in place" in report.first.sentence()


def test_a_function_that_reads_outside_its_inputs() -> None:
    """torch's attention takes keys of another length than the values, and its backward pass then writes outside."""
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    report = hg.check(causal, *["b h n d"] * 3)
    assert report.passed, str(report)
    assert len(report.notes) == 1 and "outside its inputs" in report.notes[0] and "input 1 broadcast" in report.notes[0]

    def outside(a: Tensor) -> Tensor:
        return 2 * a + a.as_strided(a.shape, a.stride(), a.storage_offset() + 1)

    report = hg.check(outside, "n d", backward=lambda delta, a: 2 * delta)
    assert report.first is not None and report.first.diagnosis.kind == "memory"
    assert "reads memory outside its inputs" in report.first.sentence()


def test_functions_that_cannot_be_checked() -> None:
    report = hg.check(lambda a: F.dropout(a, 0.5), "n d")
    assert report.first is not None and "changes from call to call" in report.first.sentence()
    report = hg.check(torch.log, "n d")
    assert report.first is not None and "output 0 is NaN or infinite" in report.first.sentence()


def test_functions_of_float32_alone() -> None:
    """A kernel may take float32 only: the judge then works in float32 too, and knows its own error."""

    def forward(a: Tensor, b: Tensor) -> Tensor:
        if a.dtype != torch.float32:
            raise RuntimeError("expected float32")
        return torch.tanh(a) * b

    def only_float32(right: float) -> Any:
        return function_of(
            forward, lambda delta, a, b: (right * delta * b * (1 - torch.tanh(a) ** 2), delta * torch.tanh(a))
        )

    assert hg.check(only_float32(1.0), "n d", "n d").passed
    report = hg.check(only_float32(1.1), "n d", "n d")
    assert report.first is not None
    assert (report.first.input, report.first.diagnosis.kind) == (0, "factor"), str(report)
    assert report.first.diagnosis.factor == pytest.approx(1.1, rel=1e-2)


def test_which_output_is_wrong() -> None:
    def two(a: Tensor) -> tuple[Tensor, Tensor]:
        return a.sin(), a.cos()

    def backward(of_sin: Tensor, of_cos: Tensor, a: Tensor) -> Tensor:
        return of_sin * a.cos() + of_cos * a.sin()

    report = hg.check(two, "n d", backward=backward)
    assert report.first is not None
    assert (report.first.output, report.first.diagnosis.kind) == (1, "sign")


def test_a_factor_near_1_is_given_in_percent() -> None:
    report = hg.check(torch.sin, "n d", backward=lambda delta, a: 1.001 * delta * a.cos())
    assert report.first is not None
    assert "is 0.1 % too large" in report.first.diagnosis.sentence and report.first.diagnosis.detail == "1.001"


def test_report_and_mistakes_of_the_caller() -> None:
    report = hg.check(layer_norm, "n d", "d", "d", backward=norm_backward("factor"))
    text = str(report)
    assert "✘ layer_norm: the gradient of input 1 from output 0 is 2 times too large" in text
    assert "right gradient =" in text
    found = json.loads(report.to_json())
    assert found["first"]["factor"] == pytest.approx(2.0)
    assert math.isfinite(found["first"]["factor"])
    with pytest.raises(hg.HandgradError, match="give the inputs"):
        hg.check(torch.exp)
    with pytest.raises(hg.HandgradError, match="does not take these inputs"):
        hg.check(torch.mm, "n d", "n n n")
    with pytest.raises(hg.HandgradError, match="callable"):
        hg.check(3, "n")
