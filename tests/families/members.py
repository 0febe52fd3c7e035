"""Small random models of every family, made by transformers, and transformers itself in float64 as their judge."""

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gptj import modeling_gptj
from transformers.utils import logging

import handgrad as hg
from handgrad.families import FAMILIES as EVERY_FAMILY
from handgrad.model.layers.experts import SELECTION
from handgrad.proof.oracles import relative_error

logging.set_verbosity_error()
logging.disable_progress_bar()

# MiniCPM is code of its authors, not of transformers: test_minicpm.py
FAMILIES = {name: family for name, family in EVERY_FAMILY.items() if name != "minicpm"}
LIMIT = 1e-8  # relative, in float64
LENGTHS = [7, 1, 12]  # uneven, one of them a single token
NO_TOKEN_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
LLAMA_LIKE = tuple(
    family.name for family in FAMILIES.values() if family.fixed.get("positions") == "rotary" and family.rope_types
)
# by our names; d/h is even as well, for a family whose table has no width of a head
SIZES = {
    "n_vocab": 29, "n_context": 32, "d_model": 18, "d_hidden": 11, "n_blocks": 2, "n_heads": 9, "n_kv_heads": 3, "d_rho": 4,
    "eps": 1e-3, "n_experts": 5, "experts_per_token": 2, "d_expert": 7, "d_shared": 13,
}  # fmt: skip
ODD_HEADS = {"d_model": 15, "n_heads": 3}  # of learned positions: rotary ones turn pairs of features
# windows by the kind that a family's table names
WINDOWS: dict[str, dict[str, Any]] = {
    "every block": {"sliding_window": 4},
    "late blocks": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "even early blocks": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "unrotated blocks": {"use_sliding_window": True, "sliding_window": 3, "no_rope_layer_interval": 2},
}

WINDOWS["pattern"] = WINDOWS["listed blocks"] = {"sliding_window": 4}
# what a small member of a family needs besides the sizes
MORE: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "gpt_neox": {"hidden_size": 24, "num_attention_heads": 3, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
    "stablelm": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "hidden_size": 36},
    "phi": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "hidden_size": 36},
    "glm": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "glm4": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "helium": {"head_dim": 2, "num_key_value_heads": 3},  # its projection is as wide as the stream
    "ministral": {"sliding_window": 500},
    "nemotron": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "exaone4": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "hyperclovax": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 1.5,
    },
    "gptj": {"n_embd": 24, "n_head": 3, "rotary_dim": 4},
    "phi3": {},
    "dots1": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 1, "num_local_experts": 0, "position_embedding_type": "rope",
        "layer_types": ["attention", "attention"],
        "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 1.5,
    },
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.7, "logits_scaling": 1.5,
    },
    "gemma2": {
        "query_pre_attn_scalar": 7, "sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5,
    },
    "vaultgemma": {"query_pre_attn_scalar": 7, "sliding_window": 6, "final_logit_softcapping": 1.5},
    "gemma3_text": {"query_pre_attn_scalar": 7, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {"logit_scale": 0.3},
    "gpt_oss": {"sliding_window": 5},
    "cohere2": {"logit_scale": 0.3, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
# of attention, where torch's function can neither cap scores nor have sinks
IMPLEMENTATION = dict.fromkeys(("gemma2", "gpt_oss", "gptj", "vaultgemma"), "eager")


def implementations(family: str) -> dict[str, str]:
    """What transformers computes attention and experts with: grouped_mm refuses most small widths."""
    return {"attn_implementation": IMPLEMENTATION.get(family, "sdpa"), "experts_implementation": "eager"}


LOCAL = {"full_attention": ROPE, "sliding_attention": {**ROPE, "rope_theta": 30.0}}

LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}
# with heads of 16 features, frequencies of all three bands: kept, blended and divided by the factor
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
YARN_OPTIONS = {
    "rope_type": "yarn", "factor": 8.0, "rope_theta": 1000.0, "original_max_position_embeddings": 48, "beta_fast": 4.0,
    "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False,
}  # fmt: skip
YARN_FACTOR = {**YARN, "attention_factor": 1.3}
YARN_ONE_SCALE = {**YARN, "mscale": 0.7}  # one of the two scales alone has no effect
# the blend would end above the last pair of a head; it would end below the first
YARN_WIDE_BLEND = {**YARN, "rope_theta": 100.0, "original_max_position_embeddings": 2000}
YARN_NO_BLEND = {**YARN, "original_max_position_embeddings": 4}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.3], "long_factor": [1.5, 4.0], "factor": 2.0,
    "original_max_position_embeddings": 256, "partial_rotary_factor": 1.0,
}  # fmt: skip
LOCAL_LINEAR = {"full_attention": {**LINEAR, "rope_theta": 100.0}, "sliding_attention": {**ROPE, "rope_theta": 30.0}}
LOCAL_YARN = {"full_attention": YARN, "sliding_attention": {**ROPE, "rope_theta": 10000.0}}
WIDE = {"head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 128}


def fields_of(family: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes by our names → the fields of config.json that this family has for them."""
    return {field: sizes[ours[0]] for field, ours in FAMILIES[family].fields.items() if ours[0] in sizes}


def window_of(family: str) -> dict[str, Any]:
    """The fields that give this family windows."""
    kind = FAMILIES[family].windows
    assert kind in WINDOWS, f"WINDOWS in tests/families/members.py has no fields for windows of {kind!r} ({family})"
    return WINDOWS[kind]


def linear_layers(family: str) -> list[str]:
    """Hugging Face's names of the linear layers of a block, as adapters target them: self_attn.q_proj."""
    names = FAMILIES[family].names
    inside = [ours for ours in names if "." in ours and not ours.endswith(("_norm", ".taps"))]
    if "mlp.experts" in names:  # adapters of experts have tests of their own
        inside = [ours for ours in inside if ours.startswith("attn.")]
    return [f"{names[ours.partition('.')[0]]}.{names[ours]}" for ours in inside]


def in_file_names(network: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors by transformers' names → by the names in its files, where experts are matrices of their own."""
    names, found = FAMILIES[network.config.model_type].names, {}
    for name, x in named.items():
        parts = re.fullmatch(r"(.*)\.mlp\.(?:experts\.((?:gate_up|down)_proj(?:_bias)?)|(.*))", name)
        if "mlp.experts" not in names or parts is None:
            found[name.replace("lm_head.", f"{names['head']}.")] = x
        elif parts[3]:
            found[f"{parts[1]}.{names['mlp']}.{parts[3]}"] = x
        else:
            bias = "bias" if parts[2].endswith("_bias") else "weight"
            for e, one in enumerate(x):
                expert = f"{parts[1]}.{names['mlp']}.experts.{e}."
                kinds = ["expert.contract"] if parts[2].startswith("down_proj") else ["expert.gate", "expert.expand"]
                pieces = one.chunk(len(kinds))
                if FAMILIES[network.config.model_type].stacked_experts:  # gate and up in turn
                    pieces = [one[..., i :: len(kinds)].t() for i in range(len(kinds))]
                for kind, part in zip(kinds, pieces, strict=True):
                    found[f"{expert}{names[kind]}.{bias}"] = part
    return found


def their_tensors(network: Any) -> dict[str, Tensor]:
    """The parameters of a transformers model, and the biases that choose experts, by the names in its files."""
    biases = {name: x for name, x in network.named_buffers() if name.endswith(SELECTION)}
    return in_file_names(network, dict(network.named_parameters()) | biases)


def _of_tables() -> Iterator[tuple[str, dict[str, Any]]]:
    """What every family has, by its table: sharing of keys or none, biases and windows where it can have them."""
    for name, family in FAMILIES.items():
        if "num_key_value_heads" in family.fields:
            for kv in (9, 3, 1):
                fields = {"num_key_value_heads": kv, "tie_word_embeddings": kv != 3}
                yield f"{name}, {9 // kv} queries to a key", fields
        else:
            yield f"{name}, tied", {}
        if biases := [field for field in ("attention_bias", "mlp_bias") if field in family.fields]:
            yield f"{name}, biases", dict.fromkeys(biases, True)
        if family.windows:
            yield f"{name}, window", window_of(name)


PART_DENSE = {"num_hidden_layers": 4, "mlp_only_layers": [2], "decoder_sparse_step": 2}

# Models by name, which begins with the family: the fields in which each differs from a small one.
MEMBERS: dict[str, dict[str, Any]] = dict(_of_tables()) | {
    "gpt2, untied, erf": {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 7},
    "lfm2, biases, four taps": {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False},
    "lfm2, one tap": {"conv_L_cache": 1},
    "lfm2, more taps than tokens": {"conv_L_cache": 20},
    "lfm2, no attention": {"layer_types": ["conv"] * 2},
    "lfm2, no convolution": {"layer_types": None},
    "lfm2, blocks by number": {"layer_types": None, "full_attn_idxs": [1]},
    "lfm2, width computed": {
        "block_auto_adjust_ff_dim": True, "intermediate_size": 23, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 7,
    },
    "lfm2, older names": {"block_ff_dim": 13, "tie_embedding": False},
    "lfm2, llama3": {"rope_parameters": LLAMA3, **WIDE},
    "llama, head_dim omitted": {"head_dim": None, "num_attention_heads": 3},
    "llama, one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 6},
    "llama, gelu gate": {"hidden_act": "gelu"},
    "llama, tanh gate": {"hidden_act": "gelu_pytorch_tanh"},
    "llama, linear": {"rope_parameters": LINEAR},
    "llama, llama3": {"rope_parameters": LLAMA3, **WIDE},
    "llama, yarn": {"rope_parameters": YARN, **WIDE},
    "llama, yarn with a wide blend": {"rope_parameters": YARN_WIDE_BLEND, **WIDE},
    "llama, yarn without a blend": {"rope_parameters": YARN_NO_BLEND, **WIDE},
    "llama, yarn with options": {"rope_parameters": YARN_OPTIONS, **WIDE},
    "mistral, window of one": {"sliding_window": 1, "num_key_value_heads": 1},
    "mistral, window wider than the text": {"sliding_window": 500},
    "mistral, width not a multiple of the heads": {"hidden_size": 17},
    "phi3, window, untied": {"sliding_window": 4, "tie_word_embeddings": False},
    "qwen2, windows by layer": {
        "use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2, yarn": {"rope_parameters": YARN_FACTOR, **WIDE},
    "qwen3, yarn": {"rope_parameters": YARN_ONE_SCALE, **WIDE},
    "gemma2, scores by the width of a head": {
        "query_pre_attn_scalar": 4, "num_hidden_layers": 3, "tie_word_embeddings": True,
    },
    "gemma3_text, scores by the width of a head": {
        "query_pre_attn_scalar": 4, "num_hidden_layers": 7, "sliding_window": 4, "rope_parameters": LOCAL_LINEAR,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    },
    "gemma3_text, windows by layer": {"query_pre_attn_scalar": 4, "final_logit_softcapping": 1.5, "sliding_window": 4},
    "gemma3_text, no window": {"query_pre_attn_scalar": 4, "layer_types": ["full_attention"] * 2},
    "olmo3, one base, untied": {
        "tie_word_embeddings": False, "sliding_window": 4, "num_hidden_layers": 5, "layer_types": None,
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
    },
    "olmo3, yarn, untied": {
        "tie_word_embeddings": False, "sliding_window": 4, "rope_parameters": LOCAL_YARN, "hidden_size": 48,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 128,
    },
    "phi3, longrope, whole heads": {
        "rope_parameters": LONGROPE, "max_position_embeddings": 512, "original_max_position_embeddings": 256,
        "hidden_size": 36,
    },
    "smollm3, every fourth layer unrotated": {"num_hidden_layers": 5},
    "smollm3, layers unrotated by list": {"no_rope_layers": [0, 1], "tie_word_embeddings": False},
    "smollm3, no layer rotated": {"no_rope_layers": [0, 0]},
    "smollm3, biases, unrotated": {"attention_bias": True, "mlp_bias": True, "no_rope_layers": [1, 0]},
    "smollm3, llama3": {"rope_parameters": LLAMA3, **WIDE},
    "llama, dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 100.0}},
    "gpt_neox, sequential": {"use_parallel_residual": False},
    "phi3, longrope": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 4.0, 7.0], "factor": 4.0, "original_max_position_embeddings": 8,
        },
        "hidden_size": 72, "head_dim": 8, "original_max_position_embeddings": 8,
    },
    "gemma3_text, linear": {
        "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {**ROPE, "rope_theta": 30.0}},
    },
    "olmo3, yarn": {
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {**ROPE, "rope_theta": 1e4}},
        "hidden_size": 144, "max_position_embeddings": 128,
    },
    "granite, llama3": {"rope_parameters": LLAMA3, "hidden_size": 144, "max_position_embeddings": 128},
    "hyperclovax, scores by the width of a head": {"attention_multiplier": None},
    "exaone4, no window": {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "exaone4, default pattern, llama3": {"layer_types": None, "num_hidden_layers": 5, "rope_parameters": LLAMA3, **WIDE},
    "exaone4, no window, llama3": {
        "sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": LLAMA3, **WIDE,
    },
    "nemotron, llama3": {"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}, **WIDE},
    "gptj, tied, whole heads": {"tie_word_embeddings": True, "rotary_dim": 8, "n_inner": 7},
    "cohere2, default pattern": {"layer_types": None, "num_hidden_layers": 5},
    "ernie4_5, biases": {"use_bias": True},
    "stablelm, biases": {"use_qkv_bias": True},
    "mixtral, every expert": {"num_experts_per_tok": 5},
    "mixtral, one expert": {"num_experts_per_tok": 1, "tie_word_embeddings": True},
    "mixtral, many experts": {"num_local_experts": 40},
    "qwen2_moe, normalized, some blocks dense": {"norm_topk_prob": True, **PART_DENSE},
    "qwen2_moe, windows by layer": {
        "use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3_moe, normalized, some blocks dense": {"norm_topk_prob": True, **PART_DENSE},
    "olmoe, keys of every head": {"num_key_value_heads": 9, "tie_word_embeddings": False},
    "gpt_oss, yarn": {"rope_parameters": YARN_FACTOR, **WIDE},
    "gpt_oss, yarn without whole features": {"rope_parameters": {**YARN, "truncate": False}, **WIDE},
    "gpt_oss, without biases of attention": {"attention_bias": False},
    "dots1, groups": {
        "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5,
    },
    "dots1, not normalized": {"norm_topk_prob": False, "first_k_dense_replace": 0, "routed_scaling_factor": 1.5},
}  # fmt: skip


def family_of(name: str) -> str:
    return name.partition(",")[0]


PLAIN = {
    family: next(n for n in MEMBERS if family_of(n) == family and n.split()[1] in ("3", "tied")) for family in FAMILIES
}
# One family of every mechanism: plain, fused matrices, norms of q and k, unrotated blocks, two norms of a branch and a local
# rotation, caps, norms after the branches, parallel branches with one norm and with two, scales, LayerNorm with a plain
# feed-forward part, the same with gains 1 + w, experts shared behind a gate, experts chosen by groups beside a dense block.
# make long: all families.
MECHANISMS = (
    "gpt2", "llama", "phi3", "qwen3", "smollm3", "gemma3_text", "gemma2", "olmo2", "cohere", "gpt_neox", "granite",
    "starcoder2", "qwen2_moe", "dots1", "nemotron",
)  # fmt: skip
ALL = os.environ.get("HANDGRAD_FAMILIES") == "all"
# one of each family; of each mechanism; and whatever differs from them in more than how many queries share a key
EACH = [f"{name}, window" if family.windows else PLAIN[name] for name, family in FAMILIES.items()]
TYPICAL = [name for name in EACH if ALL or family_of(name) in MECHANISMS]
DISTINCT = [
    name for name in MEMBERS
    if ALL or name in EACH or name.startswith("llama,") or not name.endswith((" to a key", ", biases", ", window"))
    or (name.endswith("biases") and family_of(name) in MECHANISMS)
]  # fmt: skip


def transformers_model(name: str, **changes: Any) -> Any:
    """The member in float64, with norms not 1 and biases not 0: errors would be invisible in a new model."""
    family = family_of(name)
    sizes = SIZES if family in LLAMA_LIKE else SIZES | ODD_HEADS
    rope = LOCAL if FAMILIES[family].local_rope else ROPE
    window = 4 if FAMILIES[family].local_rope else None
    others: dict[str, Any] = {"sliding_window": window, "rope_parameters": rope} if family in LLAMA_LIKE else {}
    own = others | NO_TOKEN_IDS | MORE.get(family, {})
    fields = fields_of(family, sizes) | own | MEMBERS[name] | changes
    config = AutoConfig.for_model(family, **copy.deepcopy(fields))
    network = AutoModelForCausalLM.from_config(config, **implementations(family)).eval()
    randomize(network)
    return in_float64(network)


def opened(name: str, folder: Path, **changes: Any) -> tuple[Any, hg.GPT]:
    """The member as transformers has it, and as we read it from the folder in which it is saved."""
    theirs = transformers_model(name, **changes)
    theirs.save_pretrained(folder)
    return theirs, hg.load(folder, dtype="float64")


def randomize(network: torch.nn.Module) -> None:
    """Turn the network to float64 and add N(0, 0.3²) to every parameter."""
    generator = torch.Generator().manual_seed(3)
    for module in network.modules():
        if type(module).__name__ == "NemotronLayerNorm1P":  # which transformers begins with a gain of 1 + 1
            torch.nn.init.zeros_(module.weight)
    with torch.no_grad():
        biases = [x for name, x in network.double().named_buffers() if name.endswith(SELECTION)]
        for parameter in (*network.parameters(), *biases):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


_SINGLE = torch.get_default_dtype()


@contextlib.contextmanager
def float_means_double() -> Iterator[None]:
    with (
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(_SINGLE)


def in_float64(network: Any) -> Any:
    """Make RMSNorm, routers and rotary tables of a transformers model compute in float64. They cast to float32, whatever
    the model's dtype; their own code runs with that dtype replaced."""

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with float_means_double():
                return forward(*arguments, **options)

        return run

    for module in network.double().modules():
        kind = type(module).__name__
        if kind.endswith("RotaryEmbedding"):
            with float_means_double():
                module.__init__(module.config)
        if kind == "GPTJAttention":
            with float_means_double():
                of = modeling_gptj.create_sinusoidal_positions
                module.embed_positions = of(module.max_positions, module.pos_embd_dim)
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
        casts = ("RotaryEmbedding", "RMSNorm", "Attention", "Router")
        if kind.endswith(casts) or (kind.endswith("LayerNorm") and kind != "LayerNorm"):
            module.forward = wrapped(module.forward)
    return network


def from_folder(folder: Path) -> Any:
    """A saved model as transformers opens it, in float64."""
    family = AutoConfig.from_pretrained(folder).model_type
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **implementations(family))
    return in_float64(network.eval())


def their_logits(network: Any, tokens: Tensor, lengths: list[int]) -> Tensor:
    """(n) ids end to end → (n, V): transformers runs each sequence by itself."""
    logits = torch.cat([network(input_ids=ids[None], use_cache=False).logits[0] for ids in tokens.split(lengths)])
    assert logits.dtype == torch.float64
    return logits


def their_gradients(
    network: Any, tokens: Tensor, targets: Tensor, lengths: list[int]
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss and the gradient of every trainable parameter by autograd. transformers' own loss is in float32."""
    network.zero_grad()
    loss = F.cross_entropy(their_logits(network, tokens, lengths), targets)
    loss.backward()
    return loss.item(), in_file_names(network, {n: p.grad for n, p in network.named_parameters() if p.requires_grad})


def assert_equal_gradients(ours: dict[str, Tensor], expected: dict[str, Tensor], limit: float = LIMIT) -> None:
    """Equal names, shapes and values. A gradient that is 0 in theory (b_k of a layer without rotation) is measured
    relative to the largest of all."""
    assert set(ours) == set(expected)
    largest = max(grad.abs().max().item() for grad in expected.values())
    assert largest > 1e-4, "nothing to compare"
    errors = {name: relative_error(ours[name], grad, floor=1e-4 * largest) for name, grad in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= limit, f"{worst}: {errors[worst]:.1e}"


def our_gradients(model: hg.GPT) -> dict[str, Tensor]:
    """What loss_and_grads has left in the trainable parameters."""
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in found.values())
    return found  # type: ignore[return-value]


def batch(n_vocab: int = 29, lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Packed tokens and targets; some targets, all of the last three among them, are masked."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(n_vocab, (2, sum(lengths)), generator=generator)
    targets[torch.rand(len(targets), generator=generator) < 0.3] = -100
    targets[-3:] = -100
    assert (targets != -100).sum() > len(targets) // 3
    return tokens, targets
