"""Several adapters of one base in one pass: every row of the stream goes through the adapter of its sequence.

    load_named(model, {"polite": "runs/polite", "short": "runs/short"})
    Pass(adapters=groups([("polite", 1), (None, 7), ("short", 1)]))        # rows of three sequences
    with selected(model, "polite"): ...                                    # as if it were the only one

Inference only: to train an adapter, load it alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import HandgradError, NonFiniteError
from ..model.gpt import GPT
from ..model.layers.linear import Affine, Dtype, Linear
from ..model.passes.arguments import PLAIN, Pass, Rows
from ..model.storage.weights import STORED, Weights
from .injection import adapters_of, put, remove
from .layer import LoRA
from .peft import load, replaced_tensors
from .peft_config import read_config


class NamedAdapters(Affine):
    """A linear layer and the adapters that share it, by name.

    y_i = base(a_i)                        rows without an adapter, or whose adapter does not change this layer
    y_i = base(a_i) + scale · a_i d u      rows of a plain adapter; those of DoRA are computed by its own layer
    """

    def __init__(self, base: Linear):
        super().__init__()
        self.base = base
        self.branches: dict[str, LoRA] = {}  # not submodules: a name may have any character

    def forward(
        self, a: Tensor, run: Pass = PLAIN, out: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        groups = [(self.branches[name], rows) for name, rows in run.adapters if name in self.branches]
        if len(groups) == 1 and isinstance(groups[0][1], slice) and groups[0][1] == slice(0, len(a)):
            return groups[0][0].forward(a, run, out, dtype)
        out = self.base.forward(a, run, out)
        for branch, rows in groups:
            if branch.magnitude is not None:
                out[rows] = branch.forward(a[rows], run)
            elif isinstance(rows, slice):
                branch.add_branch(a[rows], into=out[rows])
            else:
                some = out[rows]
                branch.add_branch(a[rows], into=some)
                out[rows] = some
        return out if dtype is None else out.to(dtype)

    def backward(
        self, delta: Tensor, run: Pass = PLAIN, into: Tensor | None = None, upstream: Any = None, dtype: Dtype = None
    ) -> Tensor:
        raise HandgradError("several adapters do not train at once: use `selected`, or load one alone")

    def accumulate(self, delta: Tensor, a: Tensor, run: Pass = PLAIN, upstream: Any = None) -> None:
        self.backward(delta, run)

    def effective_weight(self, weights: Weights = STORED) -> Tensor:
        return self.base.effective_weight(weights)

    def plain(self) -> Linear:
        return self.base

    def low_rank(self) -> list[tuple[Tensor, Tensor, float]] | None:
        """Those of a pass in which no row has an adapter."""
        return []

    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        return self.base.named_symbols()


def groups(work: Sequence[tuple[str | None, int]]) -> tuple[tuple[str, Rows], ...]:
    """The adapter and the number of rows of every sequence, in order → the rows of each adapter."""
    parts: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for name, count in work:
        if name is not None:
            parts.setdefault(name, []).append((start, start + count))
        start += count
    return tuple((name, _rows(found)) for name, found in parts.items())


def _rows(parts: list[tuple[int, int]]) -> Rows:
    if all(end == start for (_, end), (start, _) in pairwise(parts)):
        return slice(parts[0][0], parts[-1][1])
    return torch.cat([torch.arange(start, end) for start, end in parts])


def load_named(model: GPT, folders: Mapping[str, str | Path]) -> None:
    """Put the adapters of several directories into a model. If one does not fit, the model is not changed."""
    if adapters_of(model) or model.named_adapters:
        raise HandgradError("the model has an adapter already: load its base model, then all adapters by name")
    loaded: dict[str, dict[str, LoRA]] = {}
    trained = [p for p in model.parameters() if p.requires_grad]
    for name, folder in folders.items():
        config = read_config(Path(folder))
        if config.modules_to_save or config.bias != "none":
            what = "layers in full (modules_to_save)" if config.modules_to_save else f"biases (bias={config.bias})"
            raise HandgradError(f"{folder} trains {what}, which cannot share a base: load it alone, or merge it")
        try:
            load(model, folder, load_head_copy=False)
            _check_copies(model, Path(folder))
            loaded[name] = adapters_of(model)
        finally:
            remove(model)
            for p in trained:
                p.requires_grad_(True)
    name_adapters(model, loaded)


def name_adapters(model: GPT, adapters: Mapping[str, Mapping[str, LoRA]]) -> None:
    """Put several adapters, by name and layer, into the model that they were made for and removed from."""
    layers: dict[str, NamedAdapters] = {}
    for name, own in adapters.items():
        for where, adapter in own.items():
            layers.setdefault(where, NamedAdapters(adapter.base)).branches[name] = adapter
    for where, layer in layers.items():
        put(model, where, layer)
    model.named_adapters = {name: list(own) for name, own in adapters.items()}


def _check_copies(model: GPT, folder: Path) -> None:
    """Raise if the adapter brings a layer of its base along that is not this model's."""
    for name, copied in replaced_tensors(folder, model.config.table)[1].items():
        layer, _, kind = name.rpartition(".")
        own = getattr(adapters_of(model)[layer].base, kind, None) if layer in adapters_of(model) else None
        if own is not None and not torch.equal(own, copied.to(own.device, own.dtype)):
            raise HandgradError(
                f"{folder} has its own {name}, which cannot share a base: load it alone, or merge it; or it belongs to"
                " another model"
            )


@contextmanager
def selected(model: GPT, name: str | None) -> Iterator[None]:
    """Within the context the model has this adapter alone; None: none, the base itself."""
    check_named(model, name)
    layers = _named_layers(model)
    try:
        for where, layer in layers.items():
            put(model, where, layer.branches.get(name or "", layer.base))
        yield
    finally:
        for where, layer in layers.items():
            put(model, where, layer)


def check_named(model: GPT, name: str | None) -> None:
    """Raise if the model has no adapter of this name."""
    if name is not None and name not in model.named_adapters:
        known = ", ".join(model.named_adapters) or "none"
        raise HandgradError(f"the model has no adapter {name!r}; loaded: {known}")


def check_finite_adapter(model: GPT, name: str | None) -> None:
    """Raise if the adapter of this name holds a value that is not finite."""
    for where in model.named_adapters.get(name or "", ()):
        branch: LoRA = model.get_submodule(where).branches[name]  # type: ignore[assignment, index]
        for p in (branch.down, branch.up, branch.magnitude):
            if p is not None and not torch.isfinite(p).all():
                raise NonFiniteError(f"the adapter {name} holds NaN or infinity in {where}: load an intact checkpoint")


def weights_of(model: GPT) -> list[Tensor]:
    """Everything that a pass computes with: parameters, packed matrices, and the factors of named adapters."""
    branches = [branch for layer in _named_layers(model).values() for branch in layer.branches.values()]
    layers = [layer for part in (model, *branches) for layer in part.modules()]
    packed = [layer.packed.data for layer in layers if isinstance(layer, Linear) and layer.packed is not None]
    return [*(p for part in (model, *branches) for p in part.parameters()), *packed]


def _named_layers(model: GPT) -> dict[str, NamedAdapters]:
    places = {where for found in model.named_adapters.values() for where in found}
    return {where: model.get_submodule(where) for where in places}  # type: ignore[misc]
