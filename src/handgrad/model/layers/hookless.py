"""`Hookless`, the base of our modules: it refuses hooks, because a pass would never run them, and shows shapes."""

from typing import Any

from torch import nn

from ...errors import HandgradError


class Hookless(nn.Module):
    """The passes call layers directly, not through torch's `__call__`: a hook on a module would be ignored silently."""

    def _refuse_hook(self, *args: Any, **options: Any) -> Any:
        raise HandgradError(
            f"a hook on {type(self).__name__} would never run: handgrad's passes do not call modules. To read tensors give"
            " record= to loss_and_grads, or use hg.trace; to change them give edit= to hg.trace. Hooks of the whole model"
            " run on hg.nn.wrap(model)"
        )

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook

    def _get_name(self) -> str:  # of a module that only holds others
        return "Module" if type(self) is Hookless else type(self).__name__

    def extra_repr(self) -> str:
        """The shapes of the module's own parameters: weight 128 × 384, bias 384"""
        packed = getattr(self, "packed", None)
        own = [(name, p.shape) for name, p in self._parameters.items() if p is not None]
        shapes = [f"{name} {' × '.join(map(str, shape))}" for name, shape in own]
        return ", ".join(shapes if packed is None else [repr(packed), *shapes])


class Layers(Hookless, nn.ModuleList):
    """A list of layers."""
