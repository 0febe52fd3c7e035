"""Module hooks would never run: registering one is refused, with what to use instead."""

import pytest
import torch

import handgrad as hg
from conftest import make_model
from handgrad.errors import HandgradError

KINDS = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "register_backward_hook",
    "register_full_backward_pre_hook",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_refused_on_every_module(kind: str) -> None:
    model = make_model()
    hg.lora.inject(model, rank=2)
    for module in model.modules():
        with pytest.raises(HandgradError, match=r"would never run.*record=.*edit="):
            getattr(module, kind)(lambda *given: None)


def test_a_hook_on_a_wrapped_model_runs() -> None:
    wrapped, seen = hg.nn.wrap(make_model()), []
    wrapped.register_forward_hook(lambda module, given, out: seen.append(out.logits.shape))
    wrapped(torch.zeros(1, 3, dtype=torch.long))
    assert seen == [(1, 3, 11)]
