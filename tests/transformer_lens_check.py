"""Compare traces and patches with those of TransformerLens on the same weights.

    python tests/transformer_lens_check.py --program build/transformer-lens/bin/python

TransformerLens is in a separate environment (`make transformer-lens-check` makes it). Compared in float64, on small models
of three families: every activation and attention pattern, gradients by its backward hooks with our error signals, what every
patch of the residual stream, of the branches, heads and values does to a difference of logits, and paths from head to head.
The exit status is 1 if something differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import handgrad as hg
from conftest import perturb, save_with_bytes
from handgrad.proof.oracles import relative_error

LIMIT = 1e-10  # relative, in float64
ROUNDED_LIMIT = (
    1e-5  # of families whose norms and rotations transformers, which TransformerLens runs, computes in float32
)
WORKER = Path(__file__).with_name("transformer_lens_worker.py")
SHAPE = {"n_vocab": 257, "n_context": 16, "d_model": 24, "n_heads": 3, "n_blocks": 3}
LLAMA = {"preset": "nano-llama", "n_heads": 4, "n_kv_heads": 2, "d_hidden": 40}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {**LLAMA},
    "qwen3": {**LLAMA, "family": "qwen3", "qk_norm": True, "d_rho": 10, "d_head": 10},
}
TOKENS, OTHER = [7, 1, 30, 4, 9, 22, 13], [7, 1, 12, 41, 9, 22, 13]
NAMES = {  # of a block's activations
    "a_1": "hook_resid_pre", "a_2": "ln1.hook_out", "a_3": "attn.hook_z", "a_4": "hook_attn_out", "a_5": "hook_resid_mid",
    "a_6": "ln2.hook_out", "a_7": "mlp.hook_pre", "a_8": "mlp.hook_post", "a_9": "hook_mlp_out", "a_10": "hook_resid_post",
    "rho": "attn.hook_pattern", "v": "attn.hook_v",
}  # fmt: skip
ENDS = {"a_11": "ln_final.hook_out", "a_12": "unembed.hook_out"}
# hook_resid_mid is the input of the second norm alone: the skip connection past the feed-forward layer does not pass it
PATCHES = {
    "resid_pre": ("a_1", ("position",)), "resid_mid": ("a_6", ("position",)), "attn_out": ("a_4", ("position",)),
    "mlp_out": ("a_9", ("position",)), "attn_head_out_by_pos": ("a_3", ("position", "head")),
    "attn_head_v_by_pos": ("v", ("position", "head")),
}  # fmt: skip


def flat(x: Tensor, like: Tensor) -> Tensor:
    """(1, n, h, d) or (1, h, n, n) → the shape that it has in a trace"""
    x = x[0]
    if like.ndim == 3 and x.shape != like.shape:
        return x.transpose(0, 1)
    return x.reshape(like.shape)


def compare(name: str, program: str, folder: Path) -> bool:
    shape = {**SHAPE, **MODELS[name]}
    made = hg.GPT(hg.preset(shape.pop("preset", "nano"), **shape), seed=0, dtype="float32")
    perturb(made, 0, 0.1)
    save_with_bytes(made, folder / "model")
    model = hg.load(folder / "model", dtype="float64")
    tokens, others = torch.tensor([TOKENS]), torch.tensor([OTHER])
    targets, other_targets = (torch.cat([x[:, 1:], torch.tensor([[-100]])], 1) for x in (tokens, others))
    why = hg.LogitDifference(len(TOKENS) - 1, 5, 11)
    request = {
        "model": str(folder / "model"), "tokens": TOKENS, "other": OTHER, "position": why.position, "token": why.token,
        "against": why.against, "paths": name == "gpt2",
    }  # fmt: skip
    (folder / "request.json").write_text(json.dumps(request))
    done = subprocess.run([program, WORKER, folder / "request.json", folder / "result"], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: TransformerLens failed\n{done.stderr[-2000:]}")
    theirs = load_file(folder / "result")
    own = hg.trace(model, tokens, targets, objective=why, edit={})
    other = hg.trace(model, others, other_targets)
    good = True

    limit = LIMIT if name == "gpt2" else ROUNDED_LIMIT

    def line(what: str, errors: dict[str, float]) -> None:
        nonlocal good
        passed = bool(errors) and max(errors.values()) <= limit
        good &= passed
        worst = max(errors, key=lambda x: errors[x]) if errors else "nothing compared"
        figure = f"{errors[worst]:.1e}  {worst}" if errors else worst
        print(f"{'✔' if passed else '✗'} {name}: {what}, {len(errors)} tensors, largest relative error {figure}")

    names = {f"blocks.{b}.{ours}": f"blocks.{b}.{x}" for b in range(3) for ours, x in NAMES.items()} | ENDS
    for what, prefix in (("activations and attention patterns", ""), ("gradients", "delta")):
        errors = {}
        for ours, known in names.items():
            here, dot, last = ours.rpartition(".")
            mine = ours if not prefix else f"{here}{dot}delta_{last.removeprefix('a_')}"
            key = f"{prefix or 'a'} {known}"
            if mine in own and key in theirs:
                expected = own[mine] - own[f"{here}.delta_skip_10"] if last == "a_5" and prefix else own[mine]
                errors[mine] = relative_error(flat(theirs[key], expected), expected)
        line(what, errors)
    for sweep, (of, by) in PATCHES.items():
        if f"patch {sweep}" in theirs:
            found = hg.patch_map(model, tokens, targets, other, of, by, objective=why).measure()
            line(f"patches of {of}", {sweep: relative_error(theirs[f"patch {sweep}"], found)})
    for letter in "qkv" if request["paths"] else ():
        errors = {}
        for block in (1, 2):
            for head in range(3):
                found = hg.path_map(
                    model, tokens, targets, other, f"blocks.{block}.{letter}", by="head", head=head, objective=why
                )
                mine = found.measure([(0, sender) for sender in range(3)])[0]
                errors[f"block {block} head {head}"] = relative_error(theirs[f"path {letter}"][:, block, head], mine)
        line(f"paths from the heads of block 0 to {letter}", errors)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="Python of an environment with transformer-lens")
    program = parser.parse_args().program
    with tempfile.TemporaryDirectory() as folder:
        good = True
        for name in MODELS:
            (Path(folder) / name).mkdir()
            good &= compare(name, program, Path(folder) / name)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
