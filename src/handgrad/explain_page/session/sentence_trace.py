"""The trace of a sentence without its gradients, which are as large as the model: their lengths are measured while the
backward pass makes and frees them, and those of one layer are computed again when one is asked for."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from ...model.gpt import GPT
from ...model.inspect.trace import Trace, gradients, own_gradients, record_pass
from ...model.passes.arguments import Record
from ...model.passes.objective import Objective
from ..presentation.pictures import length

Compute = Callable[["SentenceTrace", str], Tensor]  # the gradient of that name


class SentenceTrace(Trace):
    """A trace with the same names and values as `hg.trace`.

    norms   lengths of all gradients, by name
    """

    def __init__(
        self,
        values: dict[str, Tensor],
        loss: float,
        lengths: tuple[int, ...],
        objective: Objective,
        norms: dict[str, float],
        compute: Compute,
    ):
        super().__init__(values, loss, lengths, objective)
        self.norms, self._compute = norms, compute

    def __getitem__(self, name: str) -> Tensor:
        return self._compute(self, name) if name in self.norms else super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return name in self.norms or super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self.norms

    def __len__(self) -> int:
        return super().__len__() + len(self.norms)

    @property
    def bytes(self) -> int:
        """Size of the tensors that are stored."""
        storages = (x.untyped_storage() for x in self._values.values())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def trace_sentence(
    model: GPT, tokens: Tensor, targets: Tensor, objective: Objective, compute: Compute, record: Record | None = None
) -> SentenceTrace:
    """Run the model forward and backward once; hold the gradients of one layer at a time. `record` is called with every
    tensor as soon as it is computed."""
    values: dict[str, Tensor] = {}
    norms: dict[str, float] = {}

    def keep(name: str, value: Tensor) -> None:
        values[name] = value
        if record is not None:
            record(name, value)

    def measure(parameters: list[nn.Parameter]) -> None:
        for name, grad in gradients(model, parameters).items():
            norms[name] = length(grad)
        for p in parameters:
            p.grad = None

    with own_gradients(model.parameters()):
        loss = record_pass(model, tokens, targets, objective=objective, record=keep, finished=measure)
    return SentenceTrace(values, loss, (tokens.shape[1],), objective, norms, compute)
