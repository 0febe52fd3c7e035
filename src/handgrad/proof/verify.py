"""`verify`: check every activation, error signal and gradient of a model against the reference and finite differences, and
every code path that users take."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..checks import check_integer
from ..errors import HandgradError, shown
from ..lora.injection import adapters_of
from ..machine import available_memory
from ..model.gpt import GPT
from ..model.names import block_of
from ..model.passes.objective import MEAN_LOSS, MeanLoss, Objective
from ..tolerances import DIFFERENCE_FLOOR, NORM_FLOOR, TOLERANCE
from .check_report import Report, Watch, progress_bar, run_check, spinner
from .checker import Checker, activation_names, check_finite_and_trained, concatenate, loss_of, signal_names
from .mixed import mixed_paths
from .oracles import directional_error
from .paths import (
    SMALL_MODEL,
    Batch,
    Gradients,
    Path,
    adapter_paths,
    generation_paths,
    gradients_of,
    low_bit_paths,
    prefix_paths,
    trace_paths,
    training_paths,
)
from .reference_model import Part, ReferenceModel
from .tensor_errors import TensorErrors
from .wide_layers import float64_copy, in_one_dtype, shared_copy

# bytes per parameter: a float64 copy, its gradients by hand, by autograd and by a code path, and the largest of these again
WHOLE = 8 * 5
BY_BLOCK = 8 * 6  # bytes per parameter of the largest block: the same, and autograd's intermediates


def verify(
    model: GPT,
    tokens: Tensor,
    targets: Tensor,
    lengths: list[int] | None = None,
    *,
    objective: Objective = MEAN_LOSS,
    seed: int = 0,
    watch: Watch | None = None,
) -> Report:
    """Check every error signal and every parameter gradient of a model on these tokens against autograd and finite
    differences in float64; then the gradients of every code path of training, those computed in the model's own dtype, the
    log-probabilities that generation computes, low bits and adapters. In mixed precision (`model.precision`) every product
    is checked with its rounded operands, and every gradient within what rounding explains. A model that is too large for
    that is in float64 a block at a time, and the code paths are computed in its own dtype. Dropout is off, except in
    separate checks by finite differences. A missing signal or gradient fails.

    `objective` is what to differentiate instead of the mean loss: hg.PositionLoss(t), hg.DPO(reference=…) … `watch` may
    wrap the sequence of names that finite differences test (default: a progress bar, on a terminal). The model is not
    changed.
    """
    check_integer("seed", seed)
    if not isinstance(model, GPT):
        raise HandgradError(f"verify takes a model of handgrad (hg.load, hg.GPT), not {shown(model)}")
    if watch is not None and not callable(watch):
        raise HandgradError(f"watch must be a function of a list of names, such as tqdm, not {shown(watch)}")
    model.prepare(model.pack(tokens, lengths), targets, objective, complete=True)  # raises if the batch is wrong
    check_finite_and_trained(model)
    return _Verification(model, Batch(tokens, targets, lengths, objective), seed).run(watch)


class _Verification:
    """One run of `verify`, whose checks it adds to `report`."""

    def __init__(self, model: GPT, batch: Batch, seed: int):
        self.model, self.batch, self.seed = model, batch, seed
        self.report = Report(f"{model.size:,} parameters, {batch.tokens.numel()} tokens")
        self.expected: list[str] = []
        self.report.expected = self.expected
        self.kind = str(model.dtype).removeprefix("torch.")
        self.mixed = shared_copy(model) if model.operand is not None else None
        self.own = in_one_dtype(shared_copy(model))  # as it computes itself
        checked = float64_copy(model) if fits_whole(model) else self.own
        narrow = gradients_of(self.own, batch) if model.dtype != torch.float64 else None
        self.rounding = TensorErrors()
        grads: dict[str, Tensor] = {}

        def collect(part: Part) -> None:
            for name, grad in part.grads.items():
                if checked.dtype == torch.float64:
                    if name not in grads:
                        grads[name] = grad.new_full(model.get_parameter(name).shape, math.nan)
                    grads[name][... if part.rows is None else part.rows] = grad
                if narrow is not None:
                    found = narrow[1][name]
                    self.rounding.add(name, found if part.rows is None else found[part.rows], grad, norm=True)

        with spinner("gradients by hand and by autograd, in float64"):
            self.checker = Checker(checked, *batch[:2], lengths=batch.lengths, objective=batch.objective, seed=seed,
                                   dtype=model.dtype, collect=collect)  # fmt: skip
        self.product = checked  # in which the code paths are computed
        self.gradients: Gradients = narrow or (0.0, {})
        if self.checker.whole:
            self.gradients = (self.checker.expected_loss, grads)

    def run(self, watch: Watch | None) -> Report:
        self._tensors()
        self._training()
        self._differences(watch or progress_bar("finite differences"))
        del self.checker.ours  # as large as the model
        self._rounding()
        with spinner("traces, generation and adapters"):
            self._add_paths(self._other_paths())
        if self.mixed is not None:
            with spinner("products and gradients in mixed precision"):
                reference = ReferenceModel(in_one_dtype(shared_copy(self.model)), *self.batch)
                self._add_paths(mixed_paths(self.mixed, self.batch, reference, self.seed))
        return self.report

    def _add(self, section: str, id: str, note: str, oracle: str, limit: float, measure: Callable[[], object]) -> None:
        self.report.checks.append(run_check(id, section, "", note, oracle, limit, measure))
        if id not in self.expected:
            self.expected.append(id)

    def _add_paths(self, paths: Iterator[Path]) -> None:
        for path in paths:
            self._add(*path)

    def _tensors(self) -> None:
        """Activations, error signals and gradients in float64."""
        c, model = self.checker, self.model
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._add("Forward", "loss", "mean", "reference", c.limit, lambda: c.errors["loss"])
        if (name := "losses of the routers") in c.errors:
            self._add("Forward", name, "weighted sum", "reference", c.limit, lambda: c.errors[name])
        for section, oracle, names in (
            ("Forward", "reference", activation_names(model)),
            ("Error signals", "autograd", signal_names(model)[::-1]),
            ("Parameter gradients", "autograd", trained),
        ):
            for name in names:
                shape = " × ".join(f"{n:,}" for n in c.shapes.get(name, ()))
                self._add(section, name, shape, oracle, c.limit, partial(self._error, name))

    def _error(self, name: str) -> object:
        c = self.checker
        return (math.inf, "was not computed") if name in c.absent or name not in c.errors else c.errors[name]

    def _training(self) -> None:
        """The code paths of training. Of the gradients, which are as large as the model, only their largest entry stays."""
        oracle = "autograd" if self.checker.whole else "one pass"
        given = self.product, self.batch, self.gradients, oracle
        paths = [*training_paths(*given), *prefix_paths(*given)]
        self._add_paths(iter(progress_bar("code paths of training")(paths)))
        self.largest = max(vector_norm(x, math.inf).item() for x in self.gradients[1].values())
        del self.gradients

    def _differences(self, watch: Watch) -> None:
        c, model = self.checker, self.checker.reference.model
        probes: dict[str, Callable[[], float]] = {}
        for name in self._probed_signals():
            self.expected.append(f"{name} along u")
            if name in c.ours:
                probes[name] = partial(c.difference, name)
        for group, names in self._probed_parameters().items():
            probes[group] = partial(c.difference_of, names)
        if c.whole and any(adapter.dropout for adapter in adapters_of(model).values()):
            probes |= self._dropout_probes(model.train())
        self.expected += [f"{name} along u" for name in probes if f"{name} along u" not in self.expected]
        for name in watch(list(probes)):
            self._add("Finite differences", f"{name} along u", "u is a random direction", "finite diff.",
                      c.difference_limit, probes[name])  # fmt: skip
        model.eval()

    def _probed_signals(self) -> list[str]:
        """Every signal of a small model; of a large one each block's Δ_1 and the signals of the head; a block at a time,
        Δ_1 of the lowest and the highest block alone."""
        names, n = signal_names(self.model), self.model.config.n_blocks
        if self.model.size <= SMALL_MODEL:
            return names
        chosen = range(n) if self.checker.whole else (0, n - 1)
        firsts = dict.fromkeys(f"blocks.{i}.delta_1" for i in chosen)
        return [*firsts, *(name for name in names if "." not in name)]

    def _probed_parameters(self) -> dict[str, list[str]]:
        """Every parameter of a small model by itself; of a large one those of each layer together; a block at a time, those
        of the lowest and the highest block and the final norm."""
        groups: dict[str, list[str]] = {}
        for name in self.checker.trained:
            block = block_of(name)
            layer = name.rpartition(".")[0] if block is None else name.partition(f".{block}.")[0] + f".{block}"
            inner = block not in (None, 0, self.model.config.n_blocks - 1)
            if self.checker.whole or (not inner and self.checker.can_differentiate(name)):
                groups.setdefault(name if self.model.size <= SMALL_MODEL else layer, []).append(name)
        return groups

    def _dropout_probes(self, model: GPT) -> dict[str, Callable[[], float]]:
        """Finite differences of the model's own loss under one seed's dropout masks, which the reference cannot draw: every
        parameter of a small model separately, of a large one all together."""
        batch, c = self.batch, self.checker
        _, grads = gradients_of(model, batch, seed=self.seed)
        small = model.size <= SMALL_MODEL
        groups = {f"{x} with dropout": [x] for x in grads} if small else {"all with dropout": list(grads)}
        floor = DIFFERENCE_FLOOR * max(x.norm().item() for x in grads.values())
        generator = torch.Generator(model.device).manual_seed(self.seed)

        def loss() -> float:
            return gradients_of(model, batch, seed=self.seed)[0]

        def measure(names: list[str]) -> float:
            members, claimed = [model.get_parameter(x) for x in names], concatenate([grads[x] for x in names])
            with loss_of(model, members, loss) as (f, at):
                return directional_error(f, at, claimed, generator, floor, c.steps)

        return {group: partial(measure, names) for group, names in groups.items()}

    def _rounding(self) -> None:
        """Gradients computed in the model's own dtype. Above the tolerance, what rounding explains is allowed."""
        errors, limit = self.rounding.relative(NORM_FLOOR), TOLERANCE[self.model.dtype]
        explained: dict[str, float] = {}
        if any(error > limit for error in errors.values()):
            explained = self.checker.gradient_errors_by_rounding(self.model.dtype, self.seed)
        for name in self.checker.trained if self.model.dtype != torch.float64 else ():
            error = errors.get(name, math.inf)
            allowed = limit if error <= limit else max(limit, explained.get(name, 0.0))
            self._add(f"Computed in {self.kind}", f"{name} in {self.kind}", "", "autograd", allowed,
                      partial(errors.get, name, math.inf))  # fmt: skip

    def _other_paths(self) -> Iterator[Path]:
        """Traces, generation, low bits and adapters. The last change the copy that was checked."""
        model, batch, c = self.product, self.batch, self.checker
        found = [trace_paths(model, batch)]
        if model.config.causal:
            logits = c.reference.logits()
            if c.whole:
                found.append(generation_paths(model, batch, logits, "Generation"))
            if self.model.dtype != torch.float64:
                found.append(generation_paths(self.own, batch, logits, f"Generation in {self.kind}", f", {self.kind}"))
            if c.whole:
                found.append(low_bit_paths(self.own, batch))
        if c.whole:
            found.append(adapter_paths(model, batch, self.largest, self.seed, self.model.size <= SMALL_MODEL))
        self._note_left_out()
        return chain.from_iterable(found)

    def _note_left_out(self) -> None:
        found, whole = self.report.left_out, self.checker.whole
        if not whole:
            found.append(
                "generation in float64, low bits and adapters: the model does not fit into the memory in float64"
            )
        elif self.model.size > SMALL_MODEL and not adapters_of(self.model):
            found.append(f"new adapters: the model has more than {SMALL_MODEL:,} parameters")
        if self.mixed is not None and self.model.size > SMALL_MODEL:
            found.append(f"products of examples: the model has more than {SMALL_MODEL:,} parameters")
        if type(self.batch.objective) is not MeanLoss:
            found.append("norms of examples and the optimizer in backward: they know the mean loss alone")


def fits_whole(model: GPT) -> bool:
    """Whether a model fits into the memory in float64 as a whole; raises if it does not even a block at a time."""
    free, _ = available_memory()
    if WHOLE * model.size <= free:
        return True
    largest = max(sum(p.numel() for p in block.parameters()) for block in model.blocks)
    own = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    needed = BY_BLOCK * largest + 3 * own  # gradients of several paths in its own dtype
    if model.dtype == torch.float64:
        needed = WHOLE * model.size
    if needed > free:
        raise HandgradError(
            f"verifying this model needs about {needed / 1e9:.0f} GB, but {free / 1e9:.0f} GB are free: verify a smaller"
            " model of the same family, this one in a narrower dtype, or an adapter of it"
        )
    return False


def verify_on_random_batch(model: GPT, seed: int) -> Report:
    """`verify` on three random sequences of different lengths, with a fifth of the targets ignored."""
    check_integer("seed", seed)
    if model.size < SMALL_MODEL:
        torch.set_num_threads(1)  # a second thread would only wait
    lengths = [min(n, model.config.n_context) for n in (9, 1, 6)]
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(model.config.n_vocab, (sum(lengths),), generator=generator) for _ in range(2))
    targets[torch.rand(len(targets), generator=generator) < 0.2] = -100
    targets[0] = tokens[-1]
    return verify(model, tokens, targets, lengths, seed=seed)
