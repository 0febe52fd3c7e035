"""The optimizer inside the backward pass: a layer is updated as soon as its gradients are final, and they are let go.

The optimizers themselves are torch's. The gradients of all layers never exist together, so the memory for them shrinks
from one copy of the model to its largest layer. Clipping by the global norm stays exact: the norm is measured on a way
up of its own, whose gradients are let go as well, before anything is updated.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .errors import HandgradError, NonFiniteError
from .gpt import GPT, Finished, Kept, count_targets, go_on


class OptimizerInBackward:
    """optimizer = OptimizerInBackward(model, lambda p: torch.optim.AdamW(p, lr=3e-4), clip=1.0)
    loss = optimizer.step(tokens, targets)

    clip        largest global norm of the gradient; measuring it costs a second way up
    recompute   "blocks": each block keeps only its input, and is computed again on the way up
    """

    def __init__(
        self,
        model: GPT,
        make: Callable[[list[nn.Parameter]], Optimizer],
        clip: float | None = None,
        recompute: str = "blocks",
        combine: Finished = go_on,
    ):
        self.model = model
        self.combine = combine  # gradients of several processes into one, before they are used
        self.clip = clip
        self.again = recompute == "blocks"
        self.optimizers: dict[nn.Parameter, Optimizer] = {}  # by each parameter of a layer
        for layer in model.layers():
            trained = [p for p in layer if p.requires_grad]
            if trained:
                optimizer = make(trained)
                self.optimizers |= dict.fromkeys(trained, optimizer)
        self.norm = math.nan  # of the last step's gradient, if it was measured

    @torch.no_grad()
    def step(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: list[int] | None = None,
        n_targets: int | None = None,
        seed: int | None = None,
    ) -> float:
        """One step on the whole batch, however large: it is walked in pieces, and every gradient is that of all of them.
        `n_targets` counts those of all processes together, if there are several; `seed` as in `GPT.loss_and_grads`."""
        model = self.model
        pieces = model.pieces(tokens, targets, lengths, draw=model.draw(seed))
        n_targets = count_targets(pieces, n_targets)
        _let_go(model.parameters())  # gradients of an earlier call are not part of this step
        kept = model.down(pieces, again=self.again)
        factor = 1.0
        if self.clip is not None:
            norms: list[float] = []

            def measure(layer: list[nn.Parameter]) -> None:
                self.combine(layer)
                norms.extend(norm(p.grad).item() for p in layer if p.grad is not None)
                _let_go(layer)

            self._up(kept, n_targets, measure, once=False)
            self.norm = length(norms)
            if not math.isfinite(self.norm):
                raise NonFiniteError("the gradient is not finite")  # before anything is updated
            factor = clip_factor(self.norm, self.clip)

        def update(layer: list[nn.Parameter]) -> None:
            self.combine(layer)
            for optimizer in {self.optimizers[p] for p in layer if p in self.optimizers}:
                step(optimizer, factor)
            _let_go(layer)

        return self._up(kept, n_targets, update)

    def _up(self, kept: Kept, n_targets: int, finished: Finished, once: bool = True) -> float:
        try:
            return self.model.up(kept, n_targets, finished=finished, once=once)
        except NonFiniteError:  # it shows in the head, before any layer is finished
            _let_go(self.model.parameters())
            raise

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """Of all layers, for a schedule to write the learning rate into."""
        return [group for optimizer in set(self.optimizers.values()) for group in optimizer.param_groups]


def _let_go(layer: Iterable[nn.Parameter]) -> None:
    for p in layer:
        p.grad = None


# ── torch's optimizers, by name ─────────────────────────────────────────────────────────────────────────────────────


def groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    """Weight decay on matrices only: gains and biases have no reason to shrink."""
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
    name: str, lr: float, weight_decay: float, betas: tuple[float, float]
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """An optimizer of torch.optim by name, for whatever parameters it is then given."""
    kinds = {k.lower(): v for k, v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, Optimizer)}
    for unfit in ("optimizer", "lbfgs", "sparseadam", "muon"):  # no rule, asks for closures, for sparsity, for matrices
        kinds.pop(unfit, None)
    if name.lower() in ("lbfgs", "sparseadam", "muon"):
        raise HandgradError(f"{name} needs closures, sparse gradients or matrices only: choose another optimizer")
    if name.lower() not in kinds:
        raise HandgradError(
            f"torch.optim has no {name!r}; choose {', '.join(sorted(k.__name__ for k in kinds.values()))}"
        )
    kind = kinds[name.lower()]
    takes = inspect.signature(kind).parameters
    options: dict[str, Any] = {"lr": lr}
    if "betas" in takes:
        options["betas"] = betas
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        options["fused"] = True
    decay = weight_decay if "weight_decay" in takes else 0.0
    return lambda parameters: kind(groups(parameters, decay), **options)


def clip_factor(norm: float, clip: float | None) -> float:
    """What brings a gradient of this norm down to `clip`, as torch's clip_grad_norm_ has it; 1 if there is no need."""
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def step(optimizer: Optimizer, factor: float) -> None:
    """One step with every gradient times `factor`. A fused kernel takes the factor along while it reads the gradients, by
    the way meant for loss scaling; for others they are multiplied first."""
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


def norm(grad: Tensor) -> Tensor:
    """√⟨g, g⟩ in float64: the library's product of vectors reads g once, at the speed of memory. Where the squares would
    leave the range of float32 (or float64), g is divided by its largest entry first."""
    flat = grad.reshape(-1)
    if grad.dtype == torch.bfloat16:  # would sum in three digits
        rounded: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)
        square = rounded.square()
    else:
        square = torch.dot(flat, flat)
        rounded = square.sqrt()
    limits = torch.finfo(square.dtype)
    if flat.numel() * limits.tiny / limits.eps <= square.item() <= limits.max:
        return rounded.double()
    largest = flat.abs().amax() if len(flat) else flat.new_zeros(())
    if largest == 0 or not torch.isfinite(largest):
        return largest.double()
    scaled: Tensor = torch.linalg.vector_norm(flat.double() / largest.double())
    return largest.double() * scaled


def length(norms: Iterable[float]) -> float:
    """The norm of all gradients together, from the norm of each."""
    norms = list(norms)
    total = math.sqrt(sum(x * x for x in norms))
    return total if 1e-150 < total < math.inf else math.hypot(*norms)


def learning_rate(progress: float, step: int, lr: float, least: float, warmup: int, schedule: str) -> float:
    """Up in a straight line for `warmup` steps, then down from lr to `least` as the run goes from 0 to 1."""
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    if schedule == "constant":
        return lr
    progress = min(1.0, max(0.0, progress))
    left = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return least + (lr - least) * left


def state_of(optimizer: "Optimizer | OptimizerInBackward", names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    """Everything the optimizer remembers, as named tensors: parameter's name, then its own word for it."""
    remembered: dict[str, Tensor] = {}
    for p, name in names.items():
        one = optimizer.optimizers.get(p) if isinstance(optimizer, OptimizerInBackward) else optimizer
        for key, value in (one.state.get(p, {}) if one is not None else {}).items():
            if value is not None:
                remembered[f"{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return remembered


def restore(
    optimizer: "Optimizer | OptimizerInBackward", names: dict[nn.Parameter, str], remembered: dict[str, Tensor]
) -> None:
    """The reverse of `state_of`."""
    by_name = {name: p for p, name in names.items()}
    for full, value in remembered.items():
        name, _, key = full.rpartition("/")
        p = by_name[name]
        one = optimizer.optimizers[p] if isinstance(optimizer, OptimizerInBackward) else optimizer
        one.state[p][key] = value.clone()
