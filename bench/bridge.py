"""The contenders of bridge: `loss.backward()` of a transformers model as it is, after `hg.nn.replace` and compiled, and of a
model of handgrad after `hg.nn.wrap`. All have the same weights, with peft's LoRA or without, and the same AdamW."""

from typing import Any

import torch
from torch import Tensor, nn

import handgrad as hg
from handgrad.formats.config_json import config_json

from .peers import RANK, adamw, bytes_of

REPLACED, WRAPPED, TRANSFORMERS = "handgrad, replaced", "handgrad, wrapped", "transformers"
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def load_libraries() -> None:
    """Import transformers and peft, whose modules are not part of a step's memory."""
    import peft  # noqa: F401
    import transformers
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    transformers.utils.logging.set_verbosity_error()


def network_of(model: hg.GPT) -> nn.Module:
    """The same model in transformers, with peft's adapters if it has adapters."""
    load_libraries()
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = config_json(model.config, torch.float32)
    fields |= NO_DROPOUT if model.config.family == "gpt2" else {}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    network = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    plain = {
        name.replace(".base.", "."): p for name, p in model.named_parameters() if not name.endswith((".down", ".up"))
    }
    network.load_state_dict(plain, strict=False)
    adapters = hg.lora.adapters_of(model)
    if adapters:
        ends = sorted({name.rpartition(".")[2] for name in adapters})
        lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=ends, fan_in_fan_out=model.config.family == "gpt2")
        network = get_peft_model(network, lora)
        with torch.no_grad():
            for name, layer in adapters.items():
                theirs: Any = network.get_submodule(f"base_model.model.{name}")
                theirs.lora_A["default"].weight.copy_(layer.down.t())
                theirs.lora_B["default"].weight.copy_(layer.up.t())
    return network


class Transformers:
    """transformers, with peft's adapters if the model has adapters."""

    def __init__(self, model: hg.GPT, tokens: Tensor):
        self.network = self.make(model)
        self.call: Any = self.network
        self.batch = {"input_ids": tokens, "labels": tokens}
        self.optimizer = adamw([p for p in self.network.parameters() if p.requires_grad])

    def make(self, model: hg.GPT) -> nn.Module:
        return network_of(model)

    def gradients(self) -> float:
        self.optimizer.zero_grad()
        loss = self.call(**self.batch).loss
        loss.backward()
        return float(loss.item())

    def update(self) -> None:
        self.optimizer.step()

    def named_gradients(self) -> dict[str, Tensor]:
        """By handgrad's names, the factors in PEFT's orientation."""
        return {ours(name): p.grad for name, p in self.network.named_parameters() if p.grad is not None}

    def lasting_bytes(self) -> int:
        return bytes_of(self.network, self.optimizer)


def ours(name: str) -> str:
    """handgrad's name of a parameter."""
    name = name.removeprefix("base_model.model.").replace(".lora_A.default.weight", ".down")
    return name.replace(".lora_B.default.weight", ".up").replace(".base_layer.", ".base.")


class Replaced(Transformers):
    def make(self, model: hg.GPT) -> nn.Module:
        network = network_of(model)
        hg.nn.replace(network)
        return network


class Compiled(Transformers):
    def __init__(self, model: hg.GPT, tokens: Tensor):
        super().__init__(model, tokens)
        self.call = torch.compile(self.network, dynamic=False)


class Wrapped(Transformers):
    def make(self, model: hg.GPT) -> nn.Module:
        return hg.nn.wrap(model)

    def named_gradients(self) -> dict[str, Tensor]:
        found = super().named_gradients()
        return {name: grad.t() if name.endswith((".down", ".up")) else grad for name, grad in found.items()}
