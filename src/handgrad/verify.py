"""The judge: autograd, finite differences and a counter of operations, and their verdict on a whole model.

This is the only file of the package in which autograd may appear, and nothing that trains or runs a model imports it.
`ledger/` uses these oracles to prove the paper line by line; `verify` uses them on a whole model.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

from .config import GPTConfig
from .errors import HandgradError, NonFiniteError
from .gpt import GPT
from .layers import Head as LogitsLayer
from .layers import Linear, LoRA
from .paper.attention import Head
from .paper.transformer import Block, Network, Options
from .paths import gradients_of, training_paths
from .report import Report, judge

# Largest relative error of a gradient or an error signal, by the dtype in which it was computed.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}
FINITE_DIFFERENCE_TOLERANCE = 1e-6


# ── the oracles ─────────────────────────────────────────────────────────────────────────────────────────────────────


def relative_error(ours: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """max|ours − truth| / max(max|truth|, floor). Not a number anywhere, or another shape, is an infinite error."""
    if ours.shape != truth.shape:
        return math.inf
    if truth.numel() == 0:
        return 0.0
    ours, truth = ours.detach().double(), truth.detach().double()
    difference = (ours - truth).abs().max().item()
    scale = max(truth.abs().max().item(), floor)
    if math.isnan(difference):
        return math.inf
    return difference if scale == 0 else difference / scale


def differentiate(f: Callable[..., Tensor], *inputs: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, ...]:
    """∂(upstream · f(inputs))/∂inputs by torch's automatic differentiation; `upstream` is Δ_i, or 1 for a scalar f."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = f(*leaves)
        total = out.sum() if upstream is None else (out * upstream).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))


def forward_mode(f: Callable[[Tensor], Tensor], x: Tensor, dx: Tensor) -> Tensor:
    """df for a given dx, by torch's forward-mode differentiation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about a compiler it loads on the way
        df: Tensor = torch.func.jvp(f, (x.detach(),), (dx,))[1]
    return df


def finite_difference(f: Callable[[Tensor], float], x: Tensor, direction: Tensor, step: float = 1e-3) -> float:
    """d f(x + s·direction)/ds at s = 0: central differences of fourth order allow a large s and little rounding"""
    values = [f(x + k * step * direction) for k in (1, -1, 2, -2)]
    return (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step)


def direction_near(grad: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction of length about 1, but not orthogonal to `grad`: the derivative along it would be noise."""
    noise = torch.randn(grad.shape, generator=generator, dtype=grad.dtype, device=grad.device)
    noise /= noise.norm()
    size = grad.norm().item()
    return noise if size == 0 else noise + grad / size


def directional_error(
    f: Callable[[Tensor], float],
    x: Tensor,
    grad: Tensor,
    generator: torch.Generator,
    floor: float = 0.0,
    steps: Sequence[float] = (1e-3, 1e-4, 1e-5, 1e-6),
) -> float:
    """|⟨grad, u⟩ − finite difference of f along u| relative to ‖grad‖, for a random direction u."""
    u = direction_near(grad, generator)
    claimed = (grad * u).sum().item()
    scale = max(grad.norm().item(), floor) or 1.0
    best = math.inf
    for step in steps:  # the right step depends on how sharply f bends; a wrong gradient agrees with none
        error = abs(claimed - finite_difference(f, x, u, step)) / scale
        best = min(best, math.inf if math.isnan(error) else error)
        if best < FINITE_DIFFERENCE_TOLERANCE / 10:
            break
    return best


def count_multiply_adds(f: Callable[[], object]) -> int:
    """How many multiply-adds the matrix products inside f perform (torch's counter gives two FLOP for each)."""
    with FlopCounterMode(display=False) as counter:
        f()
    return int(counter.get_total_flops()) // 2


# ── a whole model ───────────────────────────────────────────────────────────────────────────────────────────────────


def options_of(config: GPTConfig) -> Options:
    return Options(config.activation, config.eps, config.causal)


def network_of(model: GPT) -> Network:
    """The model's parameters as the paper writes them, head by head. Slices and sums of the model's own tensors."""

    def biased(layer: Linear | LogitsLayer | LoRA) -> tuple[Tensor, Tensor | None]:
        return layer.effective_weight(), (layer.base if isinstance(layer, LoRA) else layer).bias

    def heads(weight: Tensor, bias: Tensor | None) -> list[Head]:
        h, d_rho, d_h = model.config.n_heads, model.config.query_width, model.config.value_width
        widths = [h * d_rho, h * d_rho, h * d_h]
        w = [x.chunk(h, 1) for x in torch.split(weight, widths, 1)]
        if bias is None:
            raise HandgradError("the attention layer has no bias to judge")
        if model.config.key_bias:
            b = [x.chunk(h) for x in torch.split(bias, widths)]
        else:
            b = [x.chunk(h) for x in torch.split(bias, [h * d_rho, h * d_h])]
            b.insert(1, (None,) * h)  # type: ignore[arg-type]
        return [Head(w[0][i], b[0][i], w[1][i], b[1][i], w[2][i], b[2][i]) for i in range(h)]

    t = model.transformer
    blocks = []
    for block in model.blocks:
        w_3, b_3 = biased(block.attn.c_proj)
        w_6, b_6 = biased(block.mlp.c_fc)
        w_8, b_8 = biased(block.mlp.c_proj)
        assert b_3 is not None and b_6 is not None and b_8 is not None
        blocks.append(
            Block(
                block.ln_1.weight, block.ln_1.bias, heads(*biased(block.attn.c_attn)), w_3, b_3,
                block.ln_2.weight, block.ln_2.bias, w_6, b_6, w_8, b_8,
            )
        )  # fmt: skip
    plain_tied = model.config.tied and not isinstance(model.lm_head, LoRA)
    w_11, b_11 = biased(model.lm_head)
    return Network(t.wte.weight, t.wpe.weight, blocks, t.ln_f.weight, t.ln_f.bias, None if plain_tied else w_11, b_11)


Station = Callable[[str, Tensor], Tensor]


def twin(p: Network, o: Options, ids: Tensor, targets: Tensor, station: Station) -> Tensor:
    """The same network for one sequence, written with torch's own functions: the sum of the losses over the targets.
    Every intermediate passes through `station` under the name of its Δ, to be watched or nudged."""
    n = len(ids)
    future = torch.ones(n, n, dtype=torch.bool, device=ids.device).triu(1)
    a = F.embedding(ids, p.w_tok) + p.w_pos[:n]
    for i, block in enumerate(p.blocks):

        def stop(name: str, x: Tensor, i: int = i) -> Tensor:
            return station(f"blocks.{i}.delta_{name}", x)

        a_1 = stop("1", a)
        a_2 = stop("2", F.layer_norm(a_1, block.w_1.shape, block.w_1, block.b_1, o.eps))
        q = [a_2 @ head.w_q + head.b_q for head in block.heads]
        k = [a_2 @ head.w_k + (0 if head.b_k is None else head.b_k) for head in block.heads]
        v = [a_2 @ head.w_v + head.b_v for head in block.heads]
        raw = stop("raw", torch.stack([x @ y.T for x, y in zip(q, k, strict=True)]))
        scaled = stop("causal", torch.stack([x / math.sqrt(y.shape[1]) for x, y in zip(raw, q, strict=True)]))
        rho = F.softmax(scaled.masked_fill(future, -math.inf) if o.causal else scaled, -1)
        a_3 = stop("3", torch.cat([r @ x for r, x in zip(rho, v, strict=True)], 1))
        a_4 = stop("4", a_3 @ block.w_3 + block.b_3)
        a_5 = stop("5", a_1 + a_4)
        a_6 = stop("6", F.layer_norm(a_5, block.w_5.shape, block.w_5, block.b_5, o.eps))
        a_7 = stop("7", a_6 @ block.w_6 + block.b_6)
        a_8 = stop(
            "8", F.relu(a_7) if o.g == "relu" else F.gelu(a_7, approximate="tanh" if o.g == "gelu_tanh" else "none")
        )
        a_9 = stop("9", a_8 @ block.w_8 + block.b_8)
        a = stop("10", a_5 + a_9)
    a_11 = station("delta_11", F.layer_norm(a, p.w_10.shape, p.w_10, p.b_10, o.eps))
    logits = a_11 @ (p.w_tok.T if p.w_11 is None else p.w_11)
    if p.adapter is not None:
        logits = logits + p.adapter.scale * (a_11 @ p.adapter.d_11 @ p.adapter.u_11)
    a_12 = station("delta_12", logits if p.b_11 is None else logits + p.b_11)
    return F.cross_entropy(a_12, targets, reduction="sum")  # torch ignores −100 too


class Truth(NamedTuple):
    loss: float
    values: dict[str, Tensor]  # by the name of their Δ
    deltas: dict[str, Tensor]
    grads: dict[str, Tensor]  # by the name of the parameter


def network_truth(p: Network, o: Options, ids: Tensor, targets: Tensor) -> tuple[Truth, Network]:
    """Autograd's verdict on a network written as in the paper: values and Δ by name, and the gradients as a Network."""
    flat, shape = tree_flatten(p)
    leaves = [x.detach().clone().requires_grad_() if isinstance(x, Tensor) else x for x in flat]
    seen: dict[str, Tensor] = {}

    def visit(name: str, x: Tensor) -> Tensor:
        seen[name] = x
        return x

    with torch.enable_grad():
        loss = twin(tree_unflatten(leaves, shape), o, ids, targets, visit)
        parameters = [x for x in leaves if isinstance(x, Tensor)]
        wanted = [*seen.values(), *parameters]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    found = iter([torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)])
    values = {name: x.detach() for name, x in seen.items()}
    truth = Truth(loss.item(), values, {name: next(found) for name in seen}, {})
    return truth, tree_unflatten([next(found) if isinstance(x, Tensor) else x for x in leaves], shape)


class Twin:
    """The model's twin over a packed batch: its loss, and by autograd every Δ and every parameter's gradient."""

    def __init__(self, model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None):
        self.model = model
        batch = model.pack(tokens, lengths)
        self.lengths, self.ids = batch.lengths, batch.ids
        self.targets = targets.reshape(-1).to(self.ids)
        self.n_targets = int((self.targets != -100).sum())
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        self.pause: Callable[[], None] = lambda: None

    def loss(self, visit: Callable[[int, str, Tensor], Tensor]) -> Tensor:
        """The mean loss; `visit(start, name, x)` sees each station of the sequence that begins in row `start`."""
        network, options = network_of(self.model), options_of(self.model.config)
        total = self.ids.new_zeros((), dtype=torch.float64)
        for start, n in zip(self.starts, self.lengths, strict=True):
            rows = slice(start, start + n)

            def station(name: str, x: Tensor, start: int = start) -> Tensor:
                self.pause()
                return visit(start, name, x)

            total = total + twin(network, options, self.ids[rows], self.targets[rows], station)
        return total / self.n_targets

    def run(self) -> Truth:
        """Autograd's verdict on the whole batch."""
        seen: dict[str, list[Tensor]] = {}

        def visit(start: int, name: str, x: Tensor) -> Tensor:
            seen.setdefault(name, []).append(x)
            return x

        parameters = dict(self.model.named_parameters())
        frozen = [p for p in parameters.values() if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)  # so that every station is on the graph
        with torch.enable_grad():
            loss = self.loss(visit)
            flat = [x for parts in seen.values() for x in parts]
            wanted = [*flat, *parameters.values()]
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        for p in frozen:
            p.requires_grad_(False)
        found = iter([torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)])
        values = {name: self._assemble(parts) for name, parts in seen.items()}
        deltas = {name: self._assemble([next(found) for _ in parts]) for name, parts in seen.items()}
        return Truth(loss.item(), values, deltas, {name: next(found) for name in parameters})

    def nudged(self, name: str, change: Tensor) -> float:
        """The loss with `change` added to the station of that name; no name, no change."""

        def visit(start: int, here: str, x: Tensor) -> Tensor:
            if here != name:
                return x
            rows = slice(start, start + x.shape[-2])
            return x + (change[:, rows, rows] if x.ndim == 3 else change[rows])

        with torch.no_grad():
            return self.loss(visit).item()

    def unchanged(self) -> float:
        return self.nudged("", self.ids)

    def _assemble(self, parts: list[Tensor]) -> Tensor:
        """One sequence after the other: rows below each other, maps between tokens along the diagonal."""
        parts = [x.detach() for x in parts]
        if parts[0].ndim == 2:
            return torch.cat(parts)
        n = sum(self.lengths)
        whole = parts[0].new_zeros(parts[0].shape[0], n, n)
        for start, x in zip(self.starts, parts, strict=True):
            rows = slice(start, start + x.shape[-1])
            whole[:, rows, rows] = x
        return whole


def wide_copy(model: GPT) -> GPT:
    """The model in float64, without dropout, to be judged."""
    return made_wide(copy.deepcopy(model))


def made_wide(model: GPT) -> GPT:
    model = model.double().eval()
    for layer in model.modules():
        if isinstance(layer, LoRA) and layer.magnitude is not None:
            _hold_norms(layer)
    return model


def _hold_norms(layer: LoRA) -> None:
    """DoRA's column norms count as constants: they stay where they are while finite differences nudge a factor."""
    norms = layer.column_norms()
    layer.column_norms = lambda: norms  # type: ignore[method-assign]


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
    loss, grads = gradients_of(wide, tokens, targets, lengths, ours.__setitem__)
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
    if any(isinstance(layer, LoRA) and layer.dropout for layer in model.modules()):
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
