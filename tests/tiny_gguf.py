"""GGUF files for tests; one is a tiny random Llama with a byte tokenizer and a chat template, in the place of those
that are fetched."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

import handgrad as hg
from handgrad.text import downloads
from handgrad.text.tokenizer import make

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {"n_context": 128, "d_model": 32, "n_heads": 2, "n_kv_heads": 1, "n_blocks": 2, "d_hidden": 64}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers": "blk", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
    packed: str = "",
) -> Path:
    """Write a GGUF file: metadata by their Python types, and matrices as the type `packed`, if one is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, architecture)
    add: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array,
        float: writer.add_float32,
    }  # fmt: skip
    for key, value in metadata.items():
        add[type(value)](key, value)
    for name, w in (tensors or {}).items():
        if packed and w.ndim == 2:
            kind = GGMLQuantizationType[packed]
            writer.add_tensor(name, gguf.quants.quantize(w, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, w)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    """Write what was added."""
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def write_tiny_smollm2(path: Path) -> None:
    """Write the file, with matrices as Q8_0."""
    made = make("bytes", []).inner
    single = [made.id_to_token(i) for i in range(256)]
    tokens = [*single, single[116] + single[104], "<|im_start|>", "<|im_end|>"]  # one merge: t h
    model = hg.GPT(hg.preset("nano-llama", n_vocab=len(tokens), **SHAPE), seed=0)
    c = model.config
    sizes = {
        "context_length": c.n_context, "embedding_length": c.d_model, "feed_forward_length": c.hidden_width,
        "block_count": c.n_blocks, "attention.head_count": c.n_heads, "attention.head_count_kv": c.kv_heads,
        "rope.dimension_count": c.query_width, "rope.freq_base": c.rope_base,
        "attention.layer_norm_rms_epsilon": c.eps, "vocab_size": c.n_vocab,
    }  # fmt: skip
    vocabulary = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": [1] * 257 + [3, 3],
        "merges": [f"{tokens[116]} {tokens[104]}"], "bos_token_id": 257, "eos_token_id": 258,
    }  # fmt: skip
    metadata = {f"llama.{key}": value for key, value in sizes.items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    tensors = {}
    for name, p in model.named_parameters():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        w = p.detach()
        if name.split(".")[-2] in ("attn_q", "attn_k"):  # to the interleaved order
            w = w.view(-1, 2, c.query_width // 2, c.d_model).transpose(1, 2).reshape(w.shape)
        tensors[name] = w.to(torch.float32).contiguous().numpy()
    write_gguf(path, "llama", metadata | {"tokenizer.chat_template": TEMPLATE}, tensors, "Q8_0")


def put_in_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write it where `handgrad get` puts each real model, and let it be the file that is expected there."""
    for name in downloads.models():
        real = downloads.DOWNLOADS[name]
        (member,) = real.members
        path = downloads.cache_path(name) / member.name
        write_tiny_smollm2(path)
        tiny = member._replace(size=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
        monkeypatch.setitem(downloads.DOWNLOADS, name, replace(real, members=(tiny,)))
