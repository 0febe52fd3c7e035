"""`Logits`: what a model returns. It has no autograd graph; calling `.backward()` explains what to call instead."""

import copy
from typing import Any

from torch import Tensor

from ..errors import HandgradError

NO_GRAPH = (
    "there is no graph to differentiate: model.loss_and_grads(tokens, targets) returns the loss and adds its gradient to"
    " every parameter's .grad; after it, call the optimizer's step()"
)


class Logits(Tensor):
    """Logits, and tensors computed from them, without a graph: backward() raises with the remedy."""

    def backward(self, *args: Any, **options: Any) -> None:
        if not self.requires_grad:
            raise HandgradError(NO_GRAPH)
        super().backward(*args, **options)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.as_subclass(Tensor), memo)
