"""A small session for tests: byte tokens, two blocks, weights large enough that no gradient is nearly zero."""

from typing import Any

import torch

import handgrad as hg
from conftest import perturb
from handgrad.explain_page.session.session import Session, TracedSentence, add_adapters
from handgrad.ops.rope_scaling import Scaling
from handgrad.text import tokenizer

TEXT = "to be, or not"

# Shapes of other families: grouped queries; q/k norms, biases and a head width other than d/h; no rotation and a window
LLAMA: dict[str, Any] = {"preset": "nano-llama", "n_heads": 4, "n_kv_heads": 2, "d_hidden": 40}
QWEN3 = {**LLAMA, "family": "qwen3", "qk_norm": True, "qkv_bias": True, "d_rho": 10, "d_head": 10}
SCORES = {**LLAMA, "attention_scale": 0.4, "score_cap": 2.0, "sinks": True}
SMOLLM3 = {
    **LLAMA,
    "family": "smollm3",
    "unrotated": (1,),
    "window": 4,
    "windowed": (1,),
    "tied": False,
    "n_kv_heads": 1,
}
LFM2 = {**LLAMA, "family": "lfm2", "qk_norm": True, "conv_blocks": (0,), "conv_bias": True}
SCALED = {**LLAMA, "n_blocks": 1, "n_kv_heads": 4, "mlp_bias": True, "activation": "gelu_tanh",
          "rope_scaling": Scaling("yarn", 4.0, original_max_position_embeddings=12)}  # fmt: skip


def make_session(
    seed: int = 0, dtype: torch.dtype = torch.float32, lora: int = 0, preset: str = "nano", **shape: object
) -> Session:
    small = {"n_vocab": 256, "n_context": 48, "d_model": 24, "n_heads": 3, "n_blocks": 2}
    model = hg.GPT(hg.preset(preset, **{**small, **shape}), seed=seed, dtype=dtype)
    perturb(model, seed, 0.1)
    if lora:
        add_adapters(model, lora)
    return session_of(model)


def session_of(model: hg.GPT) -> Session:
    return Session(model, tokenizer.make("bytes", ()), "small", "for a test", TEXT)


def make_traced(**shape: Any) -> tuple[Session, TracedSentence]:
    """A session, and its sentence."""
    session = make_session(**shape)
    return session, session.sentence(TEXT)


def evaluate(lines: str, **names: Any) -> Any:
    """Run lines of Python that the page shows, and return the value of the last one."""
    *before, last = lines.splitlines()
    exec("\n".join(before), names)
    return eval(last, names)
