"""Where a number first became NaN or infinite."""

import torch
from torch import Tensor

from ..errors import NonFiniteError
from ..model.gpt import GPT
from ..model.inspect.trace import record_pass
from ..model.inspect.trace_html import depth


def diagnose(model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None) -> str:
    """Name the first intermediate that is not finite, in the forward pass if there is one, else in the backward pass."""
    sizes = [tokens.shape[1]] * len(tokens) if lengths is None else lengths
    for ids, wanted in zip(*(torch.split(x.reshape(-1), sizes) for x in (tokens, targets)), strict=True):
        bad: list[str] = []

        def look(name: str, value: Tensor, bad: list[str] = bad) -> None:
            if value.is_floating_point() and not torch.isfinite(value).all():
                bad.append(name)

        try:
            record_pass(model, ids[None], wanted[None], record=look)
        except NonFiniteError:
            pass
        finally:
            model.zero_grad()
        forward = [name for name in bad if ".a_" in name or name.startswith("a_")]
        if forward:
            return f"{forward[0]} was the first to become NaN or infinite, in the forward pass"
        if bad:
            return f"{max(bad, key=depth)} was the first to become NaN or infinite, in the backward pass"
    return "no single sequence reproduces it"
