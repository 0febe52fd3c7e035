"""`Parts`: a module whose layers are registered under the family's names and reached under ours."""

from typing import Any

from torch import nn

from .hookless import Hookless


class Parts(Hookless):
    """`named_parameters()` lists Hugging Face's names; code reaches the same layers by the names that `part` declares."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, tuple[str, ...]] = {}

    def add(self, part: str, path: str, layer: nn.Module) -> None:
        """Register a layer under a dotted path; modules on the way are created."""
        self.paths[part] = tuple(path.split("."))
        owner: nn.Module = self
        for name in self.paths[part][:-1]:
            if name not in owner._modules:
                owner._modules[name] = Hookless()
            owner = owner._modules[name]  # type: ignore[assignment]
        owner._modules[self.paths[part][-1]] = layer  # add_module refuses a name that a property has, too

    def has(self, part: str) -> bool:
        return part in self.paths


def part(name: str) -> Any:
    """A property that returns the layer of that name, as it is registered now: an adapter may have taken its place."""

    def layer(self: Parts) -> Any:
        module: Any = self
        for step in self.paths[name]:
            module = module._modules[step]
        return module

    return property(layer)
