"""Attach an adapter to a model that is in use, and detach it so that the model is exactly what it was."""

from pathlib import Path

import torch

from ..errors import HandgradError
from ..model.gpt import GPT
from .injection import adapters_of, remove
from .peft import check_base, load, replaced_tensors
from .peft_config import read_config


class Attachment:
    """The adapter of a folder in a model. Layers that it trained in full replace those of the model until `detach`.

    attached = Attachment(model, "runs/mine/adapter")
    attached.detach()
    """

    def __init__(self, model: GPT, folder: str | Path):
        self.model, self.folder = model, Path(folder)
        read_config(self.folder)
        if model.source:
            check_base(self.folder, Path(model.source))
        if adapters_of(model):
            raise HandgradError("the model has an adapter: detach it before another is attached")
        self._config, self._head = model.config, model.head.plain().weight
        self._trained = {p: (p.requires_grad, p.grad) for p in model.parameters()}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        trained, copies = replaced_tensors(self.folder, model.config.table)
        replaced = (parameters[name] for name in (*trained, *copies) if name in parameters)
        self._values = {p: p.detach().clone() for p in replaced}
        try:
            self.layers = load(model, self.folder)
        except BaseException:
            self.detach()
            raise

    @torch.no_grad()
    def detach(self) -> None:
        """Remove the adapter and restore what it replaced, bit for bit."""
        model = self.model
        remove(model)
        model.head.plain().weight, model.config = self._head, self._config
        for p, value in self._values.items():
            p.copy_(value)
        for p, (trains, grad) in self._trained.items():
            p.requires_grad_(trains)
            p.grad = grad
