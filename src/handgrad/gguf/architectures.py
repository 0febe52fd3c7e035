"""GGUF's architectures: what their layers are called in GGUF and in Hugging Face's files, their shapes and orders."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
_OUTPUT_BIASES = r"rope_freqs\.weight|blk\.\d+\.(attn_output|ffn_\w+)\.bias"


T = TypeVar("T")


class Layer(NamedTuple):
    """Hugging Face's name, and the sizes of the weight in torch's order; those that are "one" are left out in GGUF. A layer
    of experts, whose name has a *, is in GGUF one tensor of all of them, (experts, …)."""

    name: str
    sizes: tuple[str, ...]
    alone: str = (
        ""  # "weight" or "bias": what the only tensor is in GGUF, which has the layer's name in Hugging Face's files
    )

    def tensors(self, with_bias: bool) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """GGUF's kind of every tensor, its name in Hugging Face's files and its sizes."""
        if self.alone:
            yield self.alone, self.name, self.sizes
            return
        yield "weight", f"{self.name}.weight", self.sizes
        if with_bias:
            yield "bias", f"{self.name}.bias", self.sizes[:-1] or self.sizes


_OUTER = {
    "token_embd": Layer("model.embed_tokens", ("vocab", "d")),
    "output_norm": Layer("model.norm", ("d",)),
    "output": Layer("lm_head", ("vocab", "d")),
}
_BLOCK = {
    "attn_norm": Layer("input_layernorm", ("d",)),
    "attn_q": Layer("self_attn.q_proj", ("queries", "d")),
    "attn_k": Layer("self_attn.k_proj", ("keys", "d")),
    "attn_v": Layer("self_attn.v_proj", ("keys", "d")),
    "attn_output": Layer("self_attn.o_proj", ("d", "queries")),
    "ffn_norm": Layer("post_attention_layernorm", ("d",)),
    "ffn_gate": Layer("mlp.gate_proj", ("hidden", "d")),
    "ffn_up": Layer("mlp.up_proj", ("hidden", "d")),
    "ffn_down": Layer("mlp.down_proj", ("d", "hidden")),
}
_LFM2_OUTER = {**_OUTER, "token_embd_norm": Layer("model.embedding_norm", ("d",))}
del _LFM2_OUTER["output_norm"]
_LFM2_BLOCK = {
    **_BLOCK,
    "attn_norm": Layer("operator_norm", ("d",)),
    "attn_output": Layer("self_attn.out_proj", ("d", "queries")),
    "attn_q_norm": Layer("self_attn.q_layernorm", ("head",)),
    "attn_k_norm": Layer("self_attn.k_layernorm", ("head",)),
    "shortconv.conv": Layer("conv.conv", ("d", "one", "taps")),
    "shortconv.in_proj": Layer("conv.in_proj", ("gates", "d")),
    "shortconv.out_proj": Layer("conv.out_proj", ("d", "d")),
    "ffn_norm": Layer("ffn_norm", ("d",)),
    "ffn_gate": Layer("feed_forward.w1", ("hidden", "d")),
    "ffn_up": Layer("feed_forward.w3", ("hidden", "d")),
    "ffn_down": Layer("feed_forward.w2", ("d", "hidden")),
}
MATRICES = {  # Hugging Face's name: GGUF's
    layer.name: name for name, layer in [*_BLOCK.items(), *_LFM2_BLOCK.items()] if len(layer.sizes) == 2
}
_QK_NORMS = {
    "attn_q_norm": Layer("self_attn.q_norm", ("head",)),
    "attn_k_norm": Layer("self_attn.k_norm", ("head",)),
}
_GPT2_OUTER = {
    "token_embd": Layer("transformer.wte", ("vocab", "d")),
    "position_embd": Layer("transformer.wpe", ("context", "d")),
    "output_norm": Layer("transformer.ln_f", ("d",)),
    "output": Layer("lm_head", ("vocab", "d")),
}
_GPT2_BLOCK = {
    "attn_norm": Layer("ln_1", ("d",)),
    "attn_qkv": Layer("attn.c_attn", ("qkv", "d")),
    "attn_output": Layer("attn.c_proj", ("d", "d")),
    "ffn_norm": Layer("ln_2", ("d",)),
    "ffn_up": Layer("mlp.c_fc", ("hidden", "d")),
    "ffn_down": Layer("mlp.c_proj", ("d", "hidden")),
}
_POST_NORMS = {
    "post_attention_norm": Layer("post_attention_layernorm", ("d",)),
    "post_ffw_norm": Layer("post_feedforward_layernorm", ("d",)),
}
_GEMMA = _BLOCK | _POST_NORMS | {"ffn_norm": Layer("pre_feedforward_layernorm", ("d",))}
_OLMO = {name: layer for name, layer in _BLOCK.items() if not name.endswith("_norm")} | {
    **_POST_NORMS,
    "attn_q_norm": Layer("self_attn.q_norm", ("queries",)),
    "attn_k_norm": Layer("self_attn.k_norm", ("keys",)),
}
_EXAONE = _OLMO | _QK_NORMS
_PLAIN = {name: layer for name, layer in _BLOCK.items() if name != "ffn_gate"}
_STARCODER = _PLAIN | {
    "ffn_up": Layer("mlp.c_fc", ("hidden", "d")),
    "ffn_down": Layer("mlp.c_proj", ("d", "hidden")),
}
_PHI = {name: layer for name, layer in _BLOCK.items() if name not in ("attn_q", "attn_k", "attn_v", "ffn_gate")} | {
    "attn_qkv": Layer("self_attn.qkv_proj", ("qkv", "d")),
    "ffn_up": Layer("mlp.gate_up_proj", ("gate_up", "d")),
}
_NEOX_OUTER = {
    "token_embd": Layer("gpt_neox.embed_in", ("vocab", "d")),
    "output_norm": Layer("gpt_neox.final_layer_norm", ("d",)),
    "output": Layer("embed_out", ("vocab", "d")),
}
_NEOX_BLOCK = {
    "attn_norm": Layer("input_layernorm", ("d",)),
    "attn_qkv": Layer("attention.query_key_value", ("qkv", "d")),
    "attn_output": Layer("attention.dense", ("d", "d")),
    "ffn_norm": Layer("post_attention_layernorm", ("d",)),
    "ffn_up": Layer("mlp.dense_h_to_4h", ("hidden", "d")),
    "ffn_down": Layer("mlp.dense_4h_to_h", ("d", "hidden")),
}


def _without(table: Mapping[str, T], *names: str) -> dict[str, T]:
    return {name: x for name, x in table.items() if name not in names}


def _experts(mlp: str, router: str, gate: str, up: str, down: str) -> dict[str, Layer]:
    """The router and the experts, by the names in Hugging Face's files."""
    return {
        "ffn_gate_inp": Layer(f"{mlp}.{router}", ("experts", "d")),
        "ffn_gate_exps": Layer(f"{mlp}.experts.*.{gate}", ("experts", "expert", "d")),
        "ffn_up_exps": Layer(f"{mlp}.experts.*.{up}", ("experts", "expert", "d")),
        "ffn_down_exps": Layer(f"{mlp}.experts.*.{down}", ("experts", "d", "expert")),
    }


def _shared(name: str) -> dict[str, Layer]:
    """The expert that all tokens share."""
    return {
        "ffn_gate_shexp": Layer(f"{name}.gate_proj", ("shared", "d")),
        "ffn_up_shexp": Layer(f"{name}.up_proj", ("shared", "d")),
        "ffn_down_shexp": Layer(f"{name}.down_proj", ("d", "shared")),
    }


_EXPERTS = _experts("mlp", "gate", "gate_proj", "up_proj", "down_proj")
_SPARSE = _without(_BLOCK, *_MLP)
_MIXTRAL = _SPARSE | _experts("block_sparse_moe", "gate", "w1", "w3", "w2")
_QWEN2_MOE = (
    _SPARSE
    | _EXPERTS
    | _shared("mlp.shared_expert")
    | {
        "ffn_gate_inp_shexp": Layer("mlp.shared_expert_gate", ("one", "d")),
    }
)
_OLMOE = (
    _SPARSE
    | _EXPERTS
    | {
        "attn_q_norm": Layer("self_attn.q_norm", ("queries",)),
        "attn_k_norm": Layer("self_attn.k_norm", ("keys",)),
    }
)
_GPT_OSS = (
    _without(_SPARSE, "ffn_norm")
    | _experts("mlp", "router", "gate_proj", "up_proj", "down_proj")
    | {
        "post_attention_norm": Layer("post_attention_layernorm", ("d",)),
        "attn_sinks": Layer("self_attn.sinks", ("heads",), "weight"),
    }
)
_DOTS1 = (
    _BLOCK
    | _QK_NORMS
    | _EXPERTS
    | _shared("mlp.shared_experts")
    | {
        "exp_probs_b": Layer("mlp.gate.e_score_correction_bias", ("experts",), "bias"),
    }
)
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", **_CAP}
_PARALLEL = _without(_BLOCK, "ffn_norm")
_COUNTS = ("expert_count", "expert_used_count")
_QWEN_KEYS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_EVERY_BLOCK = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_TIED = r"rope_freqs\.weight|output\.weight"
RMS = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


@dataclass(frozen=True)
class Architecture:
    """What `general.architecture` names."""

    model_class: str  # the class that opens it in transformers
    block: Mapping[str, Layer]
    outer: Mapping[str, Layer] = field(default_factory=lambda: _OUTER)
    blocks: str = "model.layers"
    biases: tuple[str, ...] = ()  # layers that always have a bias
    choices: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # field of config.json → layers that then have one
    permuted: bool = False  # the rows of q and k are in the order of interleaved rotation
    transposed: tuple[str, ...] = ()  # layers whose weight is (f_in, f_out) in Hugging Face's files
    unread: str = r"rope_freqs\.weight"  # tensors with which llama.cpp does not open a file; a regular expression
    whole_width: bool = False  # llama.cpp opens it only if all heads together are as wide as the model
    model_type: str = ""  # in config.json, if it is not the architecture's name
    windowed: tuple[str, str] | None = None  # class and model_type of the same network with a sliding window
    pattern: int = (
        0  # of this many blocks all but the last have the window, unless the file says which; 0: every block has
    )
    own_head: bool = False  # llama.cpp opens no file without output.weight
    ungrouped: bool = False  # llama.cpp opens it only if every head of queries has keys of its own
    mixture: "Architecture | None" = None  # what files with experts have instead
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json that every file shares
    constants: Mapping[str, int] = field(default_factory=dict)  # keys with the only value that is supported
    eps: tuple[str, str] = RMS  # GGUF's key and the field of config.json
    activation: tuple[str, str] = ("hidden_act", "silu")  # field of config.json and its value
    keys: Mapping[str, str] = field(default_factory=dict)  # other keys → fields of config.json
    needed: tuple[str, ...] = ()  # those that every file has
    idle: str = ""  # keys that change nothing here; a regular expression
    gain_offset: int = 0  # 1: norms hold 1 + w
    partial: bool = False  # the rotation may leave features out
    local_base: float | None = (
        None  # base of blocks with a window if the file has none; 0: that of the others, unscaled
    )
    wide_from: int = 0  # a model of that many blocks scales scores by the width over the heads; 0: none does
    by_head: str = ""  # the layer of which Hugging Face's files have q, k and v of each head side by side


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", _BLOCK, permuted=True, choices={"attention_bias": _ATTENTION, "mlp_bias": _MLP}, unread="",
        windowed=("MistralForCausalLM", "mistral"),
        mixture=Architecture(
            "MixtralForCausalLM", _MIXTRAL, permuted=True, model_type="mixtral", unread="",
            keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}, needed=_COUNTS,
            windowed=("MixtralForCausalLM", "mixtral"),
        ),
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM", _BLOCK, permuted=True, choices={"attention_bias": _ATTENTION, "mlp_bias": _MLP},
        unread=_OUTPUT_BIASES,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM", _BLOCK, biases=_ATTENTION[:3], whole_width=True),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", _BLOCK | _QK_NORMS, choices={"attention_bias": _ATTENTION}, unread=_OUTPUT_BIASES
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM", _LFM2_BLOCK, _LFM2_OUTER, eps=("attention.layer_norm_rms_epsilon", "norm_eps"), whole_width=True,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel", _GPT2_BLOCK, _GPT2_OUTER, "transformer.h", biases=("output_norm", *_GPT2_BLOCK),
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", _GEMMA, activation=("hidden_activation", "gelu_pytorch_tanh"), keys=_CAPS, gain_offset=1,
        windowed=("Gemma2ForCausalLM", "gemma2"), pattern=2, wide_from=46, unread=_TIED,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", _GEMMA | _QK_NORMS, model_type="gemma3_text", keys=_CAP, gain_offset=1,
        activation=("hidden_activation", "gelu_pytorch_tanh"), windowed=("Gemma3ForCausalLM", "gemma3_text"), pattern=6,
        wide_from=62, local_base=10_000.0,
    ),
    "olmo2": Architecture(
        "Olmo2ForCausalLM", _OLMO, windowed=("Olmo3ForCausalLM", "olmo3"), pattern=4, local_base=0.0, whole_width=True,
        own_head=True,
    ),
    "granite": Architecture(
        "GraniteForCausalLM", _BLOCK, permuted=True, keys=_SCALES | {"attention.scale": "attention_multiplier"},
        needed=("logit_scale",), choices={"attention_bias": _ATTENTION, "mlp_bias": _MLP}, unread="",
        idle=r"ssm\.\w+|expert_shared_feed_forward_length",  # of Granite 4, which has blocks of other kinds as well
    ),
    "minicpm": Architecture(  # the same network
        "GraniteForCausalLM", _BLOCK, permuted=True, keys=_SCALES, needed=tuple(_SCALES), model_type="granite",
        choices={"attention_bias": _ATTENTION, "mlp_bias": _MLP}, unread="",
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", _STARCODER, biases=("output_norm", *_STARCODER), whole_width=True,
        eps=("attention.layer_norm_epsilon", "norm_epsilon"), activation=("hidden_act", "gelu_pytorch_tanh"),
        windowed=("Starcoder2ForCausalLM", "starcoder2"),
    ),
    "command-r": Architecture(
        "CohereForCausalLM", _PARALLEL, model_type="cohere", eps=("attention.layer_norm_epsilon", "layer_norm_eps"),
        keys={"logit_scale": "logit_scale"}, needed=("logit_scale",), whole_width=True, unread=_TIED,
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", _PARALLEL, eps=("attention.layer_norm_epsilon", "layer_norm_eps"),
        keys={"logit_scale": "logit_scale"}, needed=("logit_scale", "attention.sliding_window"),
        windowed=("Cohere2ForCausalLM", "cohere2"), pattern=4, whole_width=True, unread=_TIED,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM", _NEOX_BLOCK, _NEOX_OUTER, "gpt_neox.layers", model_type="gpt_neox",
        biases=("output_norm", *_NEOX_BLOCK), eps=("attention.layer_norm_epsilon", "layer_norm_eps"),
        activation=("hidden_act", "gelu"), keys={"use_parallel_residual": "use_parallel_residual"},
        needed=("use_parallel_residual",), partial=True, by_head="attn_qkv", own_head=True,
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", _EXAONE, whole_width=True, unread=""),
    "nemotron": Architecture(
        "NemotronForCausalLM", _PLAIN, biases=("output_norm", "attn_norm", "ffn_norm"), gain_offset=1, partial=True,
        choices={"attention_bias": _ATTENTION, "mlp_bias": _MLP[1:]}, eps=("attention.layer_norm_epsilon", "norm_eps"),
        activation=("hidden_act", "relu2"), whole_width=True, own_head=True,
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM", _PHI, windowed=("Phi3ForCausalLM", "phi3"), partial=True, whole_width=True,
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM", _QWEN2_MOE, model_type="qwen2_moe", biases=_ATTENTION[:3], whole_width=True, own_head=True,
        keys=_QWEN_KEYS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        needed=(*_QWEN_KEYS, "expert_shared_feed_forward_length"), fixed={"norm_topk_prob": False, **_EVERY_BLOCK},
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", _SPARSE | _QK_NORMS | _EXPERTS, model_type="qwen3_moe", keys=_QWEN_KEYS,
        needed=tuple(_QWEN_KEYS), fixed={"norm_topk_prob": True, **_EVERY_BLOCK},
        choices={"attention_bias": _ATTENTION}, unread=_OUTPUT_BIASES,
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM", _OLMOE, keys=_without(_QWEN_KEYS, "expert_feed_forward_length"), needed=_COUNTS,
        fixed={"norm_topk_prob": False}, choices={"attention_bias": _ATTENTION}, unread=_OUTPUT_BIASES, whole_width=True,
        own_head=True, ungrouped=True,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", _GPT_OSS, model_type="gpt_oss", biases=(*_ATTENTION, *_EXPERTS), own_head=True,
        keys={
            "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        needed=(*_COUNTS, "expert_feed_forward_length", "attention.sliding_window"),
        windowed=("GptOssForCausalLM", "gpt_oss"), pattern=2,
    ),
    "dots1": Architecture(
        "Dots1ForCausalLM", _DOTS1, choices={"attention_bias": _ATTENTION}, unread=_OUTPUT_BIASES, own_head=True,
        keys=_QWEN_KEYS | {
            "expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts",
            "leading_dense_block_count": "first_k_dense_replace", "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
        needed=(*_QWEN_KEYS, "expert_shared_count"), constants={"expert_gating_func": 2}, ungrouped=True,
    ),
}  # fmt: skip


def table_of(name: str, metadata: Mapping[str, Any]) -> Architecture:
    """The table of a file with these metadata."""
    table = ARCHITECTURES[name]
    return table.mixture if table.mixture is not None and metadata.get(f"{name}.expert_count") else table


def by_head_order(n: int, heads: int) -> Tensor:
    """Indices that take n rows from q, k and v one after the other to those of each head side by side."""
    return torch.arange(n).view(3, heads, -1).transpose(0, 1).flatten()


def half_split_order(n: int, d_head: int) -> Tensor:
    """Indices that take n rows from the interleaved order of each head, 0 1 2 3 …, to the half-split one, 0 2 4 … 1 3 5 …"""
    return torch.arange(n).view(-1, d_head // 2, 2).transpose(1, 2).flatten()


def interleaved_order(n: int, d_head: int) -> Tensor:
    """The inverse of `half_split_order`."""
    return half_split_order(n, d_head).argsort()
