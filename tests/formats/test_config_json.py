"""Choices that no config.json of a family expresses come back; contradictory ones are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import handgrad as hg
from conftest import perturb
from handgrad.ops.rope_scaling import Scaling

SMALL: dict[str, Any] = {"n_vocab": 29, "n_context": 24, "d_model": 16, "n_heads": 2, "n_blocks": 2}
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "a window in one block of Mistral": ("nano-llama", {"family": "mistral", "window": 3, "windowed": (0,)}),
    "a window in one block of Phi-3": ("nano-llama", {"family": "phi3", "window": 3, "windowed": (1,)}),
    "a window in Llama": ("nano-llama", {"window": 4}),
    "GPT-2 with rotary positions": ("nano", {"positions": "rotary", "rope_base": 50.0}),
    "GPT-2 with RMSNorm": ("nano", {"norm": "rms"}),
    "GPT-2 with grouped queries": ("nano", {"n_kv_heads": 1}),
    "Llama with LayerNorm": ("nano-llama", {"norm": "layer"}),
    "Llama with one unrotated block": ("nano-llama", {"unrotated": (1,)}),
    "Llama with biases of q, k and v only": ("nano-llama", {"qkv_bias": True}),
    "the default width": ("nano-llama", {"d_hidden": None}),
    "yarn": ("nano-llama", {"rope_scaling": Scaling("yarn", 2.0, 12)}),
    "not causal": ("nano-llama", {"causal": False}),
    "other scores": ("nano-llama", {"attention_scale": 0.4, "score_cap": 2.0, "sinks": True, "n_kv_heads": 1}),
    "GPT-2 with sinks": ("nano", {"sinks": True, "window": 4, "windowed": (1,)}),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.some_cases(6)
def test_saved_choices_come_back(name: str, tmp_path: Path) -> None:
    preset, changes = ODD[name]
    model = hg.GPT(hg.preset(preset, **{**SMALL, **changes}), seed=1, dtype="float64")
    perturb(model)
    hg.save(model, tmp_path / "m")
    tokens = torch.arange(20)[None] % 29
    opened = hg.load(tmp_path / "m")
    assert torch.equal(opened.logits(tokens), model.logits(tokens))
    assert hg.verify(opened, tokens[:, :6], tokens[:, 1:7]).passed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unrotated": 3}, "unrotated must be a tuple of blocks"),
        ({"unrotated": (2,)}, "unrotated must be a tuple of blocks from 0 to 1"),
        ({"windowed": (0,)}, "give window as well"),
        ({"family": []}, "unknown family"),
        ({"rope_scaling": None}, "rope_scaling must be a Scaling"),
        ({"rope_scaling": Scaling("su", 2.0)}, "rope_scaling must be a Scaling"),
        ({"rope_scaling": Scaling("llama3", 8.0)}, "needs original_max_position_embeddings"),
        ({"rope_scaling": Scaling("llama3", 8.0, 16, 4.0, 4.0)}, "high_freq_factor must be larger"),
        ({"rope_base": 1.0}, "rope_base must be a number above 1"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 does not divide"),
        ({"gated": False, "activation": "gelu"}, "gated=False does not fit the family llama"),
        ({"qk_norm": True}, "has no name for attn.q_norm"),
        ({"window": 3, "causal": False}, "a window needs a causal model"),
        ({"attention_scale": 0}, "attention_scale must be a number from 1e-6 to 1e6, not 0"),
        ({"score_cap": float("nan")}, "score_cap must be a number"),
        ({"score_cap": True}, "score_cap must be a number"),
        ({"sinks": 1}, "sinks must be true or false"),
    ],
)
def test_contradictory_choices_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        hg.preset("nano-llama", **{**SMALL, **changes})
