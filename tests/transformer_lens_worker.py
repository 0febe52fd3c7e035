"""What TransformerLens computes, for transformer_lens_check.py: a program of a separate environment, which has it.

    python transformer_lens_worker.py REQUEST.json RESULT.safetensors

A request has a model's folder, the ids of two prompts, and a difference of logits. The result: the activations of the first
prompt ("a blocks.0.hook_resid_pre"), their gradients by its backward hooks ("delta …"), and how the difference changes with
each of its patches from the second prompt ("patch resid_pre").
"""

import json
import sys
import warnings
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformer_lens import TransformerBridge, patching  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

logging.disable_progress_bar()
torch.set_default_dtype(torch.float64)  # of the tables in which its sweeps return their values
SWEEPS = ("resid_pre", "resid_mid", "attn_out", "mlp_out", "attn_head_out_by_pos", "attn_head_v_by_pos")


def open_model(folder: str) -> TransformerBridge:
    inner = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)
    return TransformerBridge.boot_transformers(folder, hf_model=inner.eval(), device="cpu", dtype=torch.float64)


def main(request: Path, result: Path) -> None:
    wanted = json.loads(request.read_text())
    model = open_model(wanted["model"])
    tokens, other = (torch.tensor([wanted[name]]) for name in ("tokens", "other"))

    def metric(logits: torch.Tensor) -> torch.Tensor:
        row = logits[0, wanted["position"]]
        return row[wanted["token"]] - row[wanted["against"]]

    found: dict[str, torch.Tensor] = {}
    _, cache = model.run_with_cache(tokens)
    found |= {f"a {name}": x.detach() for name, x in cache.items() if isinstance(x, torch.Tensor)}

    def keep(name: str, grad: torch.Tensor, hook: object) -> None:
        found[f"delta {name}"] = grad.detach()

    hooks = [(name, partial(lambda grad, hook, name: keep(name, grad, hook), name=name)) for name in cache]
    with model.hooks(bwd_hooks=hooks), torch.enable_grad():
        metric(model(tokens)).backward()
    _, clean = model.run_with_cache(other)
    base = metric(model(tokens)).detach()
    found["value"] = base
    for name in SWEEPS:
        sweep = getattr(patching, f"get_act_patch_{name}")
        found[f"patch {name}"] = sweep(model, tokens, clean, metric).detach() - base
    if wanted["paths"]:
        for letter in "qkv":
            paths = [
                patching.get_act_patch_direct_path(model, tokens, clean, cache, metric, 0, head, letter, verbose=False)
                for head in range(model.cfg.n_heads)
            ]
            found[f"path {letter}"] = torch.stack(paths) - base  # sender, block, receiver
    save_file({name: x.contiguous().clone() for name, x in found.items()}, result)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
