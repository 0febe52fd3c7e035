"""The precision of a model: one dtype for everything, or mixed.

    mixed     parameters, gradients, optimizer, residual stream, norms, softmax, rotation and loss in float32;
              operands of matrix products and of attention rounded to bfloat16, their sums in float32

The weights are float32, so no small update is lost and there are no second copies of them. A frozen matrix may be stored in
bfloat16: `storage/rounded.py`.
"""

import torch

from ..checks import MIXED
from ..errors import HandgradError, shown
from ..kernels import library


def check_precision(precision: object, dtype: torch.dtype) -> str:
    """Raise unless a model of this dtype can have this precision."""
    name = str(dtype).removeprefix("torch.")
    if precision == MIXED and dtype != torch.float32:
        raise HandgradError(f"mixed precision needs a float32 model, and this one is {name}: model.to(torch.float32)")
    if precision not in (MIXED, name):
        raise HandgradError(
            f"the precision of a {name} model is {name!r}{' or mixed' if name == 'float32' else ''}, not {shown(precision)};"
            " model.to(dtype) changes the dtype of the parameters"
        )
    return str(precision)


def without_mixing(precision: str | None) -> str:
    """A line for the user if mixed precision is asked for and this machine computes in float32 instead, or \"\"."""
    reason = why_not_mixed() if precision == MIXED else None
    return "" if reason is None else f"mixed precision needs products of bfloat16, and {reason}; computing in float32"


def why_not_mixed() -> str | None:
    """Why this machine computes in float32 where mixed precision is asked for; None if it multiplies bfloat16."""
    return library.why_not(torch.bfloat16)
