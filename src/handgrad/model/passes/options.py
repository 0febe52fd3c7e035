"""`PassOptions`: how the passes over a batch are computed, and who is told. What is computed, the objective and its
gradients, does not depend on it, except for the masks of dropout.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import HandgradError, shown
from .arguments import Observer, Record, Recorder, Unedited
from .example_gradients import ExampleGradients
from .router_losses import RouterLosses

Finished = Callable[[list[nn.Parameter]], None]  # called with the parameters of a layer whose gradients are final


def no_hook(parameters: list[nn.Parameter]) -> None:
    """Default hook: do nothing."""


def with_zeros(finished: Finished) -> Finished:
    """For a batch without any target: its gradient is 0, and other processes may be waiting for it."""

    def announce(layer: list[nn.Parameter]) -> None:
        for p in layer:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        finished(layer)

    return announce


@dataclass(frozen=True)
class PassOptions:
    """The options of `GPT.loss_and_grads`.

    recompute   "blocks" saves only each block's input and recomputes the block in the backward pass: less memory, about a
                third more time.
    seed        Seed of the adapters' dropout, if they have any (default: drawn from torch's random numbers). No dropout
                after model.eval().
    tokens_at_once   A larger batch is processed in pieces of complete sequences of about this size (default 1024, or 512 if
                only adapters train; twice as many new ones if it shares prefixes, which each piece computes again).
    finished    Called with the parameters of a layer as soon as their gradients are final, from the head to the embeddings,
                during the backward pass.
    record      Called with every intermediate under the paper's name, once per piece. It observes what this call computes
                and changes nothing. An `Observer` may be given as well.
    examples    Measures the gradient of each sequence (see `example_gradients`). Only ExampleNorms(grads=True) fills `.grad`
                as well.
    share       Compute prefixes that sequences have in common once, instead of once for each (`prefixes`). The result is the
                same up to rounding; without effect where examples or routers are measured, and for models with convolutions.
    routers     The losses of a mixture's routers of all calls that accumulate, as `GPT.count_routers` counts them, or a
                RouterLosses(model.config), which this call fills. Either holds their values.
    """

    recompute: str = "none"
    seed: int | None = None
    tokens_at_once: int | None = None
    finished: Finished = no_hook
    record: Record | Observer | None = None
    examples: ExampleGradients | None = None
    routers: RouterLosses | None = None
    share: bool = False

    def __post_init__(self) -> None:
        if self.recompute not in ("none", "blocks"):
            raise HandgradError(f"recompute must be 'none' or 'blocks', not {self.recompute!r}")
        if type(self.share) is not bool:
            raise HandgradError(f"share must be True or False, not {shown(self.share)}")
        told = self.record is None or isinstance(self.record, Observer) or callable(self.record)
        if not told or not callable(self.finished):
            raise HandgradError("record and finished must be functions: record=lambda name, tensor: ...")
        at_once = self.tokens_at_once
        if at_once is not None and (type(at_once) is not int or at_once < 1):
            raise HandgradError(f"tokens_at_once must be an integer of at least 1, not {shown(at_once)}")
        if not isinstance(self.examples, ExampleGradients | None):
            raise HandgradError(f"examples must be an ExampleNorms or another measurement, not {shown(self.examples)}")
        if not isinstance(self.routers, RouterLosses | None):
            raise HandgradError(f"routers must be what model.count_routers returns, not {shown(self.routers)}")

    @property
    def recomputes(self) -> bool:
        return self.recompute == "blocks"

    @property
    def observer(self) -> Observer | None:
        """Who sees the tensors of the pass."""
        if self.record is None:
            return None
        observer = self.record if isinstance(self.record, Observer) else Recorder(self.record)
        return observer if observer.edits else Unedited(observer)


DEFAULTS = PassOptions()
