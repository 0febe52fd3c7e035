"""The contenders of bridge: `loss.backward()` of a transformers model as it is, after `hg.nn.replace` and compiled, and of a
model of handgrad after `hg.nn.wrap`. All have the same weights, with peft's LoRA or without, and the same AdamW."""

from typing import Any

import torch
from torch import Tensor, nn

import handgrad as hg

from .in_transformers import network_of
from .peers import Autograd, adamw
from .row import MIXED

REPLACED, WRAPPED, TRANSFORMERS = "handgrad, replaced", "handgrad, wrapped", "transformers"


class Transformers(Autograd):
    """transformers, with peft's adapters if the model has adapters."""

    autocasts = True  # if operands are to be rounded

    def __init__(self, model: hg.GPT, tokens: Tensor, low: bool = False):
        self.low = low  # whether operands of products are rounded: by us, or in a peer by autocast
        self.network = self.make(model)
        self.call: Any = self.network
        self.batch = {"input_ids": tokens, "labels": tokens}
        self.optimizer = adamw([p for p in self.network.parameters() if p.requires_grad])

    def make(self, model: hg.GPT) -> nn.Module:
        return network_of(model)

    def gradients(self) -> float:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.low and self.autocasts):
            loss = self.call(**self.batch).loss
        loss.backward()
        return float(loss.item())

    def named_gradients(self) -> dict[str, Tensor]:
        """By handgrad's names, the factors in PEFT's orientation."""
        return {ours(name): p.grad for name, p in self.network.named_parameters() if p.grad is not None}


def ours(name: str) -> str:
    """handgrad's name of a parameter."""
    name = name.removeprefix("base_model.model.").replace(".lora_A.default.weight", ".down")
    return name.replace(".lora_B.default.weight", ".up").replace(".base_layer.", ".base.")


class Replaced(Transformers):
    autocasts = False

    def make(self, model: hg.GPT) -> nn.Module:
        network = network_of(model)
        hg.nn.replace(network, loss=True, precision=MIXED if self.low else None)
        return network


class Compiled(Transformers):
    def __init__(self, model: hg.GPT, tokens: Tensor, low: bool = False):
        super().__init__(model, tokens, low)
        self.call = torch.compile(self.network, dynamic=False)


class Wrapped(Transformers):
    autocasts = False

    def make(self, model: hg.GPT) -> nn.Module:
        model.precision = MIXED if self.low else "float32"
        return hg.nn.wrap(model)

    def named_gradients(self) -> dict[str, Tensor]:
        found = super().named_gradients()
        return {name: grad.t() if name.endswith((".down", ".up")) else grad for name, grad in found.items()}
