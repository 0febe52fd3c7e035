"""GGUF adapters, read back with the gguf package and applied as llama.cpp applies them."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import make_model
from handgrad import lora
from handgrad.errors import HandgradError
from handgrad.gguf import adapter
from handgrad.lora import gguf_export
from handgrad.ops import rotary
from handgrad.paper import rotary as literal

Q, K, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.k_proj", "model.layers.0.mlp.down_proj"
GGUF = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def factor(f_in: int, f_out: int, rank: int, scale: float = 2.0) -> tuple[Tensor, Tensor, float]:
    return torch.randn(f_in, rank), torch.randn(rank, f_out), scale


def read(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {t.name: torch.from_numpy(np.array(t.data)) for t in reader.tensors}


def added(path: Path, name: str) -> Tensor:
    """What llama.cpp adds to the matrix (f_out, f_in) of that name: alpha / rank · b a, the rank being b's."""
    fields, tensors = read(path)
    a, b = tensors[f"{name}.weight.lora_a"], tensors[f"{name}.weight.lora_b"]
    alpha = fields["adapter.lora.alpha"]
    assert isinstance(alpha, float)
    return (alpha / b.shape[1] if alpha else 1.0) * b.double() @ a.double()


def from_file_order(w: Tensor, heads: int) -> Tensor:
    """Rows of q or k as GGUF stores them for architecture llama → Hugging Face's"""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def test_fields_names_and_shapes(tmp_path: Path) -> None:
    path = tmp_path / "adapter.gguf"
    factors = {Q: factor(12, 18, 4), K: factor(12, 6, 4), DOWN: factor(20, 12, 4)}
    adapter.write(path, factors, "llama", 3, 1)
    fields, tensors = read(path)
    assert fields["general.type"] == "adapter"
    assert fields["general.architecture"] == "llama"
    assert fields["adapter.type"] == "lora"
    assert fields["adapter.lora.alpha"] == 8.0
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "blk.0.attn_q.weight.lora_a": (4, 12), "blk.0.attn_q.weight.lora_b": (18, 4),
        "blk.11.attn_k.weight.lora_a": (4, 12), "blk.11.attn_k.weight.lora_b": (6, 4),
        "blk.0.ffn_down.weight.lora_a": (4, 20), "blk.0.ffn_down.weight.lora_b": (12, 4),
    }  # fmt: skip
    assert all(t.dtype == torch.float32 for t in tensors.values())
    assert torch.equal(tensors["blk.0.ffn_down.weight.lora_b"], factors[DOWN][1].t())  # equal scales: unchanged
    assert [p.name for p in tmp_path.iterdir()] == ["adapter.gguf"]


@pytest.mark.parametrize(("architecture", "interleaved"), [("llama", True), ("smollm3", True), ("qwen2", False)])
def test_scores_are_those_of_our_model(tmp_path: Path, architecture: str, interleaved: bool) -> None:
    """q and k of a base in the file's order, with a and b applied as llama.cpp does and its form of rotation."""
    heads, kv_heads, d_rho, d, n = 6, 2, 4, 10, 5
    name_k = K.replace("11", "0")
    factors = {Q: factor(d, heads * d_rho, 3), name_k: factor(d, kv_heads * d_rho, 5, 0.5)}
    adapter.write(tmp_path / "a.gguf", factors, architecture, heads, kv_heads)
    x = torch.randn(n, d).double()
    positions, theta = torch.arange(n), rotary.frequencies(d_rho, 100.0, dtype=torch.float64)[0]
    scores = []
    for layout in ("ours", "file"):
        rotated = []
        for layer, h, name in ((Q, heads, "attn_q"), (name_k, kv_heads, "attn_k")):
            base = torch.randn(h * d_rho, d, generator=torch.Generator().manual_seed(h)).double()
            down, up, scale = factors[layer]
            if layout == "ours":
                y = x @ base.t() + scale * x @ down.double() @ up.double()
            else:
                if interleaved:
                    base = base.reshape(h, 2, d_rho // 2, d).swapaxes(1, 2).reshape(base.shape)
                y = x @ (base + added(tmp_path / "a.gguf", f"blk.0.{name}")).t()
            form = interleaved and layout == "file"
            each = [literal.forward(head, positions, theta, form) for head in y.view(n, h, d_rho).unbind(1)]
            rotated.append(torch.stack(each, 1))
        q, k = rotated
        scores.append(torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(heads // kv_heads, 1)))
    assert torch.allclose(*scores, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("rslora", [False, True])
def test_equal_to_peft_with_patterns(tmp_path: Path, rslora: bool) -> None:
    """Every layer's update with different ranks and alphas, against PEFT's."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3,
        head_dim=8, vocab_size=11, max_position_embeddings=16,
    )  # fmt: skip
    config = LoraConfig(
        r=4, lora_alpha=6, use_rslora=rslora, target_modules=list(GGUF),
        rank_pattern={"k_proj": 3, "layers.1.mlp.up_proj": 7}, alpha_pattern={"v_proj": 1, "down_proj": 16.5},
    )  # fmt: skip
    model = get_peft_model(LlamaForCausalLM(shape), config)
    factors, updates = {}, {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_B"):
            torch.nn.init.normal_(module.lora_B["default"].weight)
            layer = name.removeprefix("base_model.model.")
            down, up = (f["default"].weight.detach().t() for f in (module.lora_A, module.lora_B))
            factors[layer] = down, up, module.scaling["default"]
            updates[layer] = module.get_delta_weight("default").detach().double()
    path = tmp_path / "adapter.gguf"
    adapter.write(path, factors, "llama", 6, 3)
    assert len(updates) == 14
    for layer, update in updates.items():
        _, _, i, _, kind = layer.split(".")
        found = added(path, f"blk.{i}.{GGUF[kind]}")
        if kind in ("q_proj", "k_proj"):
            found = from_file_order(found, {"q_proj": 6, "k_proj": 3}[kind])
        assert (found - update).abs().max() <= 1e-6 * update.abs().max()


def test_a_branch_that_is_switched_off_adds_nothing(tmp_path: Path) -> None:
    adapter.write(tmp_path / "a.gguf", {DOWN: factor(4, 4, 2, 0.0)}, "qwen3", 2, 2)
    assert not added(tmp_path / "a.gguf", "blk.0.ffn_down").any()
    assert read(tmp_path / "a.gguf")[0]["adapter.lora.alpha"] != 0  # llama.cpp would take the scale 1


def test_other_dtypes_and_existing_files(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")
    down, up, scale = factor(4, 4, 2)
    adapter.write(path, {DOWN: (down.bfloat16(), up.double(), scale)}, "llama", 2, 2)
    tensors = read(path)[1]
    assert torch.equal(tensors["blk.0.ffn_down.weight.lora_a"], down.bfloat16().float().t())
    assert torch.equal(tensors["blk.0.ffn_down.weight.lora_b"], up.t())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gpt2"}, "architecture 'gpt2' are not supported; available: llama"),
        ({"factors": {}}, "no adapters to write"),
        ({"factors": {"lm_head": factor(4, 4, 2)}}, "no name for the layer 'lm_head'"),
        ({"factors": {"model.layers.0.self_attn.q_proj.base": factor(4, 4, 2)}}, "no name for the layer"),
        ({"factors": {Q: (torch.zeros(4, 2), torch.zeros(3, 4), 1.0)}}, r"expected \(f_in, r\) and \(r, f_out\)"),
        ({"factors": {Q: (torch.full((4, 2), torch.nan), torch.zeros(2, 4), 1.0)}}, "not finite"),
        ({"n_heads": 3}, "4 outputs do not divide into 3 heads"),
    ],
)
def test_refused_by_name_and_nothing_is_written(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")
    arguments = {"factors": {Q: factor(4, 4, 2)}, "architecture": "llama", "n_heads": 2, "n_kv_heads": 2} | change
    with pytest.raises(HandgradError, match=message):
        adapter.write(path, **arguments)  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(HandgradError, match="does not exist"):
        adapter.write(tmp_path / "missing" / "a.gguf", {Q: factor(4, 4, 2)}, "llama", 2, 2)


def test_what_a_file_cannot_hold_is_refused_before_training() -> None:
    model = make_model(family="llama", norm="rms", positions="rotary", gated=True, activation="silu")
    lora.inject(model, rank=2, alpha=3)
    gguf_export.check(model)
    lora.remove(model)
    lora.inject(model, rank=2, modules_to_save=["model.norm"])
    with pytest.raises(HandgradError, match=r"cannot hold model.norm, trained in full \(modules_to_save\)"):
        gguf_export.check(model)
    lora.remove(model)
    lora.inject(model, rank=2, bias="all")
    with pytest.raises(HandgradError, match="cannot hold biases"):
        gguf_export.check(model)
    lora.remove(model)
    lora.inject(model, rank=2, dora=True)
    with pytest.raises(HandgradError, match="cannot hold DoRA's magnitude of"):
        gguf_export.check(model)
    model = make_model()
    lora.inject(model, rank=2)
    with pytest.raises(HandgradError, match="architecture 'gpt2' are not supported; available: llama"):
        gguf_export.check(model)
