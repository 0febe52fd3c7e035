"""Adapter folders with damaged or missing parts, and folders that are not adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import handgrad as hg
from handgrad import lora
from handgrad.files.manifest import FILE
from handgrad.lora.peft import ranks_of


def small_model() -> hg.GPT:
    config = hg.preset("nano", n_vocab=31, n_context=16, d_model=8, n_heads=2, n_blocks=2)
    return hg.GPT(config, dtype=torch.float64)


def damaged_adapter(tmp_path: Path, change: Any) -> Path:
    """Save an adapter without a manifest and apply `change` to its folder."""
    model = small_model()
    lora.inject(model, 2, dora=True)
    lora.save(model, tmp_path / "adapter")
    (tmp_path / "adapter" / FILE).unlink()  # as an adapter written by another tool
    change(tmp_path / "adapter")
    return tmp_path / "adapter"


def edit_config(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def edit_tensors(edit: Any) -> Any:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = folder / "adapter_model.safetensors"
        tensors = {k: v.clone() for k, v in load_file(file).items()}
        edit(tensors)
        save_file(tensors, file)

    return change


HEAD = "base_model.model.lm_head.weight"
BIAS = "base_model.model.transformer.ln_f.bias"
LORA_A = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json is not valid JSON"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "object"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x10" * 40), "adapter_model.safetensors"),
        (edit_config(peft_type="LOHA"), "LOHA"),
        (edit_config(bias="all"), "bias is missing, which an adapter with bias=all trains"),
        (edit_config(bias="some"), "lora_only"), (edit_config(bias=["all"]), "lora_only"),
        (edit_tensors(lambda t: t.update({BIAS: torch.zeros(8)})), "does not list in"),
        (edit_config(lora_bias=True), "lora_bias"),
        (edit_config(r=3), "lora_A of transformer.h.0.attn.c_attn is (2, 8)"), (edit_config(r="x"), "rank"),
        (edit_config(rank_pattern=[1]), "rank_pattern must be a dict"),
        (edit_config(init_lora_weights="pissa_niter_4"), "pissa"),
        (edit_config(modules_to_save=["ln_f"]), "ln_f"), (edit_config(modules_to_save="ln_f"), "list"),
        (edit_config(use_dora=False), "use_dora"), (edit_config(alpha_pattern={"c_attn": "x"}), "alpha"),
        (edit_tensors(lambda t: t.pop(LORA_A)), "lora_B only"),
        (edit_tensors(lambda t: t.pop(LORA_A.replace("lora_A.weight", "lora_magnitude_vector"))), "missing"),
        (edit_tensors(lambda t: t.update({LORA_A: torch.zeros(2, 9)})), "(2, 9)"),
        (edit_tensors(lambda t: t.update({LORA_A: torch.zeros(2, 8, dtype=torch.int32)})), "int32"),
        (edit_tensors(lambda t: t.update({LORA_A.replace("h.0", "h.7"): torch.zeros(2, 8)})), "transformer.h.7.attn.c_attn"),
        (edit_tensors(lambda t: t.update({"weight": torch.zeros(2)})), "base_model.model."),
        (edit_tensors(lambda t: t.update({HEAD: torch.zeros(3, 8)})), "lm_head.weight is (3, 8)"),
        (edit_tensors(lambda t: t.update({HEAD: torch.zeros(31, 8)})), "does not list in"),
        (edit_tensors(lambda t: t.update({"base_model.model.transformer.wte.lora_embedding_A": torch.zeros(3, 8)})), "wte"),
        (edit_tensors(lambda t: t.clear() or t.update({HEAD: torch.zeros(31, 8)})), "no low-rank"),
    ],
)  # fmt: skip
def test_broken_adapter_is_rejected_and_leaves_the_model_unchanged(tmp_path: Path, change: Any, message: str) -> None:
    folder = damaged_adapter(tmp_path, change)
    model = small_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(hg.HandgradError) as error:
        lora.load(model, folder)
    assert message in str(error.value) and str(folder) in str(error.value)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == dict.fromkeys(before, True)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(("bias", "count"), [("all", 2 * (8 + 24 + 8 + 8 + 32 + 8) + 8), ("lora_only", 2 * 24)])
def test_biases_are_planned_and_written(bias: str, count: int, tmp_path: Path) -> None:
    model = small_model()
    lora.inject(model, 2, targets="c_attn", bias=bias)
    lora.save(model, tmp_path / "a")
    factors = 2 * 2 * (8 + 24)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == factors + count
    assert ranks_of(tmp_path / "a", model.config) == (dict.fromkeys(lora.adapters_of(model), 2), count)
    again = small_model()
    lora.load(again, tmp_path / "a")
    assert again.adapter.bias == bias
    trained = [{n for n, p in x.named_parameters() if p.requires_grad} for x in (again, model)]
    assert trained[0] == trained[1]


def test_biases_of_a_model_without_any_are_not_asked_for() -> None:
    model = hg.GPT(hg.preset("nano-llama", n_blocks=1))
    with pytest.raises(hg.HandgradError, match="bias=all trains nothing"):
        lora.inject(model, 2, bias="all")
    assert all(p.requires_grad for p in model.parameters())


def test_save_does_not_overwrite_other_folders(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("user data")
    model = small_model()
    with pytest.raises(hg.HandgradError, match="no adapter"):
        lora.save(model, tmp_path / "new")
    lora.inject(model, 2)
    with pytest.raises(hg.HandgradError, match="choose another path"):
        lora.save(model, tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_base_model_that_a_file_names_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what was downloaded before is used; a name that the user gives is downloaded."""
    asked: list[bool] = []

    def download(name: str, *, local_files_only: bool = False, **_: object) -> str:
        asked.append(local_files_only)
        if local_files_only and len(asked) == 1:
            raise OSError("not in the cache")
        return str(tmp_path / "m")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = small_model()
    hg.save(model, tmp_path / "m")
    hg.lora.inject(model, rank=2)
    model.source = "someone/else"
    hg.lora.save(model, tmp_path / "a")
    with pytest.raises(hg.HandgradError, match="Nothing is downloaded because a file names it"):
        hg.load(tmp_path / "a")
    hg.load(tmp_path / "a")
    assert all(asked)
    hg.load("someone/else")
    assert not asked[-1]
