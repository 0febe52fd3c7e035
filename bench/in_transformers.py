"""Adapters for both sides, and the same model in transformers with peft's LoRA."""

import warnings
from typing import Any

import torch
from torch import nn

import handgrad as hg
from handgrad.formats.config_json import config_json

RANK = 16
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def load_libraries() -> None:
    """Import transformers and peft, whose modules are not part of a step's memory."""
    import peft  # noqa: F401
    import transformers
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    transformers.utils.logging.set_verbosity_error()


def with_adapters(model: hg.GPT) -> hg.GPT:
    """Add adapters of rank 16 to every matrix of every block; both factors are random, so that both have gradients."""
    hg.lora.inject(model, RANK)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in hg.lora.adapters_of(model).values():
            layer.up.copy_(0.01 * torch.randn(layer.up.shape, generator=generator))
            layer.down.copy_(0.01 * torch.randn(layer.down.shape, generator=generator))
    return model


def network_of(model: hg.GPT) -> nn.Module:
    """The same model in transformers, with peft's adapters if it has adapters."""
    load_libraries()
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = config_json(model.config, torch.float32)
    fields |= NO_DROPOUT if model.config.family == "gpt2" else {}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False  # as its trainer sets it
    network = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    plain = {
        name.replace(".base.", "."): p for name, p in model.named_parameters() if not name.endswith((".down", ".up"))
    }
    network.load_state_dict(plain, strict=False)
    adapters = hg.lora.adapters_of(model)
    if adapters:
        ends = sorted({name.rpartition(".")[2] for name in adapters})
        lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=ends, fan_in_fan_out=model.config.family == "gpt2")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft calls functions of transformers by their old names
            network = get_peft_model(network, lora)
        with torch.no_grad():
            for name, layer in adapters.items():
                theirs: Any = network.get_submodule(f"base_model.model.{name}")
                theirs.lora_A["default"].weight.copy_(layer.down.t())
                theirs.lora_B["default"].weight.copy_(layer.up.t())
    return network
