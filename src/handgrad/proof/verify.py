"""The judge: autograd, finite differences and a counter of operations, and their verdict on a whole model.

This is the only file of the package in which autograd may appear, and nothing that trains or runs a model imports it.
`ledger/` uses these oracles to prove the paper line by line; `verify` uses them on a whole model.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..adapters.injection import adapters_of
from ..errors import HandgradError, NonFiniteError
from ..model.config import GPTConfig
from ..model.gpt import GPT
from .oracles import FINITE_DIFFERENCE_TOLERANCE, TOLERANCE, directional_error, relative_error
from .paths import gradients_of, training_paths
from .reference import Truth, Twin, wide_copy
from .report import Report, judge

# ── the oracles ─────────────────────────────────────────────────────────────────────────────────────────────────────


# ── a whole model ───────────────────────────────────────────────────────────────────────────────────────────────────


Watch = Callable[[Sequence[str]], Iterable[str]]
BYTES_PER_PARAMETER = 8 * 5  # a wide copy, its gradients twice, autograd's, and one direction for finite differences
EACH_BY_ITSELF = 5_000_000  # parameters up to which finite differences visit every parameter and signal separately


def verify(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    lengths: list[int] | None = None,
    *,
    seed: int = 0,
    watch: Watch = iter,
) -> Report:
    """Every error signal and every parameter gradient of a model on these tokens, against autograd and against finite
    differences, in float64; the gradients once more by every path that training takes, which keeps no signals; and what
    the model computes in its own dtype. Dropout is off, but for checks of its own by finite differences. A signal or a
    gradient that is missing fails.

    `watch` may wrap the sequence of names that finite differences visit, for a progress bar. The model is not changed.
    """
    check_judgeable(model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    wide = wide_copy(model)
    ours: dict[str, Tensor] = {}
    loss, grads = gradients_of(wide, tokens, targets, lengths, record=ours.__setitem__, all_signals=True)
    judge_twin = Twin(wide, tokens, targets, lengths)
    truth = judge_twin.run()

    report = Report(f"{sum(p.numel() for p in model.parameters()):,} parameters, {tokens.numel()} tokens")

    def add(section: str, id: str, note: str, oracle: str, limit: float, measure: Callable[[], object]) -> None:
        report.checks.append(judge(id, section, "", note, oracle, limit, measure))

    limit = TOLERANCE[torch.float64]
    add("Forward", "loss", "mean", "twin", limit, lambda: _loss_error(loss, truth))
    for name in activation_names(model.config):
        value = truth.values[name.replace("a_", "delta_")]
        add("Forward", name, _shape(value), "twin", limit, _error(ours, name, value))
    for name in reversed(signal_names(model.config)):
        signal, floor = truth.deltas[name], largest(truth.deltas)
        add("Error signals", name, _shape(signal), "autograd", limit, _error(ours, name, signal, 1e-4 * floor))
    for name in trained:
        grad, floor = truth.grads[name], largest(truth.grads)
        add("Parameter gradients", name, _shape(grad), "autograd", limit, _error(grads, name, grad, 1e-4 * floor))

    paths = training_paths(wide, tokens, targets, lengths)
    for path, run in paths.items():
        add("As training computes them", path, f"{len(trained)} gradients", "autograd", limit,
            lambda run=run: _worst(run(), trained, truth))  # type: ignore[misc]  # fmt: skip

    generator = torch.Generator(model.device).manual_seed(seed)
    steps, difference_limit = difference_steps(model.config)
    probes = _probes(judge_twin, ours, grads)
    if any(adapter.dropout for adapter in adapters_of(model).values()):
        wide.train()
        probes |= _dropout_probes(judge_twin, tokens, targets, lengths, seed)
    for name in watch(list(probes)):
        probe = probes[name]
        add("Finite differences", f"{name} along u", "u is a random direction", "finite diff.", difference_limit,
            lambda probe=probe: directional_error(probe.f, probe.at, probe.grad, generator, probe.floor, steps))  # type: ignore[misc]  # fmt: skip
        probe.f(probe.at)  # puts the parameters back

    kind = str(model.dtype).removeprefix("torch.")
    if model.dtype != torch.float64:
        floor = 1e-2 * max(g.norm().item() for g in truth.grads.values())
        narrow = gradients_of(copy.deepcopy(model).eval(), tokens, targets, lengths)[1]
        for name in trained:
            measure = norm_error(narrow[name], truth.grads[name], floor)
            add(f"As computed in {kind}", f"{name} in {kind}", "", "autograd", TOLERANCE[model.dtype], measure)

    report.expected = ["loss", *activation_names(model.config), *signal_names(model.config), *trained, *paths]
    report.expected += [f"{name} along u" for name in dict.fromkeys([*_probed_signals(model), *probes])]
    report.expected += [f"{name} in {kind}" for name in trained if model.dtype != torch.float64]
    return report


def signal_names(config: GPTConfig) -> list[str]:
    """Every error signal a model of this shape has, from the lowest to Δ_12."""
    parts = (1, 2, "raw", "causal", 3, 4, 5, 6, 7, 8, 9, 10)
    return [*(f"blocks.{i}.delta_{part}" for i in range(config.n_blocks) for part in parts), "delta_11", "delta_12"]


def activation_names(config: GPTConfig) -> list[str]:
    """Every activation that has an error signal; scores are not kept, ρ is rebuilt from them."""
    signals = signal_names(config)
    return [name.replace("delta_", "a_") for name in signals if not name.endswith(("_raw", "_causal"))]


def _loss_error(loss: float, truth: Truth) -> float:
    return abs(loss - truth.loss) / max(abs(truth.loss), 1e-3)


def _worst(found: tuple[float, dict[str, Tensor]], trained: list[str], truth: Truth) -> tuple[float, str]:
    """The largest error of the loss and of all these gradients, and where it is."""
    loss, grads = found
    floor = 1e-4 * largest(truth.grads)
    errors = {"loss": _loss_error(loss, truth)}
    for name in trained:
        errors[name] = relative_error(grads[name], truth.grads[name], floor) if name in grads else math.inf
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def check_judgeable(model: GPT) -> None:
    needed, free = BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters()), free_memory()
    if needed > free:
        raise HandgradError(
            f"judging this model in float64 takes about {needed / 1e9:.0f} GB and {free / 1e9:.0f} GB are free:"
            " choose a smaller model of the same family"
        )
    if model.transformer.wte.weight.dtype not in TOLERANCE:
        raise HandgradError(f"cannot judge {model.transformer.wte.weight.dtype}: use float64, float32 or bfloat16")
    if not any(p.requires_grad for p in model.parameters()):
        raise HandgradError("every parameter is frozen (requires_grad=False): there is no gradient to judge")
    broken = [name for name, p in model.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise NonFiniteError(f"the weights hold NaN or infinity in {broken[0]}: load a sound checkpoint")


def free_memory() -> float:
    """Bytes a process can still have, as far as the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf


class _Probe(NamedTuple):
    """A scalar function of a tensor, where to differentiate it, and the gradient claimed there."""

    f: Callable[[Tensor], float]
    at: Tensor
    grad: Tensor
    floor: float


def _probes(judge_twin: Twin, ours: dict[str, Tensor], grads: dict[str, Tensor]) -> dict[str, _Probe]:
    """What finite differences visit: every signal and parameter of a small model; of a large one each block's Δ_1, the
    signals of the head, and the parameters of a layer together."""
    model = judge_twin.model
    signals = [name for name in _probed_signals(model) if name in ours]
    probes = {}
    floor = 1e-3 * max(ours[name].norm().item() for name in signals)
    for name in signals:
        f: Callable[[Tensor], float] = lambda x, name=name: judge_twin.nudged(name, x)  # type: ignore[misc]  # noqa: E731
        probes[name] = _Probe(f, torch.zeros_like(ours[name]), ours[name], floor)
    groups: dict[str, list[str]] = {}
    for name in grads:
        layer = ".".join(name.split(".")[:3]) if ".h." in name else name.rpartition(".")[0]
        groups.setdefault(name if _small(model) else layer, []).append(name)
    return probes | _parameter_probes(model, groups, grads, judge_twin.unchanged)


def _probed_signals(model: GPT) -> list[str]:
    names = signal_names(model.config)
    return names if _small(model) else [name for name in names if name.endswith("delta_1") or "." not in name]


def _dropout_probes(
    judge_twin: Twin, tokens: Tensor, targets: Tensor, lengths: list[int] | None, seed: int
) -> dict[str, _Probe]:
    """The twin drops nothing, so the loss under one seed's masks is the model's own, and finite differences judge its
    gradients: those of every parameter of a small model, of a large one all together."""
    model = judge_twin.model

    def loss() -> float:
        return model.loss_and_grads(tokens, targets, lengths, seed=seed)

    _, grads = gradients_of(model, tokens, targets, lengths, seed=seed)
    groups = {f"{name} with dropout": [name] for name in grads} if _small(model) else {"all with dropout": list(grads)}
    return _parameter_probes(model, groups, grads, loss)


def _parameter_probes(
    model: GPT, groups: dict[str, list[str]], grads: dict[str, Tensor], loss: Callable[[], float]
) -> dict[str, _Probe]:
    parameters = dict(model.named_parameters())
    floor = 1e-3 * max(g.norm().item() for g in grads.values())
    probes = {}
    for group, names in groups.items():
        members = [parameters[name] for name in names]
        at = torch.cat([p.detach().reshape(-1) for p in members])
        grad = torch.cat([grads[name].reshape(-1) for name in names])
        probes[group] = _Probe(loss_of(members, loss), at, grad, floor)
    return probes


def _small(model: GPT) -> bool:
    return sum(p.numel() for p in model.parameters()) <= EACH_BY_ITSELF


def loss_of(members: list[nn.Parameter], loss: Callable[[], float]) -> Callable[[Tensor], float]:
    """The loss as a function of these parameters, laid end to end."""

    def f(values: Tensor) -> float:
        for p, part in zip(members, torch.split(values, [p.numel() for p in members]), strict=True):
            p.data.copy_(part.view_as(p))
        return loss()

    return f


def difference_steps(config: GPTConfig) -> tuple[tuple[float, ...], float]:
    """Steps of finite differences, and the error they may have."""
    if config.activation == "relu":  # a large step would cross the kinks
        return (1e-6,), 1e-4
    return (1e-3, 1e-4, 1e-5, 1e-6), FINITE_DIFFERENCE_TOLERANCE


def largest(tensors: dict[str, Tensor]) -> float:
    return max(x.abs().max().item() for x in tensors.values())


def _error(ours: dict[str, Tensor], name: str, truth: Tensor, floor: float = 0.0) -> Callable[[], object]:
    def measure() -> object:
        return relative_error(ours[name], truth, floor) if name in ours else (math.inf, "was not computed")

    return measure


def norm_error(ours: Tensor, truth: Tensor, floor: float) -> Callable[[], object]:
    """‖ours − truth‖ / ‖truth‖: of many rounded numbers, not of the one that was rounded worst"""
    return lambda: (ours.double() - truth).norm().item() / (max(truth.norm().item(), floor) or 1.0)


def _shape(x: Tensor) -> str:
    return " × ".join(f"{n:,}" for n in x.shape)
