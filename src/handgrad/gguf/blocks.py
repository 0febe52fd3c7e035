"""What differs between the blocks of a model in a GGUF file: windows, rotary frequencies and short convolutions."""

from typing import Any

from ..checks import check_integer
from .architectures import Architecture
from .metadata import Metadata

# Keys that an architecture may have of which some blocks have a window.
OF_WINDOWS = ("attention.sliding_window_pattern", "rope.freq_base_swa")


def window(given: Metadata, architecture: Architecture, blocks: int, rope: dict[str, Any]) -> dict[str, Any]:
    """The sliding window, the blocks that have it, and their frequencies if they are apart."""
    name, key = given.architecture, "attention.sliding_window"
    if not given.file.metadata.get(f"{name}.{key}") and name not in ("gemma2", "cohere2"):
        nested = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        }
        return {"layer_types": ["full_attention"] * blocks, "rope_parameters": nested} if name == "gemma3" else {}
    if architecture.windowed is None:
        return dict(given.refuse(key, "which is not supported"))
    model_class, model_type = architecture.windowed
    width = given.integer(key, "n_context", 4096 if name == "gemma2" else None)
    found = {"architectures": [model_class], "model_type": model_type, "sliding_window": width}
    if not architecture.pattern:
        return found
    found["layer_types"] = [
        "sliding_attention" if windowed else "full_attention" for windowed in _windowed(given, architecture, blocks)
    ]
    base = rope["rope_theta"]
    local = given.number("rope.freq_base_swa", architecture.local_base or base)
    if architecture.local_base is None and local != base:
        given.refuse("rope.freq_base_swa", f"and rope.freq_base is {base}; only equal ones are supported")
    if architecture.local_base is not None:
        local = local if architecture.local_base else base
        found["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    return found


def _windowed(given: Metadata, architecture: Architecture, blocks: int) -> list[bool]:
    """Whether each block has the window: the file says so, or of how many blocks all but the last have it."""
    key = OF_WINDOWS[0]
    name = f"{given.architecture}.{key}"
    value = given.file.metadata.get(name)
    if isinstance(value, list):
        if len(value) != blocks or not all(isinstance(x, bool | int) and x in (0, 1) for x in value):
            given.refuse(key, f"which is not true or false for each of the {blocks} blocks")
        return [bool(x) for x in value]
    period = given.file.integer(name, architecture.pattern)
    if period < 0:
        given.refuse(key, "must not be below 0")
    return [not period or (i + 1) % period != 0 for i in range(blocks)]


def kv_heads_of(given: Metadata, heads: int, blocks: int) -> tuple[int, set[int]]:
    """Heads of keys and values, and the blocks of an architecture with short convolutions that have none."""
    key = "attention.head_count_kv"
    name = f"{given.architecture}.{key}"
    if not isinstance(given.file.metadata.get(name), list):
        return given.integer(key, "n_heads", heads), set()
    counts = given.file.array(name, int, [])
    found = {count for count in counts if count or given.architecture != "lfm2"}
    if len(counts) != blocks or len(found) > 1:
        given.refuse(key, f"which is not one number of heads for all of the {blocks} blocks")
    kv_heads = next(iter(found), heads)
    check_integer("n_heads", kv_heads, f"{given.file.path}: {name}")
    return kv_heads, {i for i, count in enumerate(counts) if not count}


def absent_layers(architecture: Architecture, config: dict[str, Any], block: int) -> set[str]:
    """The layers of the architecture that a block does not have: those of attention where it has a short convolution, those
    of experts where it is dense, and the other way round."""
    if "conv_L_cache" in config:
        conv = config["layer_types"][block] == "conv"
        parts = ("attn_q", "attn_k", "attn_v", "attn_output") if conv else ("shortconv.",)
        return {name for name in architecture.block if name.startswith(parts)}
    if "first_k_dense_replace" in config:
        of_experts = {name for name in architecture.block if name.endswith(("_inp", "exps", "shexp", "probs_b"))}
        return of_experts if block < config["first_k_dense_replace"] else {"ffn_gate", "ffn_up", "ffn_down"}
    return set()
