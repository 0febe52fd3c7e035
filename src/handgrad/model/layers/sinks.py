"""The sinks of attention's heads: learned scores without a key, b (h), one for each head. `ops/attention.py` has the
arithmetic; the parameter belongs to `Attention`, as in Hugging Face's files.
"""

from typing import NamedTuple

from torch import Tensor, nn

from ..passes.arguments import Pass


class Sinks(NamedTuple):
    """The parameter with the interface of a layer, for those who read the steps of a block."""

    weight: nn.Parameter

    def accumulate(self, signals: Tensor, run: Pass) -> None:
        """Add Σ_t of every row's part (n, h) to the gradient."""
        p = self.weight
        if not p.requires_grad:
            return
        if run.examples is not None:
            run.examples.sums(p, signals)
        else:
            found = signals.sum(0).to(p.dtype)
            p.grad = found if p.grad is None else p.grad.add_(found)

    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        """The parameter by its letter: b_sink."""
        return {"b": self.weight}
