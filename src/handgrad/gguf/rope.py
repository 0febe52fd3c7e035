"""Rotary frequencies: the metadata and tables of a GGUF file → Hugging Face's `rope_parameters`."""

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import HandgradError
from .file import GGUFFile, dequantize
from .metadata import Metadata


def rope_of(given: Metadata, d_head: int) -> dict[str, Any]:
    """Hugging Face's `rope_parameters`."""
    base = given.number("rope.freq_base", 10_000.0)
    kind = given.text("rope.scaling.type", "none")
    factor = given.factor("rope.scaling.factor") * given.factor("rope.scale_linear")
    if "rope_factors_long.weight" in given.file.tensors:
        return _longrope(given, base)
    only_yarn = ("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor") if kind == "yarn" else ()
    for key in ("rope.scaling.attn_factor", *only_yarn):
        if given.factor(key) != 1:
            given.refuse(key, "only 1 is supported")
    table = given.file.tensors.get("rope_freqs.weight")
    if table is not None:
        if kind != "none":
            given.refuse("rope.scaling.type", "and there is a rope_freqs.weight too; only one of them is supported")
        return _llama3(given.file, dequantize(table).double().flatten(), d_head, base)
    unscaled = {"rope_type": "default", "rope_theta": base}
    if kind in ("none", "linear"):
        return unscaled if factor == 1 else {"rope_type": "linear", "rope_theta": base, "factor": factor}
    if kind != "yarn":
        given.refuse("rope.scaling.type", "only none, linear and yarn are supported, and longrope with its tables")
    return {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": factor,
        "original_max_position_embeddings": given.integer("rope.scaling.original_context_length", "n_context"),
        "beta_fast": given.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": given.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _longrope(given: Metadata, base: float) -> dict[str, Any]:
    tables = {name: given.file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short")}
    if any(table is None for table in tables.values()):
        raise HandgradError(f"{given.file.path} has only one of rope_factors_long.weight and rope_factors_short.weight")
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "original_max_position_embeddings": given.integer("rope.scaling.original_context_length", "n_context"),
        "attention_factor": given.factor("rope.scaling.attn_factor"),
        **{f"{name}_factor": dequantize(x).flatten().tolist() for name, x in tables.items() if x is not None},
    }


def _llama3(file: GGUFFile, divisors: Tensor, d_head: int, base: float) -> dict[str, Any]:
    """The llama3 scaling that divides the frequencies θ_i by these numbers.

    With s_i = (n θ_i/2π − 1)/(4 − 1) clamped to [0, 1], the divisors are 1/((1 − s_i)/f + s_i): f is the largest, and each
    one between 1 and f gives n, the context trained on. The factors 1 and 4 are those of every published model."""
    low, high = 1.0, 4.0
    theta = base ** (-torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    if len(divisors) == len(theta) and divisors.isfinite().all() and divisors.min() >= 1:
        f = float(divisors.max())
        between = (divisors > 1) & (divisors < f)
        share = (1 / divisors[between] - 1 / f) / (1 - 1 / f)
        estimates = 2 * math.pi * (share * (high - low) + low) / theta[between]
        n = round(float(estimates.median())) if len(estimates) else 8192
        s = ((n * theta / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        if torch.allclose(divisors, 1 / ((1 - s) / f + s), rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "rope_theta": base,
                "factor": f,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": n,
            }
    raise HandgradError(
        f"{file.path}: rope_freqs.weight is not that of Llama 3's scaling, which is the only one supported"
    )
