"""What a model returns has no graph of torch's. A habit from torch, `.backward()`, gets an answer that helps."""

from typing import Any

from torch import Tensor

from .errors import HandgradError

NO_GRAPH = (
    "there is no graph to differentiate: model.loss_and_grads(tokens, targets) returns the loss and adds its gradient to"
    " every parameter's .grad; after it, call the optimizer's step()"
)


class Loss(float):
    """A float, whose backward() says where the gradients come from."""

    def backward(self, *_: object, **__: object) -> None:
        raise HandgradError(NO_GRAPH)

    def __reduce__(self) -> tuple[type, tuple[float]]:
        return float, (float(self),)


class Logits(Tensor):
    """Logits and what is computed from them: plain tensors without a graph, whose backward() says so."""

    def backward(self, *args: Any, **options: Any) -> None:
        if not self.requires_grad:
            raise HandgradError(NO_GRAPH)
        super().backward(*args, **options)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
