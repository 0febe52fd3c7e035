"""`verify`: check every activation, error signal and gradient of a model against the reference and finite differences."""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..adapters.injection import adapters_of
from ..checks import check_integer
from ..errors import HandgradError, NonFiniteError
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..model.names import block_of
from ..tolerances import (
    DIFFERENCE_FLOOR,
    ENTRY_FLOOR,
    FINITE_DIFFERENCE_TOLERANCE,
    LOSS_FLOOR,
    NORM_FLOOR,
    RELU_DIFFERENCE_TOLERANCE,
    TOLERANCE,
)
from .oracles import directional_error, relative_error
from .paths import Gradients, gradients_of, training_paths
from .reference import Reference, ReferenceModel, float64_copy
from .report import Report, Watch, progress_bar, run_check, spinner

BYTES_PER_PARAMETER = 8 * 5  # a float64 copy, its gradients twice, autograd's, and one direction for finite differences
SMALL_MODEL = 5_000_000  # parameters up to which finite differences test every parameter and signal separately


def verify(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    lengths: list[int] | None = None,
    *,
    seed: int = 0,
    watch: Watch | None = None,
) -> Report:
    """Check every error signal and every parameter gradient of a model on these tokens against autograd and finite
    differences in float64; then the gradients of every code path of training, and those computed in the model's own
    dtype. Dropout is off, except in separate checks by finite differences. A missing signal or gradient fails.

    `watch` may wrap the sequence of names that finite differences test (default: a progress bar, on a terminal). The model
    is not changed.
    """
    check_integer("seed", seed)
    check_verifiable(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    ours: dict[str, Tensor] = {}
    with spinner("gradients by hand and by autograd, in float64"):
        wide = float64_copy(model)
        loss, grads = gradients_of(wide, tokens, targets, lengths, record=ours.__setitem__, all_signals=True)
        reference = ReferenceModel(wide, tokens, targets, lengths)
        expected = reference.differentiate()

    report = Report(f"{model.size:,} parameters, {tokens.numel()} tokens")

    def add(section: str, id: str, note: str, oracle: str, limit: float, measure: Callable[[], object]) -> None:
        report.checks.append(run_check(id, section, "", note, oracle, limit, measure))

    limit = TOLERANCE[torch.float64]
    add("Forward", "loss", "mean", "reference", limit, lambda: loss_error(loss, expected))
    for name in activation_names(model.config):
        value = expected.values[name.replace("a_", "delta_")]
        add("Forward", name, _shape(value), "reference", limit, _error(ours, name, value))
    floor = entry_floor(expected.deltas)
    for name in reversed(signal_names(model.config)):
        signal = expected.deltas[name]
        add("Error signals", name, _shape(signal), "autograd", limit, _error(ours, name, signal, floor))
    floor = entry_floor(expected.grads)
    for name in trained:
        grad = expected.grads[name]
        add("Parameter gradients", name, _shape(grad), "autograd", limit, _error(grads, name, grad, floor))

    paths = training_paths(wide, tokens, targets, lengths)
    for path, run in progress_bar("code paths of training")(list(paths.items())):
        add("Code paths of training", path, f"{len(trained)} gradients", "autograd", limit,
            lambda run=run: _worst(run(), trained, expected))  # type: ignore[misc]  # fmt: skip

    generator = torch.Generator(model.device).manual_seed(seed)
    steps, difference_limit = difference_steps(model.config)
    probes = _probes(reference, ours, grads)
    if any(adapter.dropout for adapter in adapters_of(model).values()):
        wide.train()
        probes |= _dropout_probes(wide, tokens, targets, lengths, seed)
    for name in (watch or progress_bar("finite differences"))(list(probes)):
        probe = probes[name]
        add("Finite differences", f"{name} along u", "u is a random direction", "finite diff.", difference_limit,
            lambda probe=probe: directional_error(probe.f, probe.at, probe.grad, generator, probe.floor, steps))  # type: ignore[misc]  # fmt: skip
        probe.f(probe.at)  # restores the parameters

    kind = str(model.dtype).removeprefix("torch.")
    if model.dtype != torch.float64:
        floor = NORM_FLOOR * largest_norm(expected.grads.values())
        narrow = gradients_of(copy.deepcopy(model).eval(), tokens, targets, lengths)[1]
        for name in trained:
            measure = partial(norm_error, narrow[name], expected.grads[name], floor)
            add(f"Computed in {kind}", f"{name} in {kind}", "", "autograd", TOLERANCE[model.dtype], measure)

    report.expected = ["loss", *activation_names(model.config), *signal_names(model.config), *trained, *paths]
    report.expected += [f"{name} along u" for name in dict.fromkeys([*_probed_signals(model), *probes])]
    report.expected += [f"{name} in {kind}" for name in trained if model.dtype != torch.float64]
    return report


def signal_names(config: ModelConfig) -> list[str]:
    """Every error signal of a model of this shape, from the lowest block's Δ_1 to Δ_12."""
    expanded = ("gate", "up") if config.gated else (7,)
    parts = (1, 2, "raw", "causal", 3, 4, 5, 6, *expanded, 8, 9, 10)
    return [*(f"blocks.{i}.delta_{part}" for i in range(config.n_blocks) for part in parts), "delta_11", "delta_12"]


def activation_names(config: ModelConfig) -> list[str]:
    """Every activation that has an error signal, except the scores, which are not stored: ρ is rebuilt from them."""
    signals = signal_names(config)
    return [name.replace("delta_", "a_") for name in signals if not name.endswith(("_raw", "_causal"))]


def loss_error(loss: float, expected: Reference) -> float:
    return abs(loss - expected.loss) / max(abs(expected.loss), LOSS_FLOOR)


def _worst(found: Gradients, trained: list[str], expected: Reference) -> tuple[float, str]:
    """The largest error of the loss and of all these gradients, and the name it belongs to."""
    loss, grads = found
    floor = entry_floor(expected.grads)
    errors = {"loss": loss_error(loss, expected)}
    for name in trained:
        errors[name] = relative_error(grads[name], expected.grads[name], floor) if name in grads else math.inf
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def check_verifiable(model: GPT) -> None:
    """Raise if the model is too large for this machine, is all frozen, or holds NaN."""
    needed, free = BYTES_PER_PARAMETER * model.size, free_memory()
    if needed > free:
        raise HandgradError(
            f"verifying this model in float64 needs about {needed / 1e9:.0f} GB, but {free / 1e9:.0f} GB are free:"
            " verify a smaller model of the same family"
        )
    check_finite_and_trained(model)


def check_finite_and_trained(model: GPT) -> None:
    """Raise if the model is all frozen or holds NaN."""
    if not any(p.requires_grad for p in model.parameters()):
        raise HandgradError(
            "every parameter is frozen, so there is no gradient to verify: set requires_grad=True on at least one"
        )
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise NonFiniteError(f"the weights hold NaN or infinity in {broken[0]}: load an intact checkpoint")


def free_memory() -> float:
    """Bytes of available memory; infinity if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf


class _Probe(NamedTuple):
    """A scalar function of a tensor, the point at which to differentiate it, and the gradient claimed there."""

    f: Callable[[Tensor], float]
    at: Tensor
    grad: Tensor
    floor: float


def _probes(reference: ReferenceModel, ours: dict[str, Tensor], grads: dict[str, Tensor]) -> dict[str, _Probe]:
    """What finite differences test: every signal and parameter of a small model; of a large one each block's Δ_1, the
    signals of the head, and the parameters of each layer together."""
    model = reference.model
    signals = [name for name in _probed_signals(model) if name in ours]
    probes = {}
    floor = DIFFERENCE_FLOOR * largest_norm(ours[name] for name in signals)
    for name in signals:
        f: Callable[[Tensor], float] = lambda x, name=name: reference.loss_with(name, x)  # type: ignore[misc]  # noqa: E731
        probes[name] = _Probe(f, torch.zeros_like(ours[name]), ours[name], floor)
    groups: dict[str, list[str]] = {}
    for name in grads:
        block = block_of(name)
        layer = name.rpartition(".")[0] if block is None else name.partition(f".{block}.")[0] + f".{block}"
        groups.setdefault(name if _small(model) else layer, []).append(name)
    return probes | _parameter_probes(model, groups, grads, reference.plain_loss)


def _probed_signals(model: GPT) -> list[str]:
    names = signal_names(model.config)
    return names if _small(model) else [name for name in names if name.endswith("delta_1") or "." not in name]


def _dropout_probes(
    model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None, seed: int
) -> dict[str, _Probe]:
    """Finite differences of the model's own loss under one seed's dropout masks, which the reference model cannot draw:
    every parameter of a small model separately, of a large one all together."""

    def loss() -> float:
        return model.loss_and_grads(tokens, targets, lengths, seed=seed)

    _, grads = gradients_of(model, tokens, targets, lengths, seed=seed)
    groups = {f"{name} with dropout": [name] for name in grads} if _small(model) else {"all with dropout": list(grads)}
    return _parameter_probes(model, groups, grads, loss)


def _parameter_probes(
    model: GPT, groups: dict[str, list[str]], grads: dict[str, Tensor], loss: Callable[[], float]
) -> dict[str, _Probe]:
    parameters = dict(model.named_parameters())
    floor = DIFFERENCE_FLOOR * largest_norm(grads.values())
    probes = {}
    for group, names in groups.items():
        members = [parameters[name] for name in names]
        grad = concatenate([grads[name] for name in names])
        probes[group] = _Probe(loss_of(members, loss), concatenate(members), grad, floor)
    return probes


def _small(model: GPT) -> bool:
    return model.size <= SMALL_MODEL


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """All entries in one vector."""
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def loss_of(members: list[nn.Parameter], loss: Callable[[], float]) -> Callable[[Tensor], float]:
    """The loss as a function of these parameters, concatenated."""

    def f(values: Tensor) -> float:
        for p, part in zip(members, torch.split(values, [p.numel() for p in members]), strict=True):
            p.data.copy_(part.view_as(p))
        return loss()

    return f


def difference_steps(config: ModelConfig) -> tuple[tuple[float, ...], float]:
    """Step sizes for finite differences, and their tolerance."""
    if config.activation == "relu":  # a large step would cross the kinks
        return (1e-6,), RELU_DIFFERENCE_TOLERANCE
    return (1e-3, 1e-4, 1e-5, 1e-6), FINITE_DIFFERENCE_TOLERANCE


def entry_floor(tensors: dict[str, Tensor]) -> float:
    """The least size that errors of these tensors are relative to."""
    return ENTRY_FLOOR * float(max(x.abs().max().item() for x in tensors.values()))


def largest_norm(tensors: Iterable[Tensor]) -> float:
    return float(max(x.norm().item() for x in tensors))


def _error(ours: dict[str, Tensor], name: str, expected: Tensor, floor: float = 0.0) -> Callable[[], object]:
    def measure() -> object:
        return relative_error(ours[name], expected, floor) if name in ours else (math.inf, "was not computed")

    return measure


def norm_error(ours: Tensor, expected: Tensor, floor: float) -> float:
    """‖ours − expected‖ / max(‖expected‖, floor): rounding over the whole tensor, not in its worst entry"""
    return float((ours.double() - expected).norm().item()) / (max(expected.norm().item(), floor) or 1.0)


def _shape(x: Tensor) -> str:
    return " × ".join(f"{n:,}" for n in x.shape)
