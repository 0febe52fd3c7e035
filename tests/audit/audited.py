"""Small models of transformers and PEFT for audits, models with a fault, and random ones."""

import itertools
import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.utils import logging

from families.members import (
    FAMILIES,
    LLAMA_LIKE,
    MORE,
    NO_TOKEN_IDS,
    ROPE,
    fields_of,
    implementations,
    linear_layers,
    window_of,
)

logging.set_verbosity_error()
logging.disable_progress_bar()

EXPERTS = [name for name, family in FAMILIES.items() if "mlp.experts" in family.names]
DENSE = [name for name in FAMILIES if name not in EXPERTS]
SIZES = {
    "n_vocab": 31, "n_context": 32, "d_model": 16, "d_hidden": 64, "n_blocks": 2, "n_heads": 4, "n_kv_heads": 2, "d_rho": 4,
    "n_experts": 5, "experts_per_token": 2, "d_expert": 7, "d_shared": 13,
}  # fmt: skip


def model_of(family: str, *, seed: int = 0, attention: str = "eager", spread: float = 0.1, **changes: Any) -> Any:
    """A model of two blocks with norms not 1 and biases not 0: errors would be invisible in a new one."""
    others = {"sliding_window": None, "tie_word_embeddings": False} if family in LLAMA_LIKE else {}
    sizes = fields_of(family, SIZES)
    # sizes in MORE fit those of its own file; a quarter of a head of GPT-NeoX must be a pair of features
    more = {x: value for x, value in MORE.get(family, {}).items() if x not in sizes or family == "gpt_neox"}
    fields = sizes | NO_TOKEN_IDS | others | more
    if "layer_types" in fields:
        blocks = changes.get("num_hidden_layers", fields["num_hidden_layers"])
        fields["layer_types"] = (fields["layer_types"] * blocks)[:blocks]
        fields |= {"sliding_window": 5} if FAMILIES[family].windows else {}
    config = AutoConfig.for_model(family, **fields | changes)
    torch.manual_seed(seed)
    options = implementations(family) if family in EXPERTS else {}
    attention = "eager" if family == "gpt_oss" else attention  # whose sinks no other one has
    model = AutoModelForCausalLM.from_config(config, **{**options, "attn_implementation": attention})
    with torch.no_grad():
        for p in model.parameters():
            p += spread * torch.randn(p.shape)
    return model


def adapted(model: Any, family: str, filled: bool = True, **options: Any) -> Any:
    """The model with an adapter of PEFT on every linear layer, its up factors not 0."""
    config = LoraConfig(
        **{"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM", "target_modules": linear_layers(family), **options}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the orientation of GPT-2's weights
        model = get_peft_model(model, config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name and filled:
                p += 0.3 * torch.randn(p.shape).to(p.dtype)
    return model


def function_of(forward: Callable[..., Tensor], backward: Callable[..., Any]) -> type[torch.autograd.Function]:
    """An autograd.Function: forward(*inputs), and backward(Δ, *inputs), which gives a gradient for each input."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            return forward(*inputs)

        @staticmethod
        def backward(ctx: Any, delta: Tensor) -> Any:
            return backward(delta, *ctx.saved_tensors)

    return Made


Make = Callable[[pytest.MonkeyPatch], Any]  # makes a model with a fault


def with_forward(family: str, path: str, forward: Callable[..., Any], **options: Any) -> Make:
    """A model in which one module computes forward(module, right, *inputs); `right` is what it would have computed."""

    def make(patch: pytest.MonkeyPatch) -> Any:
        model = model_of(family, **options)
        module = model.get_submodule(path)
        module.forward = partial(forward, module, module.forward)
        return model

    return make


def rotating(rotate: Callable[..., Any], blocks: tuple[int, ...] = (0, 1)) -> Make:
    """A Llama in which rotate(right, q, k, cos, sin) turns the queries and keys of these of its two blocks."""

    def make(patch: pytest.MonkeyPatch) -> Any:
        right, calls = modeling_llama.apply_rotary_pos_emb, itertools.count()

        def chosen(*given: Tensor, **more: Any) -> Any:
            return rotate(right, *given) if next(calls) % 2 in blocks else right(*given, **more)

        patch.setattr(modeling_llama, "apply_rotary_pos_emb", chosen)
        return model_of("llama", spread=0.3)

    return make


def attending(family: str, change: Callable[..., Any], **options: Any) -> Make:
    """A model whose second block computes change(right, q, k, v, mask, scale); `right` computes attention of the rest."""

    def make(patch: pytest.MonkeyPatch) -> Any:
        module = {"gpt2": modeling_gpt2, "llama": modeling_llama}[family]
        original = module.eager_attention_forward

        def attention(layer: Any, *given: Any, scaling: float | None = None, **more: Any) -> Any:
            def right(*given: Any) -> Any:
                return original(layer, *given[:4], scaling=given[4], **more)

            if layer.layer_idx != 1:
                return right(*given, scaling)
            return change(right, *given, scaling or given[0].shape[-1] ** -0.5)

        patch.setattr(module, "eager_attention_forward", attention)
        return model_of(family, **options)

    return make


def only_backward(right: Tensor, wrong: Tensor) -> Tensor:
    """The right value with the gradient of the wrong one."""
    return right.detach() + wrong - wrong.detach()


def batch(
    n_vocab: int = 31, sequences: int = 3, tokens: int = 10, seed: int = 1, left: bool = False
) -> dict[str, Tensor]:
    """Sequences of different lengths with padding, and a fifth of the labels masked."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(n_vocab, (sequences, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for i in range(1, sequences):
        mask[i, : 2 * i] = 0
    mask = mask if left else mask.flip(1)
    labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=generator) < 0.2), -100)
    labels[0, 1:3] = ids[0, 1:3]
    if left:
        labels[torch.arange(sequences), mask.argmax(1)] = -100  # padding must not predict
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "position_ids": positions}
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def random_model(seed: int, families: list[str] = DENSE) -> tuple[str, Any, dict[str, Tensor]]:
    """A description, a sound model and a batch."""
    draw = random.Random(seed)
    family = draw.choice(families)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    heads = draw.choice([1, 2, 4, 6])
    width = draw.choice([2, 4, 8, 16])
    blocks, vocabulary, tied = draw.choice([1, 2, 3, 5]), draw.choice([17, 64, 257]), draw.random() < 0.5
    spread = draw.choice([0.02, 0.1, 0.3])
    table = FAMILIES[family]
    free = "head_dim" in table.fields and family != "helium"  # whose heads together are as wide as the stream
    sizes = {
        "n_vocab": vocabulary, "n_blocks": blocks, "n_heads": heads, "d_rho": width, "d_hidden": draw.choice([5, 32, 96]),
        "d_model": draw.choice([12, 24, 48]) if free else heads * width, "tied": tied,
        "n_kv_heads": draw.choice([h for h in (1, 2, 3, heads) if heads % h == 0]), "qkv_bias": draw.random() < 0.5,
    }  # fmt: skip
    if not table.fixed.get("gated"):
        sizes["activation"] = draw.choice(["gelu_new", "gelu", "relu"])
    if family in EXPERTS:
        n = draw.choice([3, 6, 24])
        sizes |= {"n_experts": n, "experts_per_token": draw.choice([1, 2, n]), "d_expert": draw.choice([1, 9])}
    shape = fields_of(family, sizes)
    part = MORE.get(family, {}).get("rope_parameters", ROPE).get("partial_rotary_factor", 1.0)
    if part * width < 2:  # this part of a head is no pair of features
        shape["rope_parameters"] = {**ROPE, "partial_rotary_factor": 1.0}
    if table.windows and draw.random() < 0.5:
        shape |= window_of(family)
    attention = draw.choice(["eager", "sdpa"])
    model = model_of(family, seed=seed, attention=attention, spread=spread, **shape).to(dtype)
    kind = draw.choice(["full", "full", "lora", "dora", "new adapter", "head frozen"])
    if kind == "head frozen":
        model.get_output_embeddings().weight.requires_grad_(False)
    elif kind != "full":
        model = adapted(model, family, filled=kind != "new adapter", use_dora=kind == "dora")
    if draw.random() < 0.3:
        model.activation_checkpointing_enable()
        if kind not in ("full", "head frozen"):
            model.enable_input_require_grads()
    made = batch(vocabulary, draw.choice([1, 2, 4]), draw.choice([4, 10, 24]), seed, left=draw.random() < 0.3)
    if draw.random() < 0.3:
        made = {"input_ids": made["input_ids"]}
    return f"{seed}: {family}, {kind}, {str(dtype).removeprefix('torch.')}, {attention}, {shape}", model, made
