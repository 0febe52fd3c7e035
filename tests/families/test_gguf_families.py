"""Every member of a family that GGUF has names for: written, read again by our reader, and equal; or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from members import DISTINCT, MEMBERS, PLAIN, SIZES, family_of, transformers_model

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.families import FAMILIES
from handgrad.formats.gguf_out import write_gguf
from handgrad.gguf.architectures import ARCHITECTURES
from handgrad.text.tokenizer import make

SIZE: dict[str, Any] = {"vocab_size": 259}  # three rows more than the tokenizer has ids
# Members that llama.cpp would compute otherwise, and what the message names.
REFUSED = {
    "gpt2, untied, erf": "activation",
    "llama, gelu gate": "activation",
    "llama, tanh gate": "activation",
    "llama, yarn with options": "rope_scaling",
    "qwen2, yarn": "attn_factor",
    "qwen2, window": "sliding_window",
    "qwen2, windows by layer": "sliding_window",
    "qwen3, window": "sliding_window",
    "smollm3, window": "sliding_window",
    "qwen3, biases": "attn_output.bias",
    "smollm3, biases": "attn_output.bias",
    "smollm3, llama3": "rope_freqs.weight",
    "smollm3, layers unrotated by list": "unrotated",
    "smollm3, no layer rotated": "unrotated",
    "smollm3, biases, unrotated": "attn_output.bias",
    **{f"{name}, biases": "q_proj.bias" for name in ("gemma2", "gemma3_text", "olmo2", "olmo3", "cohere", "cohere2")},
    **{f"{name}, 3 queries to a key": "with output.weight" for name in ("gemma2", "cohere", "cohere2")},
    **{f"{name}, {n} queries to a key": "without output.weight" for name in ("olmo2", "olmo3") for n in (1, 9)},
    **{f"gemma2, {x}": "attention_scale" for x in ("1 queries to a key", "9 queries to a key", "window")},
    **{f"gemma3_text, {n} queries to a key": "attention_scale" for n in (1, 3, 9)},
    "gemma3_text, window": "attention_scale",
    "gemma3_text, linear": "attention_scale",
    "llama, dynamic": 'is "dynamic"',
    "olmo3, window": "rope_scaling",
    "olmo3, 3 queries to a key": "rope_scaling",
    **{f"exaone4, {n} queries to a key": "window" for n in (1, 3, 9)},
    "exaone4, window": "window",
    "exaone4, default pattern, llama3": "window",
    **{f"nemotron, {n} queries to a key": "without output.weight" for n in (1, 9)},
    "nemotron, llama3": "rope_freqs.weight",
    "lfm2, biases, four taps": "conv.bias",
    "lfm2, no attention": "n_kv_heads",
    "lfm2, one tap": "two taps or more",
    "lfm2, no convolution": "two taps or more",
    "lfm2, llama3": "rope_freqs.weight",
    **{
        f"{name}, {n} queries to a key": "without output.weight"
        for name in ("qwen2_moe", "olmoe", "dots1", "gpt_oss")
        for n in (1, 9)
    },
    **{f"{name}, 3 queries to a key": "keys of its own" for name in ("olmoe", "dots1")},
    **{f"{name}, window": "sliding_window" for name in ("qwen2_moe", "dots1")},
    **{f"{name}, biases": "attn_output.bias" for name in ("qwen3_moe", "olmoe", "dots1")},
    **{f"{name}, normalized, some blocks dense": "has no name for .*mlp" for name in ("qwen2_moe", "qwen3_moe")},
    "qwen2_moe, windows by layer": "sliding_window",
    "gpt_oss, yarn": "attn_factor",
    "gpt_oss, without biases of attention": "needs .*q_proj.bias",
}
# What the members of a family have so that llama.cpp opens them.
OPENED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {"num_key_value_heads": 9},
    "dots1": {"num_key_value_heads": 9},
}
# with untied and with tied tables: some architectures have no name for a head
WRITTEN = [
    name for name in MEMBERS
    if name in DISTINCT or name in PLAIN.values() or name.endswith(", 1 queries to a key")
]  # fmt: skip
CLASSES = {"GraniteMoeHybridForCausalLM"}
TABLES = [x for table in ARCHITECTURES.values() for x in (table, table.mixture) if x is not None]
for architecture in TABLES:
    CLASSES |= {architecture.model_class, *(architecture.windowed or ())[:1]}


def saved(name: str, folder: Path) -> Path:
    """The member with a tokenizer, and with a width that llama.cpp opens."""
    changes = {**SIZE, **OPENED.get(family_of(name), {}), **MEMBERS[name]}
    ours = FAMILIES[family_of(name)].architecture
    if any(a.whole_width and ours in (a.model_class, *(a.windowed or ())[:1]) for a in TABLES):
        member = MEMBERS[name]
        changes["hidden_size"] = member.get("head_dim", SIZES["d_rho"]) * member.get(
            "num_attention_heads", SIZES["n_heads"]
        )
    transformers_model(name, **changes).float().save_pretrained(folder)
    make("bytes", []).write(folder)
    return folder


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.some_cases(8)
def test_every_member_comes_back_or_is_refused(name: str, tmp_path: Path) -> None:
    folder, out = saved(name, tmp_path / "model"), tmp_path / "out.gguf"
    reason = REFUSED.get(name)
    if FAMILIES[family_of(name)].architecture not in CLASSES:
        reason = "has no known names"
    if reason is not None:
        with pytest.raises(HandgradError, match=reason):
            write_gguf(str(folder), out)
        assert not out.exists() and not list(tmp_path.glob(".handgrad-*"))
        return
    write_gguf(str(folder), out)
    model, again = hg.load(folder, dtype="float32"), hg.load(out)
    expected = dict(model.named_parameters())
    found = dict(again.named_parameters())
    if family_of(name) == "granitemoehybrid":  # comes back as Granite, with gate and expansion apart
        assert again.config.family == "granite"
    else:
        assert expected.keys() == found.keys()
        for key, p in expected.items():
            # 1 + w has the digits of w above 2⁻²⁴
            rounded = 1.2e-7 * (1 + p.abs()) if model.config.gain_offset and "norm" in key else 0
            assert ((p - found[key]).abs() <= rounded).all(), key
    tokens = torch.randint(259, (2, 12), generator=torch.Generator().manual_seed(0))
    logits, same = model.logits(tokens), again.logits(tokens)
    assert (logits - same).abs().max() <= 1e-6 * logits.abs().max()


def test_heads_wider_than_the_model_are_refused_where_llama_cpp_does(tmp_path: Path) -> None:
    transformers_model("qwen2, 1 queries to a key", **SIZE).float().save_pretrained(tmp_path / "model")
    make("bytes", []).write(tmp_path / "model")
    with pytest.raises(
        HandgradError, match="only if all heads together are as wide as the model, and they have 36 and 18"
    ):
        write_gguf(str(tmp_path / "model"), tmp_path / "out.gguf")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_a_member(name: str) -> None:
    families = [f.name for f in FAMILIES.values() if f.architecture == ARCHITECTURES[name].model_class]
    written = [member for member in WRITTEN if family_of(member) in families and member not in REFUSED]
    assert written, f"no member in tests/families/members.py shows that files of the architecture {name} are written"


def test_minicpm_is_written_as_granite(tmp_path: Path) -> None:
    plain = {"qkv_bias": False, "out_bias": False, "activation": "silu", "residual_scale": 0.3, "logit_scale": 0.25}
    sizes = {
        "n_vocab": 259,
        "n_context": 64,
        "d_model": 16,
        "n_heads": 2,
        "n_kv_heads": 1,
        "d_hidden": 20,
        "n_blocks": 2,
    }
    fixed = {**FAMILIES["minicpm"].fixed, **plain, **sizes, "embedding_scale": 12.0}
    model = hg.GPT(hg.ModelConfig(family="minicpm", **fixed), seed=0)
    hg.save(model, tmp_path / "model")
    make("bytes", []).write(tmp_path / "model")
    write_gguf(str(tmp_path / "model"), tmp_path / "out.gguf")
    again = hg.load(tmp_path / "out.gguf")
    tokens = torch.arange(12)[None]
    logits, same = model.logits(tokens), again.logits(tokens)
    assert again.config.family == "granite"
    assert (logits - same).abs().max() <= 1e-6 * logits.abs().max()
