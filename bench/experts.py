"""A training step of a mixture of experts beside transformers' own, on the same weights and tokens, in float32.

python -m bench.experts          seconds of each, the best of three rounds in turn, and their ratio
"""

import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import handgrad as hg
from handgrad.machine import configure_runtime

from .machine import Machine

ROUNDS = 3
SHARED: dict[str, Any] = {"vocab_size": 1024, "norm_topk_prob": True, "max_position_embeddings": 512, "head_dim": 64}


class Case(NamedTuple):
    d_model: int
    width: int  # of an expert
    blocks: int
    experts: int
    chosen: int  # of each token
    batch: tuple[int, int]

    def config(self) -> Qwen3MoeConfig:
        heads = self.d_model // 64
        return Qwen3MoeConfig(
            **SHARED, hidden_size=self.d_model, intermediate_size=4 * self.d_model, moe_intermediate_size=self.width,
            num_hidden_layers=self.blocks, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
            num_experts=self.experts, num_experts_per_tok=self.chosen,
        )  # fmt: skip

    def __str__(self) -> str:
        tokens = self.batch[0] * self.batch[1]
        return (
            f"{self.blocks} blocks of width {self.d_model}, {self.chosen} of {self.experts} experts of width {self.width},"
            f" {tokens} tokens"
        )


CASES = (Case(256, 256, 2, 32, 4, (4, 128)), Case(1024, 512, 2, 64, 8, (1, 512)))


def steps(case: Case) -> dict[str, Callable[[], float]]:
    """A forward and backward pass of both, by name."""
    tokens, targets = torch.randint(SHARED["vocab_size"], (2, *case.batch))
    theirs = AutoModelForCausalLM.from_config(case.config(), attn_implementation="sdpa").train()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
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


def measure(case: Case, rounds: int = ROUNDS) -> dict[str, float]:
    """The best seconds of each, in turn."""
    contenders = steps(case)
    first = {name: step() for name, step in contenders.items()}
    if abs(first["handgrad"] - first["transformers"]) > 1e-3:
        raise SystemExit(f"the losses differ: {first}")
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, step in contenders.items():
            start = time.perf_counter()
            step()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main(cases: tuple[Case, ...] = CASES) -> None:
    machine = Machine.now()
    for case in cases:
        found = measure(case)
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in found.items())
        print(f"{case}: {seconds}, {found['transformers'] / found['handgrad']:.2f}×")
    machine = machine.after()
    print(*filter(None, (machine.state, machine.warning)), sep="\n")


if __name__ == "__main__":
    configure_runtime()
    main()
