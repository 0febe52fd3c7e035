"""Linear layer and cross-entropy as one autograd function: the logits of all rows never exist together.

    a  (…, d)      weight  (V, d)      bias  (V)      targets  (…), −100 for none

Δ_12 = y_pred − y_gt is known as soon as the logits are, so the forward pass computes the gradients, group by group, and the
backward pass hands them over, times the error signal of the loss.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import HandgradError
from ..model.passes.readout import rows_at_once
from ..ops import linear
from ..ops import loss as softmax_loss
from .arguments import check_linear, mixes
from .functions import autocast, first_derivative, opaque, operand, rows, without_autocast


class LinearCrossEntropyFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        n_targets: float | None,
        needs: tuple[bool, bool, bool],
        mixed: bool,
    ) -> Tensor:
        flat, answers = rows(a), targets.reshape(-1)
        chosen = softmax_loss.rows_with_target(answers)
        every = len(chosen) == len(flat)
        n, divisor = len(chosen), len(chosen) if n_targets is None else n_targets
        read = operand(flat if every else flat[chosen], mixed)
        answers = answers if every else answers[chosen]
        total = torch.zeros((), dtype=torch.float64, device=a.device)
        before, grad_w, grad_b = torch.empty_like(read, dtype=a.dtype) if needs[0] else None, None, None
        most = rows_at_once(len(weight), needs[1])
        size = math.ceil(n / math.ceil(n / most)) if n else 1
        buffer = flat.new_empty(min(size, n), len(weight))
        for start in range(0, n, size):
            part = slice(start, start + size)
            x = read[part]
            logits = linear.forward(x, weight.t(), bias, buffer[: len(x)])
            if not any(needs):
                total += softmax_loss.forward(logits, answers[part])
                continue
            summed, delta = softmax_loss.forward_and_delta(logits, answers[part], 1 / divisor)
            total += summed
            if before is not None:
                before[part] = linear.backward(delta, weight.t(), rounded=mixed)
            if needs[1]:
                grad_w = linear.grad_w(x, delta, grad_w)  # (∂w)ᵗ = Δᵗ a
            if needs[2]:
                grad_b = linear.grad_b(delta, grad_b)
        if before is not None and not every:
            before = torch.zeros_like(flat).index_copy_(0, chosen, before)
        if not n:  # nothing to learn from
            grad_w = torch.zeros_like(weight) if needs[1] else None
            grad_b = torch.zeros_like(bias) if needs[2] and bias is not None else None
        ctx.save_for_backward(None if before is None else before.view(a.shape), grad_w, grad_b)
        mean = total / divisor if divisor else total * math.nan  # as torch's cross-entropy without a target
        return mean.to(torch.promote_types(a.dtype, torch.float32))

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        factor = delta.item() if delta.is_cpu else delta
        grads = (x if x is None or factor == 1 else x * factor for x in ctx.saved_tensors)
        return *grads, None, None, None, None


@opaque
def linear_cross_entropy(
    a: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    n_targets: float | None = None,
    precision: str | None = None,
) -> Tensor:
    """The mean of −log softmax(a wᵗ + b)[target] over the targets ≠ −100; divided by `n_targets` instead of their number
    if several calls accumulate one batch. With the `precision` "mixed" operands of products are rounded to bfloat16; sums,
    loss and gradients are float32."""
    check_linear(a, weight, bias)
    if targets.shape != a.shape[:-1]:
        raise HandgradError(
            f"targets {tuple(targets.shape)} must have one entry for each of the rows {tuple(a.shape[:-1])}"
        )
    if targets.is_floating_point():
        raise HandgradError(f"targets must be integers (int64), not {targets.dtype}")
    given = targets[targets != softmax_loss.NO_TARGET]
    if given.numel() and not 0 <= int(given.min()) <= int(given.max()) < len(weight):
        wrong = int(given.min()) if int(given.min()) < 0 else int(given.max())
        raise HandgradError(
            f"target {wrong} is outside the vocabulary: ids go from 0 to {len(weight) - 1}, −100 is ignored"
        )
    if n_targets is not None and not 0 < n_targets < math.inf and given.numel():  # NaN is neither
        raise HandgradError(f"n_targets is the number of targets of all calls together, more than 0, not {n_targets}")
    kind, mixed = a.device.type, mixes(precision, a=a, weight=weight, bias=bias)
    a, weight, bias = autocast(kind, a, weight, bias)
    wanted = torch.is_grad_enabled()
    needs = tuple(wanted and x is not None and x.requires_grad for x in (a, weight, bias))
    with without_autocast(kind):
        return LinearCrossEntropyFunction.apply(a, weight, bias, targets.long(), n_targets, needs, mixed)  # type: ignore
