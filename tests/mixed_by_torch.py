"""A stand-in for torch's switch on a processor with AMX, where oneDNN rounds the operands of float32 products.

No such processor may be at hand, so this is the one place where tests replace what they test. Everything around the switch
is the product's own; `addmm_`, the call that the switch acts on, gets operands that were rounded before."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from handgrad.kernels import mixed_products
from handgrad.machine import AMX_VARIABLE


class Switch(TorchFunctionMode):
    """Between entry and exit, products of operands rounded to bfloat16 with sums in float32."""

    products = 0  # that were computed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.addmm_:
            return func(*args, **(kwargs or {}))
        Switch.products += 1
        return self.multiply(*args, **kwargs)

    def multiply(self, out: Tensor, a: Tensor, b: Tensor, beta: int) -> Tensor:
        return out.addmm_(a.bfloat16().float(), b.bfloat16().float(), beta=beta)


def forget() -> None:
    """As in a new process."""
    mixed_products.choice.cache_clear()
    mixed_products.torch_rounds.cache_clear()


def use_switch(monkeypatch: pytest.MonkeyPatch, switch: Any = Switch) -> None:
    """Replace the switch, as if the process had started with it. Call `forget` when the test ends."""
    monkeypatch.setattr(mixed_products, "switched", switch)
    monkeypatch.setenv(
        AMX_VARIABLE, "DEFAULT"
    )  # torch is tried in virtual machines too: here it cannot end the process
    forget()
