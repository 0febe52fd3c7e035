"""Run the audited model's own forward and backward pass, and write down what it computes.

The model is left as it was: gradients, dropout and modes are restored. Autograd here is the audited model's.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import HandgradError
from ...model.inspect.trace import own_gradients
from .batch import AuditBatch
from .points import Point, points_of
from .subject import Subject

Loss = Callable[[Any, dict[str, Tensor]], Any]
Norm = Callable[[Any], Any]  # a model whose parameters have gradients → their norm, as clipping uses it


@dataclass
class Observed:
    """What one pass of the audited model computed, in float64 on the CPU."""

    loss: float | None  # None: the function that computes it did not return it
    values: dict[str, Tensor] = field(default_factory=dict)  # activations (B · T, d) by the point's name
    signals: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)  # by the audited parameter's name
    stale: dict[str, Tensor] = field(default_factory=dict)  # gradients that frozen parameters had before
    chosen: dict[str, Tensor] = field(default_factory=dict)  # (B · T, k) numbers of experts, by the name of the gates
    dtype: torch.dtype = torch.float32  # the narrowest in which an activation was computed
    norm: float | None = None  # of all gradients, as the user's function computes it


def plain_loss(model: Any, inputs: dict[str, Tensor]) -> Any:
    """The loss that a model of transformers computes itself."""
    out = model(**inputs, use_cache=False)
    loss = out.get("loss") if hasattr(out, "get") else None
    if loss is None:
        raise HandgradError("the model returns no loss: give loss=, a function of the model and the batch")
    return loss


def shared_loss(n_targets: int) -> Loss:
    """A part's share of the loss of a batch with this many targets, as transformers' Trainer asks for it."""

    def loss(model: Any, inputs: dict[str, Tensor]) -> Any:
        return model(**inputs, use_cache=False, num_items_in_batch=n_targets).loss

    return loss


def observe(
    subject: Subject, batch: AuditBatch, loss: Loss = plain_loss, *, points: bool = True, norm: Norm | None = None
) -> Observed:
    """One forward and backward pass of the audited model."""
    device = next(subject.base.parameters()).device
    inputs = {name: x.to(device) for name, x in batch.inputs.items()}
    parameters = {t.parameter for t in subject.tracked}
    frozen = {t.name: t.grad for t in subject.tracked if t.grad is not None and not t.parameter.requires_grad}
    with _quiet(subject.model), own_gradients(parameters):
        tape = _Tape(subject) if points else None
        try:
            with torch.enable_grad():
                result = loss(subject.model, inputs)
                if all(p.grad is None for p in parameters):
                    _differentiate(result)
                value = None if result is None else float(result.detach() if isinstance(result, Tensor) else result)
        finally:
            if tape is not None:
                tape.close()
        seen = Observed(value, stale=frozen, dtype=subject.dtype)
        seen.grads = {t.name: None if t.grad is None else _wide(t.grad) for t in subject.tracked}
        seen.norm = None if norm is None else float(norm(subject.model))
        if tape is not None:
            seen.values, seen.signals, seen.chosen = tape.read(batch)
            seen.dtype = max((subject.dtype, *tape.dtypes), key=lambda d: torch.finfo(d).eps)
    return seen


def _differentiate(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        raise HandgradError(
            "no parameter received a gradient: the loss must be a tensor that depends on the parameters, or the"
            " function must call backward() itself"
        )
    loss.backward()  # type: ignore[no-untyped-call]


def take_step(model: nn.Module, inputs: dict[str, Tensor], optimizer: torch.optim.Optimizer, loss: Loss) -> None:
    """One step of training without dropout."""
    optimizer.zero_grad()
    with _quiet(model), torch.enable_grad():
        result = loss(model, inputs)
        if all(p.grad is None for p in model.parameters()):
            _differentiate(result)
    optimizer.step()


def logits_of(model: nn.Module, batch: AuditBatch) -> Tensor:
    """The audited model's logits of the tokens that are no padding (n, V)."""
    device = next(model.parameters()).device
    inputs = {name: x.to(device) for name, x in batch.inputs.items() if name != "labels"}
    with _quiet(model), torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    return _wide(logits.flatten(0, 1)[batch.rows.to(device)])


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Training mode, with every dropout at 0."""
    modes = {m: m.training for m in model.modules()}
    changed: list[tuple[Any, str, float]] = []
    for module in modes:
        layer = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(module).items()):  # attn_pdrop, residual_dropout: each model has its own names
            if isinstance(value, float) and value and (name == "p" if layer else "drop" in name):
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module, name, value in changed:
            setattr(module, name, value)


class _Tape:
    """What passes the points of a model: a value each time its module runs, and the signal that comes back for it."""

    def __init__(self, subject: Subject):
        self.points, self.n_experts = points_of(subject.ours), subject.config.n_experts
        self.values: dict[str, list[Tensor]] = {}
        self.signals: dict[str, list[Tensor | None]] = {}
        self.dtypes: set[torch.dtype] = set()
        self.chosen: dict[str, list[Tensor]] = {}
        self._hooks: list[Any] = []
        for point in self.points:
            module = subject.module(point.module)
            if module is not None:
                self._hooks.append(module.register_forward_hook(partial(self._passed, point), with_kwargs=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _passed(self, point: Point, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A hook: store what enters or leaves the module of a point."""
        if point.side == "gates":
            self._store_gates(point, [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)])
        elif point.side == "in":
            self._store(point, args[0] if args else kwargs.get("hidden_states", kwargs.get("input")))
        else:
            self._store(point, out[0] if isinstance(out, tuple) and out else out)

    def _store_gates(self, point: Point, given: list[Tensor]) -> None:
        """Store the gates that experts are given beside the numbers (n, k) of the experts."""
        chosen = next((x for x in given if not x.is_floating_point()), None)
        gates = next(
            (x for x in given if chosen is not None and x.is_floating_point() and x.shape == chosen.shape), None
        )
        if chosen is not None and gates is not None and self.n_experts is not None:
            self.chosen.setdefault(point.name, []).append(chosen.detach().cpu())
            self._store(point, gates, partial(of_experts, chosen.detach().cpu(), self.n_experts))

    def _store(self, point: Point, x: Any, rows: Callable[[Tensor], Tensor] | None = None) -> None:
        """Store a tensor, and its error signal when it arrives, as `rows` arranges them."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return
        self.dtypes.add(x.dtype)
        width = x.shape[-1] // point.parts
        here = slice(point.part * width, (point.part + 1) * width)
        rows = rows or (lambda x: x[..., here].reshape(-1, width))
        self.values.setdefault(point.name, []).append(rows(_wide(x)))
        arrived = self.signals.setdefault(point.name, [])
        arrived.append(None)
        if x.requires_grad:
            index = len(arrived) - 1

            def receive(grad: Tensor) -> None:
                arrived[index] = rows(_wide(grad))

            x.register_hook(receive)  # type: ignore[no-untyped-call]

    def read(self, batch: AuditBatch) -> tuple[dict[str, Tensor], ...]:
        """Values, signals and chosen experts of every row of the batch, padding included, where the calls add up to the
        batch."""
        arrived = {name: [x for x in calls if x is not None] for name, calls in self.signals.items()}
        whole = [
            {name: _last_rows(calls, batch.rows.numel()) for name, calls in found.items()}
            for found in (self.values, arrived, self.chosen)
        ]
        return tuple({name: x for name, x in found.items() if x is not None} for found in whole)


def _last_rows(calls: list[Tensor], n: int) -> Tensor | None:
    """The last calls, if they have n rows together; earlier ones were recomputed."""
    taken: list[Tensor] = []
    while calls and sum(len(x) for x in taken) < n:
        taken.insert(0, calls[-1])
        calls = calls[:-1]
    return torch.cat(taken) if sum(len(x) for x in taken) == n else None


def of_experts(chosen: Tensor, n_experts: int, x: Tensor) -> Tensor:
    """(n, k) numbers of the chosen experts → (n, E), 0 at the others"""
    return x.new_zeros(len(x), n_experts).scatter_add_(1, chosen, x)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64, copy=True)
