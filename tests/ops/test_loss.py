"""ops.loss against paper.loss."""

import pytest
import torch

from conftest import ROUNDING, SCALES, rounded
from handgrad.ops import loss as fast
from handgrad.paper import loss as plain
from handgrad.paper.notation import softmax
from handgrad.proof.oracles import relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE


@pytest.mark.parametrize(("n", "v"), [(1, 2), (7, 5), (3, 17)])
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_equal_to_the_paper(n: int, v: int, spread: float) -> None:
    logits, targets = spread * torch.randn(n, v).double(), torch.randint(v, (n,))
    total = plain.forward(logits, targets)
    expected = plain.delta_logits(softmax(logits), targets)
    assert relative_error(fast.forward(logits, targets), total) <= IDENTITY_TOLERANCE
    summed, delta = fast.forward_and_delta(logits.clone(), targets, 0.25)
    assert relative_error(summed, total) <= IDENTITY_TOLERANCE
    assert relative_error(delta, 0.25 * expected, floor=0.25) <= IDENTITY_TOLERANCE


def test_large_logits_do_not_overflow() -> None:
    summed, delta = fast.forward_and_delta(torch.tensor([[0.0, 1e4]]), torch.tensor([0]), 1.0)
    assert summed.item() == 1e4 and delta.tolist() == [[-1.0, 1.0]]


def test_rows_with_a_target() -> None:
    assert fast.rows_with_target(torch.tensor([3, -100, 0, -100])).tolist() == [0, 2]


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.randn(4, 9).bfloat16()
    summed, delta = fast.forward_and_delta(logits.clone(), torch.arange(4), 1.0)
    assert delta.dtype == torch.bfloat16 and summed.dtype == torch.float64
    assert relative_error(summed, plain.forward(logits.double(), torch.arange(4))) < 1e-6


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("scale", [*SCALES, 30.0, 1e6])
@pytest.mark.parametrize("weight", [1.0, 1e-6])
@pytest.mark.some_cases(3)
def test_every_dtype_and_scale(scale: float, weight: float, dtype: torch.dtype) -> None:
    """Confident and wrong, confident and right, and everything in between."""
    logits, targets = rounded(60, 33, dtype=dtype, scale=scale), torch.randint(33, (60,))
    targets[:20] = logits[:20].argmax(1)
    total = plain.forward(logits, targets)
    assert relative_error(fast.forward(logits.to(dtype), targets), total) <= ROUNDING[torch.float32]
    summed, delta = fast.forward_and_delta(logits.to(dtype).clone(), targets, weight)
    assert delta.dtype == dtype and relative_error(summed, total) <= ROUNDING[torch.float32]
    expected = weight * plain.delta_logits(softmax(logits), targets)
    assert relative_error(delta, expected) <= ROUNDING[dtype]
