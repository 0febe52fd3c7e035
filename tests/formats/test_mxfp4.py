"""gpt-oss's files in MXFP4: the numbers of transformers' own function, and what does not fit is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.formats.gguf_out import write_gguf
from handgrad.gguf.file import open_gguf
from handgrad.text.tokenizer import make

sys.path.append(str(Path(__file__).parents[1] / "families"))
from members import in_float64, their_logits, transformers_model

SIZES = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
D, F, E = 64, 96, 5
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def in_mxfp4(folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda tensors: None) -> dict[str, Tensor]:
    """Turn a saved gpt-oss to random experts in MXFP4. Returns the tensors as transformers unpacks them."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    unpacked = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows, columns = (2 * F, D) if "gate_up" in name else (D, F)
        blocks = torch.randint(256, (E, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, (E, rows, columns // 32), generator=generator, dtype=torch.uint8)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone())
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": CONFIG}))
    return unpacked


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    network = transformers_model("gpt_oss, 3 queries to a key", **SIZES, num_key_value_heads=2)
    network.bfloat16().save_pretrained(tmp_path / "model")
    make("bytes", []).write(tmp_path / "model")
    return tmp_path / "model"


def test_the_numbers_are_those_of_transformers(folder: Path) -> None:
    unpacked = in_mxfp4(folder)
    model = hg.load(folder)
    assert model.dtype == torch.bfloat16
    for name, p in model.named_parameters():
        where, inside, rest = name.partition(".experts.")
        if not inside:
            continue
        e, layer, kind = rest.split(".")
        stack = "down_proj" if layer == "down_proj" else "gate_up_proj"
        whole = unpacked[f"{where}.experts.{stack}{'_bias' if kind == 'bias' else ''}"][int(e)]
        columns = whole if stack == "down_proj" else whole[..., int(layer == "up_proj") :: 2]
        assert torch.equal(p, columns.t() if kind == "weight" else columns), name
    network = transformers_model("gpt_oss, 3 queries to a key", **SIZES, num_key_value_heads=2)
    network.load_state_dict({name: x.double() for name, x in unpacked.items()})
    tokens = torch.randint(259, (20,), generator=torch.Generator().manual_seed(1))
    expected = their_logits(in_float64(network), tokens, [20])
    found = hg.load(folder, dtype="float64").logits(tokens[None])[0]
    assert (found - expected).abs().max() <= 1e-8 * expected.abs().max()


def test_saved_again_it_is_in_bfloat16(folder: Path, tmp_path: Path) -> None:
    in_mxfp4(folder)
    model = hg.load(folder)
    hg.save(model, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    again = dict(hg.load(tmp_path / "saved").named_parameters())
    assert all(torch.equal(p, again[name]) for name, p in model.named_parameters())


def test_a_gguf_file_in_mxfp4_has_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    in_mxfp4(folder)
    written = write_gguf(str(folder), tmp_path / "out.gguf", "MXFP4")
    kinds = {name: stored.kind for name, stored in open_gguf(tmp_path / "out.gguf").tensors.items()}
    assert written.types["MXFP4"] == 6
    for name, kind in kinds.items():
        wide = name.endswith("bias") or "norm" in name or "sinks" in name or "ffn_gate_inp" in name
        assert kind == ("F32" if wide else "MXFP4" if "_exps" in name else "Q8_0"), name
    model, packed = hg.load(folder), hg.load(tmp_path / "out.gguf", packed=True)
    for (name, layer), other in zip(hg.lora.layers_of(model).items(), hg.lora.layers_of(packed).values(), strict=True):
        if ".experts." in name:
            assert other.packed.kind == "MXFP4" and torch.equal(layer.w.float(), other.w), name
    unpacked = hg.load(tmp_path / "out.gguf")
    tokens = torch.randint(259, (1, 20), generator=torch.Generator().manual_seed(1))
    assert torch.equal(packed.logits(tokens), unpacked.logits(tokens))


LAYER = "model.layers.0.mlp.experts.down_proj"
REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no scales": (lambda t: t.pop(f"{LAYER}_scales"), "_blocks has no tensor of scales"),
    "no blocks": (lambda t: t.pop(f"{LAYER}_blocks"), "_scales has no tensor of blocks"),
    "both forms": (lambda t: t.update({LAYER: torch.zeros(E, F, D)}), "is in the files as .*down_proj too"),
    "scales of other groups": (
        lambda t: t.update({f"{LAYER}_scales": torch.zeros(E, D, 4, dtype=torch.uint8)}), "and its scales .5, 64, 4.; expec",
    ),
    "blocks of another size": (
        lambda t: t.update({f"{LAYER}_blocks": torch.zeros(E, D, 3, 8, dtype=torch.uint8)}), "expected .experts, rows",
    ),
    "flat": (lambda t: t.update({f"{LAYER}_blocks": torch.zeros(7, dtype=torch.uint8)}), "expected .experts, rows"),
    "floats": (lambda t: t.update({f"{LAYER}_scales": torch.zeros(E, D, 3)}), "torch.float32, not bytes"),
    "another width": (
        lambda t: t.update(
            {f"{LAYER}_{x}": torch.zeros(E, D, 2, *n, dtype=torch.uint8) for x, n in (("blocks", [16]), ("scales", []))}
        ),
        "has shape .5, 64, 64.; config.json requires .5, 96, 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str, folder: Path) -> None:
    change, message = REFUSED[name]
    in_mxfp4(folder, change)
    with pytest.raises(HandgradError, match=message):
        hg.load(folder)


def test_other_quantized_files_are_refused(folder: Path) -> None:
    in_mxfp4(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(HandgradError, match=r"quantization_config is .*which this version does not implement"):
        hg.load(folder)
