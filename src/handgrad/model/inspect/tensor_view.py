"""The tensors of a trace as a notebook shows them: heat maps with the text of every token. Computing with one gives an
ordinary tensor."""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import HandgradError
from ...files.framed import Framed
from .heat_maps import Grid, heat_maps, numbered

if TYPE_CHECKING:
    from .trace import Trace

PER_HEAD = ("rho", "delta_rho", "delta_raw", "delta_causal")  # maps between tokens


class TraceTensor(Tensor):
    """A tensor of a trace, which displays itself."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors
    _name: str
    _trace: "Trace"

    def show(self, words: Sequence[str] | None = None) -> Framed:
        """Heat maps, a map per head, with the exact value of the cell under the pointer; it is marked in every map.

        words   The texts of the tokens; default: by the model's tokenizer, or ids.
        """
        labels = self._trace.words if words is None else [*words]
        n = len(self._trace["a_0"])
        if len(labels) != n:
            raise HandgradError(f"words has {len(labels)} texts, and the trace {n} tokens: give one for each")
        return heat_maps(self._name, _grids(self._name, self.detach(), labels), kind=_kind(self._name))

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(_plain(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(_plain(self), memo)


def shown_as(x: Tensor, name: str, trace: "Trace") -> Tensor:
    """The same tensor, which displays itself under its name."""
    found = x.as_subclass(TraceTensor)
    found._name, found._trace = name, trace
    return found


def _plain(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor)


def _kind(name: str) -> str:
    last = name.rpartition(".")[2]
    return "delta" if last.startswith(("delta", "grad")) else "a"


def _grids(name: str, x: Tensor, words: list[str]) -> list[Grid]:
    """The maps of a tensor: (n, d) one, (heads, n, …) one per head, a vector one row."""
    last = name.rpartition(".")[2]
    tokens = numbered(words)
    if x.ndim == 3:
        columns = tokens if last in PER_HEAD else []
        return [Grid(f"head {i}", its, tokens, columns) for i, its in enumerate(x)]
    if x.ndim == 2:
        of_tokens = len(x) == len(words) and not last.startswith("grad_")
        return [Grid("", x, tokens if of_tokens else [], [])]
    of_tokens = len(x) == len(words) and last == "a_0"
    return [Grid("", x.reshape(1, -1), [], tokens if of_tokens else [])]
