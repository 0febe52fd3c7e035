"""torch's optimizers by name, gradient norms and clipping."""

import inspect
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import HandgradError
from . import muon
from .muon import Maps, Matrices, MuonAndAdamW
from .stochastic_rounding import StochasticRounding, rounding_step


def groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups with weight decay on matrices only, not on gains and biases."""
    trained = [p for p in parameters if p.requires_grad]
    return [
        {"params": chosen, "weight_decay": decay}
        for chosen, decay in (
            ([p for p in trained if p.ndim >= 2], weight_decay),
            ([p for p in trained if p.ndim < 2], 0.0),
        )
        if chosen
    ]


def maker(
    name: str,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    rounding: StochasticRounding | None = None,
    matrices: Matrices | None = None,
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """A function that makes the named torch.optim optimizer for given parameters. With `rounding`, bfloat16 parameters are
    updated in float32 and rounded stochastically. Muon is for the given `matrices`, with AdamW for all other parameters."""
    known = {k: v for k, v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, Optimizer)}
    for unfit in ("Optimizer", "LBFGS", "SparseAdam"):  # base class, closures, sparse
        del known[unfit]
    if name.lower() in ("lbfgs", "sparseadam"):
        raise HandgradError(f"{name} needs closures or sparse gradients: choose another optimizer")
    kinds = {k.lower(): v for k, v in known.items()} | {"muon": MuonAndAdamW}
    if name.lower() not in kinds:
        raise HandgradError(f"torch.optim has no {name!r}; choose {', '.join(sorted(known))}")
    kind = kinds[name.lower()]
    if kind is not MuonAndAdamW:
        matrices = {}
    elif matrices is None:
        raise HandgradError("Muon needs to know the matrices: give matrices=handgrad.optim.matrices(model)")
    takes = inspect.signature(kind).parameters
    options: dict[str, Any] = {"lr": lr}
    if "betas" in takes:
        options["betas"] = betas
    if issubclass(kind, torch.optim.Adam):
        options["fused"] = True
    decay = weight_decay if "weight_decay" in takes else 0.0
    light: Any = _without_compiler(kind)  # type: ignore[arg-type]  # mypy takes a class for unhashable
    of = matrices

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        trained = [p for p in parameters if p.requires_grad]
        others = groups((p for p in trained if p not in of), decay)
        optimizer: Any = light([*muon.groups(trained, of, decay), *others], **options)
        optimizer.rounding = rounding
        return optimizer  # type: ignore[no-any-return]

    return make


@cache
def copies(name: str) -> tuple[int, int]:
    """How many copies of a matrix of the blocks, and of another parameter, the named optimizer's state holds."""
    matrix, other = parameters = [nn.Parameter(torch.ones(2, 3)) for _ in range(2)]
    optimizer = maker(name, 1e-3, 0.0, (0.9, 0.99), matrices={matrix: Maps(True)})(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    states = (optimizer.state[p].values() for p in (matrix, other))
    of_matrix, of_other = (sum(isinstance(x, Tensor) and x.shape == (2, 3) for x in state) for state in states)
    return of_matrix, of_other


@cache
def _without_compiler(kind: type[Optimizer]) -> type[Optimizer]:
    """A subclass of torch's optimizer that does not import torch's compiler, which takes two seconds and 75 MB.

    torch imports it to exclude these two methods from compilation. The subclass has them without that; hooks of steps are
    run by what torch puts around the step of any class. A pickled optimizer is one of torch's class."""
    step, add = inspect.unwrap(kind.step), inspect.unwrap(kind.add_param_group)
    rounded = torch.no_grad()(rounding_step(step))
    methods = {"step": rounded, "add_param_group": add, "__reduce__": lambda self: _as_torchs(self, kind)}
    return type(kind.__name__, (kind,), methods)


def _as_torchs(optimizer: Optimizer, kind: type[Optimizer]) -> tuple[Any, ...]:
    return kind.__new__, (kind,), optimizer.__getstate__()


def clip_factor(norm: float, clip: float | None) -> float:
    """The factor that scales a gradient of this norm down to `clip`, as torch's clip_grad_norm_; 1 if it is smaller."""
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def step(optimizer: Optimizer, factor: float) -> None:
    """One optimizer step with every gradient multiplied by `factor`. Fused kernels apply it while they read the gradients,
    through the interface meant for loss scaling; for the others the gradients are multiplied first."""
    if factor == 1:
        optimizer.step()
        return
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    fused = all(group.get("fused") for group in optimizer.param_groups)
    if fused and all(grad.dtype != torch.float64 for grad in grads):  # the kernel reads the factor in float32
        scaling: Any = optimizer
        scaling.grad_scale = grads[0].new_tensor(1 / factor, dtype=torch.float32)
        scaling.found_inf = torch.zeros_like(scaling.grad_scale)
        try:
            optimizer.step()
        finally:
            del scaling.grad_scale, scaling.found_inf
    else:
        torch._foreach_mul_(grads, factor)
        optimizer.step()


ROW = 1 << 14  # numbers; torch splits sums of twice as many


def norm(grad: Tensor) -> float:
    """√⟨g, g⟩, with the same bits for any number of threads: none splits a row. Where squares would leave the range of the
    dtype, g is divided by its largest entry first."""
    flat, wide = grad.reshape(-1), torch.promote_types(grad.dtype, torch.float32)  # a bfloat16 sum has three digits
    whole = len(flat) // ROW * ROW
    rows, rest = flat[:whole].view(-1, ROW), flat[whole:].view(1, -1)
    norms = torch.cat([torch.linalg.vector_norm(x, dim=1, dtype=wide) for x in (rows, rest)]).double()
    square = norms.square().sum().item()
    least, most = _squares(grad.dtype)
    if flat.numel() * least <= square <= most:
        return math.sqrt(square)
    largest = flat.abs().amax().item() if len(flat) else 0.0
    if largest == 0 or not math.isfinite(largest):
        return largest
    scaled: Tensor = torch.linalg.vector_norm(flat.double() / largest)
    return largest * scaled.item()


@cache
def _squares(dtype: torch.dtype) -> tuple[float, float]:
    """The range in which a sum of squares is exact to the dtype's digits; the first is that of a single square."""
    limits = torch.finfo(torch.promote_types(dtype, torch.float32))
    return limits.tiny / limits.eps, limits.max


def length(norms: Iterable[float]) -> float:
    """The global norm, from the norms of the parts."""
    norms = list(norms)
    total = math.sqrt(sum(x * x for x in norms))
    return total if 1e-150 < total < math.inf else math.hypot(*norms)
