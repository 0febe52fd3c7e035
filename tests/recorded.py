"""Losses, gradients, weights and files of ten small configurations, to check that a refactoring changes no number.

    HANDGRAD_KERNELS=0 python tests/recorded.py        print the results as JSON, for tests/data/recorded.json

Bits depend on the processor and on torch: digests are compared where both match the recording, norms everywhere.
"""

import hashlib
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import handgrad as hg
from handgrad import lora

FILE = Path(__file__).parent / "data" / "recorded.json"
SMALL: dict[str, Any] = {"n_vocab": 31, "n_context": 24, "d_model": 24, "n_heads": 3, "n_blocks": 2}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float64": {"dtype": "float64"},
    "recompute": {"call": {"recompute": "blocks"}},
    "pieces": {"lengths": [24] * 60, "shape": {"n_blocks": 1}},
    "untied, biased, relu": {"shape": {"tied": False, "logits_bias": True, "activation": "relu"}},
    "gelu, odd widths": {"shape": {"activation": "gelu", "d_rho": 5, "d_head": 7, "d_hidden": 37}},
    "not causal": {"shape": {"causal": False}, "dtype": "float64"},
    "LoRA": {"lora": {"rank": 3, "targets": "all-linear"}},
    "DoRA with dropout": {"lora": {"rank": 2, "targets": ["c_attn", "lm_head"], "dora": True, "dropout": 0.25}},
    "LoRA-FA, layers kept whole": {
        "lora": {"rank": 4, "targets": ["c_fc"], "freeze_down": True, "modules_to_save": ["ln_f"]}
    },
}  # fmt: skip


def compute(shape: dict[str, Any] | None = None, dtype: str = "float32", lengths: list[int] | None = None,
            call: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:  # fmt: skip
    """Train three steps with AdamW, save the model or adapter, and return losses, norms and digests."""
    lengths = lengths or [9, 1, 24, 6]
    model = hg.GPT(hg.preset("nano", **{**SMALL, **(shape or {})}), seed=1, dtype=getattr(torch, dtype))
    if "lora" in options:
        lora.inject(model, seed=2, **options["lora"])
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(31, (2, sum(lengths)), generator=generator)
    targets[torch.rand(len(targets), generator=generator) < 0.2] = -100
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    grads: dict[str, Tensor] = {}
    for step in range(3):
        optimizer.zero_grad()
        losses.append(model.loss_and_grads(tokens, targets, lengths, seed=step, **(call or {})))
        grads |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        (lora.save if model.adapter is not None else hg.save)(model, folder)
        files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path(folder).iterdir())}
    return {
        "losses": losses,
        "norms": {name: float(t.double().norm()) for name, t in {**grads, **weights}.items()},
        "digests": {"gradients": digest(grads), "weights": digest(weights), **files},
    }


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names and bytes of the tensors, in the order of their names."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def machine() -> dict[str, str]:
    """What the bits of a result depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return {"torch": torch.__version__, "processor": model, "instructions": torch.backends.cpu.get_cpu_capability()}


def compute_all() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"machine": machine(), "configurations": {name: compute(**c) for name, c in CONFIGURATIONS.items()}}


if __name__ == "__main__":
    print(json.dumps(compute_all()))
