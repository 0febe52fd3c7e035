"""A training step of a mixture of experts beside transformers' own, on the same weights and tokens.

python -m bench.experts          seconds of each, best of three rounds in turn, and their ratio
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import handgrad as hg

ROUNDS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "max_position_embeddings": 512,
}  # fmt: skip
TINY = {
    **SHAPE,
    "vocab_size": 64,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_experts": 8,
}


def steps(shape: dict[str, Any], batch: tuple[int, int]) -> dict[str, Callable[[], object]]:
    """A forward and backward pass of both, by name."""
    tokens, targets = torch.randint(shape["vocab_size"], (2, *batch))
    theirs = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**shape), attn_implementation="sdpa").train()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = hg.load(folder)

    def by_transformers() -> float:
        theirs.zero_grad()
        loss = F.cross_entropy(theirs(input_ids=tokens, use_cache=False).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.item()

    def by_hand() -> float:
        ours.zero_grad()
        return ours.loss_and_grads(tokens, targets)

    return {"handgrad": by_hand, "transformers": by_transformers}


def measure(shape: dict[str, Any] = SHAPE, batch: tuple[int, int] = (4, 128), rounds: int = ROUNDS) -> dict[str, float]:
    """The best seconds of each, in turn."""
    contenders = steps(shape, batch)
    first = {name: step() for name, step in contenders.items()}
    assert abs(first["handgrad"] - first["transformers"]) < 1e-3, first  # type: ignore[operator]
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, step in contenders.items():
            start = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


if __name__ == "__main__":
    found = measure()
    print(*(f"{name} {seconds:.3f} s" for name, seconds in found.items()), sep=", ", end="; ")
    print(f"transformers takes {found['transformers'] / found['handgrad']:.2f} times as long")
