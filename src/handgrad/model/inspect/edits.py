"""An observer that replaces tensors: what is behind `hg.trace(..., edit={name: function})`.

What uses a tensor uses the edited one:

    activation   everything after it. For the backward pass the edit is an added constant: Δ passes it unchanged.
    Δ            everything below it, the gradients of the parameters of its layer included. The loss stays.

Besides the names of a trace there are the skip connections (skip_5 is a_1 on its way to a_5, skip_10 is a_5 on its way to
a_10; delta_skip_5 and delta_skip_10) and the signals inside attention (delta_rho, and delta_q and delta_k after a rotation).
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from torch import Tensor

from ...errors import HandgradError, shown
from ..passes.arguments import Observer, Record

Edits = Mapping[str, Callable[[Tensor], Tensor]]


class Editor(Observer):
    """Records every tensor, edited if there is an edit of its name."""

    edits = True

    def __init__(self, functions: Edits, record: Record):
        if not isinstance(functions, Mapping) or not all(
            isinstance(name, str) and callable(f) for name, f in functions.items()
        ):
            raise HandgradError("edit must be a dict of functions by name: edit={'blocks.0.a_3': lambda a: 0 * a}")
        self.functions, self.record = functions, record
        self.seen: set[str] = set()  # what can be edited

    def at(self, name: str, x: Tensor) -> Tensor:
        self.seen.add(name)
        if name in self.functions:
            edited = self.functions[name](x.clone())
            if not isinstance(edited, Tensor) or edited.shape != x.shape:
                raise HandgradError(
                    f"the edit of {name} must return a tensor of shape {tuple(x.shape)}, not {shown(edited)[:80]}"
                )
            x = edited.to(x)
        self.record(name, x)
        return x

    def note(self, name: str, x: Tensor) -> None:
        self.record(name, x)

    def check_names(self) -> None:
        """Raise if an edit has a name that the pass did not meet."""
        for name in self.functions:
            if name not in self.seen:
                near = get_close_matches(name, self.seen, 3) or sorted(self.seen)[:3]
                raise HandgradError(f"there is nothing to edit at {name!r}; the closest names are {', '.join(near)}")
