"""Models in GGUF files: configuration and tensors equal those that transformers reads, or wrote before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_gguf_mixtures import NAMES
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from conftest import perturb
from handgrad.errors import HandgradError
from handgrad.gguf.architectures import ARCHITECTURES
from handgrad.gguf.file import dequantize
from handgrad.gguf.model import read_model
from tiny_gguf import write_gguf

Tensors = dict[str, np.ndarray]


# ── small models of transformers, written as llama.cpp's converter does ─────────────────────────────────────────────

SMALL = {
    "vocab_size": 29, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "head_dim": 4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0,
}  # fmt: skip
BOTH = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GRANITE = {
    "model_type": "granite", "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.25], "long_factor": [1.5, 4.0], "factor": 2.0,
    "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0,
}  # fmt: skip
PARTLY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, untied": {"model_type": "llama", "tie_word_embeddings": False},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True, "num_key_value_heads": 3},
    "llama, wide heads": {"model_type": "llama", "head_dim": 10, "num_attention_heads": 4, "num_key_value_heads": 4},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, linear": {
        "model_type": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    },
    "llama, llama3": {"model_type": "llama", "head_dim": 64, "rope_parameters": LLAMA_3},
    "llama, llama3 of 1024": {
        "model_type": "llama", "head_dim": 64,
        "rope_parameters": LLAMA_3 | {"factor": 32.0, "original_max_position_embeddings": 1024},
    },
    "llama, yarn": {"model_type": "llama", "rope_parameters": YARN},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "smollm3": {
        "model_type": "smollm3", "num_hidden_layers": 5, "hidden_size": 24, "tie_word_embeddings": True, "pad_token_id": 0,
    },
    "qwen2": {"model_type": "qwen2", "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen2, yarn": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 6, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3, biases": {"model_type": "qwen3", "attention_bias": True},
    "lfm2": {
        "model_type": "lfm2", "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2,
    },
    "lfm2, no convolution, untied": {
        "model_type": "lfm2", "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False,
    },
    "gemma2": {
        "model_type": "gemma2", "query_pre_attn_scalar": 4, "sliding_window": 7, "num_hidden_layers": 3,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5, "attn_implementation": "eager",
    },
    "gemma2, of 46 blocks": {
        "model_type": "gemma2", "query_pre_attn_scalar": 12, "num_hidden_layers": 46, "num_attention_heads": 1,
        "attn_implementation": "eager",
    },
    "gemma3": {
        "model_type": "gemma3_text", "query_pre_attn_scalar": 4, "sliding_window": 7, "num_hidden_layers": 7,
        "rope_parameters": BOTH,
    },
    "gemma3, capped, windows by layer": {
        "model_type": "gemma3_text", "query_pre_attn_scalar": 4, "sliding_window": 7, "final_logit_softcapping": 1.5,
        "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": BOTH,
    },
    "gemma3, no window": {
        "model_type": "gemma3_text", "query_pre_attn_scalar": 4, "layer_types": ["full_attention"] * 2,
        "rope_parameters": BOTH,
    },
    "olmo2": {"model_type": "olmo2", "head_dim": None},
    "olmo3": {
        "model_type": "olmo3", "head_dim": None, "sliding_window": 7, "num_hidden_layers": 5,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e6}},
    },
    "granite": {**GRANITE, "attention_multiplier": 0.3},
    "granite, biases, no scale of scores": {
        **GRANITE, "attention_multiplier": 0.5, "attention_bias": True, "mlp_bias": True
    },
    "minicpm": {**GRANITE, "attention_multiplier": 0.5, "gguf": "minicpm"},
    "starcoder2": {"model_type": "starcoder2", "head_dim": None, "norm_epsilon": 1e-5},
    "command-r": {"model_type": "cohere", "head_dim": None, "logit_scale": 0.25, "layer_norm_eps": 1e-5},
    "cohere2": {
        "model_type": "cohere2", "logit_scale": 0.25, "layer_norm_eps": 1e-5, "sliding_window": 7, "num_hidden_layers": 5,
    },
    "gptneox": {
        "model_type": "gpt_neox", "head_dim": None, "num_key_value_heads": None, "layer_norm_eps": 1e-5,
        "rope_parameters": PARTLY,
    },
    "gptneox, one branch after the other": {
        "model_type": "gpt_neox", "head_dim": None, "num_key_value_heads": None, "layer_norm_eps": 1e-5,
        "use_parallel_residual": False, "rope_parameters": PARTLY,
    },
    "nemotron": {"model_type": "nemotron", "norm_eps": 1e-5, "attention_bias": True, "rope_parameters": PARTLY},
    "exaone4": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "rope_parameters": PARTLY},
    "phi3, longrope, window": {
        "model_type": "phi3", "pad_token_id": 0, "sliding_window": 7, "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 32,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "n_inner": 20, "n_positions": 64, "vocab_size": 29,
        "bos_token_id": None, "eos_token_id": None,
    },
}  # fmt: skip


def make(name: str) -> PreTrainedModel:
    choices = MODELS[name] if name == "gpt2" else SMALL | MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{k: v for k, v in choices.items() if v is not None or k == "sliding_window"})
    )
    perturb(model)  # biases and gains too
    if "gemma" in name or "nemotron" in name:  # 1 + w is a float32
        for parameter in model.parameters():
            parameter.data = (parameter.data * 4096).round() / 4096
    return model.double().eval()


def architecture_of(config: Any) -> str:
    names = {
        "mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2", "cohere": "command-r", "gpt_neox": "gptneox",
    }  # fmt: skip
    return getattr(config, "gguf", None) or names.get(config.model_type, str(config.model_type))


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors with the names of the package's own table, in the order of rows that llama.cpp wants."""
    config, architecture = model.config, architecture_of(model.config)
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        w = value.float().squeeze().numpy()  # of a convolution (d, 1, L) → (d, L)
        if architecture in ("llama", "smollm3", "granite", "minicpm") and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            w = w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
        if architecture == "gpt2" and any(part in name for part in ("c_attn.w", "c_proj.w", "c_fc.w")):
            w = w.T
        if "query_key_value" in name:
            heads = config.num_attention_heads
            w = w.reshape(heads, 3, -1, *w.shape[1:]).swapaxes(0, 1).reshape(w.shape)
        if architecture.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
            w = w + 1
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        yield found, np.ascontiguousarray(w)


def metadata(config: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes."""
    if config.model_type == "gpt2":
        values = dict(
            context_length=config.n_positions, embedding_length=config.n_embd, feed_forward_length=config.n_inner,
            block_count=config.n_layer, **{"attention.head_count": config.n_head},
        )  # fmt: skip
        return values | {"attention.layer_norm_epsilon": config.layer_norm_epsilon}
    d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    nested = config.rope_parameters
    rope = nested.get("full_attention", nested)
    rotated = int(d_head * rope.get("partial_rotary_factor", 1))
    eps = next(
        x
        for field in ("norm_eps", "norm_epsilon", "layer_norm_eps", "rms_norm_eps")
        if (x := getattr(config, field, 0))
    )
    centered = config.model_type == "nemotron" or hasattr(config, "layer_norm_eps") or hasattr(config, "norm_epsilon")
    norm = "layer_norm" if centered else "layer_norm_rms"
    values = {
        "vocab_size": config.vocab_size, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "attention.key_length": d_head, "attention.value_length": d_head, "rope.dimension_count": rotated,
        "rope.freq_base": rope["rope_theta"], f"attention.{norm}_epsilon": eps, "expert_count": 0,
    }  # fmt: skip
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        n = rope["original_max_position_embeddings"]
        attention = float(np.sqrt(1 + np.log(rope["factor"]) / np.log(n)))
        values |= {"rope.scaling.original_context_length": n, "rope.scaling.attn_factor": attention}
    return values | of_family(config)


def of_family(config: Any) -> dict[str, Any]:
    """Metadata that one architecture alone has."""
    values: dict[str, Any] = {}
    architecture, kinds = architecture_of(config), getattr(config, "layer_types", None) or []
    fields = {
        "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale", "logit_scale": "logit_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
        "use_parallel_residual": "use_parallel_residual",
    }  # fmt: skip
    values = {key: x for field, key in fields.items() if (x := getattr(config, field, None)) is not None}
    if getattr(config, "attention_multiplier", 0) == 0.5:  # that of heads of this width
        del values["attention.scale"]
    if config.model_type in ("mistral", "gemma2", "cohere2", "olmo3", "phi3") or "sliding_attention" in kinds:
        values["attention.sliding_window"] = config.sliding_window or 0
    if architecture == "olmo2" and kinds:
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in kinds]
        values["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
    if kinds == ["full_attention", "sliding_attention"]:
        values["attention.sliding_window_pattern"] = [False, True]
    if config.pad_token_id is not None:
        values["tokenizer.ggml.padding_token_id"] = config.pad_token_id
    if config.model_type == "lfm2":
        values["shortconv.l_cache"] = config.conv_L_cache
        if "conv" in config.layer_types:
            kv = config.num_key_value_heads
            values["attention.head_count_kv"] = [0 if kind == "conv" else kv for kind in config.layer_types]
    return values


def write(path: Path, architecture: str, values: dict[str, Any], tensors: Tensors, packed: str = "") -> Path:
    """`values` have the architecture's name before them, or a complete one."""
    whole = ("general.", "tokenizer.")
    named = {key if key.startswith(whole) else f"{architecture}.{key}": value for key, value in values.items()}
    return write_gguf(path, architecture, named, tensors, packed)


def divisors(rope: dict[str, Any], d_head: int) -> np.ndarray:
    """llama.cpp's table for llama3: θ before and after the scaling of transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model("llama", **(SMALL | {"head_dim": d_head}), rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    theta = 1 / rope["rope_theta"] ** (torch.arange(0, d_head, 2) / d_head)
    return (theta / scaled).numpy().astype(np.float32)


def contents(name: str) -> tuple[PreTrainedModel, str, dict[str, Any], Tensors]:
    model = make(name)
    tensors = dict(stored_tensors(model))
    if "llama3" in name:
        tensors["rope_freqs.weight"] = divisors(model.config.rope_parameters, model.config.head_dim)
    if "longrope" in name:
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = np.float32(LONGROPE[f"{kind}_factor"])
    return model, architecture_of(model.config), metadata(model.config), tensors


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some_cases(3)
def test_a_model_of_transformers_comes_back(name: str, tmp_path: Path) -> None:
    """Its logits, from the configuration and the tensors that were read."""
    model, architecture, values, written = contents(name)
    config, tensors, _ = read_model(write(tmp_path / "m.gguf", architecture, values, written))
    found = AutoConfig.for_model(**config)
    opened = AutoModelForCausalLM.from_config(found)
    assert type(opened) is type(model) and found.architectures == [type(model).__name__]
    unpacked = {hf_name.replace("embed_out", "lm_head"): dequantize(stored) for hf_name, stored in tensors.items()}
    missing, unexpected = opened.load_state_dict(unpacked, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    for hf_name, value in model.state_dict().items():
        if hf_name in unpacked:
            assert torch.equal(unpacked[hf_name], value.float()), hf_name
    ids = torch.arange(40)[None] % 29
    expected = model(ids).logits
    error = (opened.double().eval()(ids).logits - expected).abs().max() / expected.abs().max()
    assert error < 1e-6  # the file rounds ε to float32
    if name == "llama, llama3 of 1024":
        assert config["rope_parameters"]["original_max_position_embeddings"] == 1024


def test_every_architecture_is_among_them() -> None:
    mixtures = set(NAMES.values()) - {"llama"}
    assert {architecture_of(make(name).config) for name in MODELS} | mixtures == set(ARCHITECTURES)


@pytest.mark.parametrize("packed", ["Q8_0", "Q4_1", "BF16"])
def test_packed_rows_move_whole(packed: str, tmp_path: Path) -> None:
    """Un-permuting packed bytes and unpacking equals unpacking and un-permuting."""
    w = np.random.default_rng(0).normal(size=(96, 96)).astype(np.float32)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **(SMALL | {"hidden_size": 96, "intermediate_size": 32, "head_dim": 32}))
    )
    tensors = dict(stored_tensors(model)) | {"blk.0.attn_q.weight": w}
    path = write(tmp_path / "m.gguf", "llama", metadata(model.config), tensors, packed)
    stored = read_model(path).tensors["model.layers.0.self_attn.q_proj.weight"]
    assert stored.kind == packed and stored.data.dtype == torch.uint8
    kind = GGMLQuantizationType[packed]
    unpacked = gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind)
    expected = unpacked.reshape(3, 16, 2, 96).swapaxes(1, 2).reshape(w.shape)
    assert np.array_equal(dequantize(stored).numpy(), expected)


# ── refused ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def without(key: str) -> dict[str, Any]:
    return {key: None}


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "another architecture": ({"architecture": "mamba"}, {}, 'architecture "mamba" is not supported; llama, smollm3'),
    "an adapter": ({"general.type": "adapter"}, {}, 'of the type "adapter", not a model'),
    "no block count": (without("block_count"), {}, "has no llama.block_count in its metadata"),
    "a block count under another name": (
        without("block_count") | {"blockcount": 2}, {}, "has no llama.block_count .* llama.blockcount is 2, which is not",
    ),
    "no width": (without("embedding_length"), {}, "has no llama.embedding_length"),
    "no epsilon": (without("attention.layer_norm_rms_epsilon"), {}, "has no llama.attention.layer_norm_rms_epsilon"),
    "epsilon 0": ({"attention.layer_norm_rms_epsilon": 0.0}, {}, "must be above 0"),
    "a block count of text": ({"block_count": "two"}, {}, 'llama.block_count is "two", not an integer'),
    "many blocks": ({"block_count": 2**31}, {}, "llama.block_count must be an integer of at most 1,000"),
    "heads by layer": ({"attention.head_count": [3, 3]}, {}, "attention.head_count is .*, not an integer"),
    "no heads": ({"attention.head_count": 0}, {}, "attention.head_count must be an integer of at least 1"),
    "heads that do not divide": (
        {"attention.head_count": 5, "attention.key_length": None}, {}, "head_count is 5, which does not divide the width 12",
    ),
    "groups that do not divide": ({"attention.head_count_kv": 2}, {}, "head_count_kv is 2, which does not divide the 3"),
    "values of another width": ({"attention.value_length": 8}, {}, "value_length is 8, and keys have 4"),
    "half a rotation": ({"rope.dimension_count": 2}, {}, "rope.dimension_count is 2, and heads have 4"),
    "experts": ({"expert_count": 8}, {}, "has no llama.expert_used_count in its metadata"),
    "a logit scale": ({"logit_scale": 0.5}, {}, "llama.logit_scale is 0.5, which is not supported"),
    "an attention scale": ({"attention.scale": 0.5}, {}, "llama.attention.scale is 0.5, which is not supported"),
    "not causal": ({"attention.causal": False}, {}, "only causal models are supported"),
    "longrope": ({"rope.scaling.type": "longrope"}, {}, "scaling.type is \"longrope\", .* with its tables"),
    "an attention factor": ({"rope.scaling.attn_factor": 2.0}, {}, "attn_factor is 2.0, only 1 is supported"),
    "yarn without a context": ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, {}, "original_context_length"),
    "a rotation base of 0": ({"rope.freq_base": 0.0}, {}, "rope.freq_base is 0.0, must be above 0"),
    "more tokens than rows": ({"tokenizer.ggml.tokens": ["a"] * 30}, {}, "has 30 tokens, token_embd.weight has 29"),
    "other frequencies": ({}, {"rope_freqs.weight": np.float32([1, 7])}, "rope_freqs.weight is not that of Llama 3"),
    "more frequencies": ({}, {"rope_freqs.weight": np.float32([1] * 7)}, "rope_freqs.weight is not that of Llama 3"),
    "a missing matrix": ({}, {"blk.1.ffn_up.weight": None}, "has no tensor blk.1.ffn_up.weight"),
    "a missing embedding": ({}, {"token_embd.weight": None}, "has no tensor token_embd.weight"),
    "a missing bias": ({}, {"blk.0.attn_q.bias": np.zeros(12, np.float32)}, "has no tensor blk.0.attn_k.bias"),
    "another tensor": ({}, {"blk.0.attn_sinks.weight": np.zeros(3, np.float32)}, "is not part of this architecture"),
    "a block too many": ({"block_count": 1}, {}, "\"blk.1.* is not part of this architecture"),
    "another shape": ({}, {"output_norm.weight": np.zeros(13, np.float32)}, r"has the shape \(13,\), expected \(12,\)"),
    "integers": ({}, {"blk.0.attn_v.weight": np.zeros((4, 12), np.int8)}, "stored as I8, which cannot be unpacked"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    changes, changed_tensors, message = REFUSED[name]
    _, architecture, values, tensors = contents("llama")
    values = values | changes
    architecture = values.pop("architecture", architecture)
    values = {key: value for key, value in values.items() if value is not None}
    tensors = {key: w for key, w in (tensors | changed_tensors).items() if w is not None}
    with pytest.raises(HandgradError, match=message) as error:
        read_model(write(tmp_path / "bad.gguf", architecture, values, tensors))
    assert "bad.gguf" in str(error.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    _, architecture, values, tensors = contents("llama")
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf", architecture, values, tensors).read_bytes()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 3000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_changed_bytes_give_a_model_or_an_error(changes: list[tuple[int, bytes]], small: bytes, tmp_path: Path) -> None:
    content = bytearray(small)
    for at, new in changes:
        content[at : at + len(new)] = new
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)
    try:
        for stored in read_model(path).tensors.values():
            dequantize(stored)
    except HandgradError as error:
        assert "changed.gguf" in str(error)
