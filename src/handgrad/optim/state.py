"""An optimizer's state as named tensors, for a checkpoint; parameters where a resumed run sums in the same order."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .in_backward import OptimizerInBackward


def state_of(optimizer: Optimizer | OptimizerInBackward, names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    """The optimizer's state as tensors named parameter/key, such as transformer.wte.weight/exp_avg."""
    state: dict[str, Tensor] = {}
    for p, name in names.items():
        one = optimizer.optimizers.get(p) if isinstance(optimizer, OptimizerInBackward) else optimizer
        for key, value in (one.state.get(p, {}) if one is not None else {}).items():
            if value is not None:
                state[f"{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return state


ALIGNMENT = 64  # bytes, of what torch allocates


def align(parameters: Iterable[nn.Parameter]) -> None:
    """Copy parameters that lie at other addresses, as in a mapped file: sums depend on alignment, and files differ in it."""
    for p in parameters:
        if p.is_cpu and p.data_ptr() % ALIGNMENT:
            p.data = p.data.clone()


def restore(
    optimizer: Optimizer | OptimizerInBackward, names: dict[nn.Parameter, str], state: dict[str, Tensor]
) -> None:
    """Load what `state_of` returned."""
    by_name = {name: p for p, name in names.items()}
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        p = by_name[name]
        one = optimizer.optimizers[p] if isinstance(optimizer, OptimizerInBackward) else optimizer
        one.state[p][key] = value.clone()
