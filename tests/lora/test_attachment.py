"""Adapters attached to and detached from a model in use: the base comes back bit for bit."""

from pathlib import Path

import pytest
import torch

import handgrad as hg
from conftest import make_model, save_adapter
from handgrad.lora.injection import adapters_of

IDS = torch.tensor([1, 5, 2, 9])


def base_in(folder: Path, seed: int = 0, **shape: object) -> hg.GPT:
    hg.save(make_model(seed, torch.float32, n_blocks=2, **shape), folder)
    return hg.load(folder)


OPTIONS: list[dict[str, object]] = [
    {},
    {"dora": True},
    {"modules_to_save": ["ln_f", "lm_head"]},
    {"modules_to_save": ["wte"]},
    {"bias": "all", "modules_to_save": ["ln_f"]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.some_cases(3)
def test_the_base_comes_back_exactly(options: dict[str, object], tied: bool, tmp_path: Path) -> None:
    model = base_in(tmp_path / "base", tied=tied)
    save_adapter(hg.load(tmp_path / "base"), tmp_path / "a", **options)
    before = {name: p.clone() for name, p in model.named_parameters()}
    config, logits = model.config, model.logits(IDS)
    for _ in range(2):
        attached = hg.lora.Attachment(model, tmp_path / "a")
        assert len(attached.layers) == 8
        assert torch.equal(model.logits(IDS), hg.load(tmp_path / "a").logits(IDS))
        assert not torch.equal(model.logits(IDS), logits)
        attached.detach()
        assert torch.equal(model.logits(IDS), logits)
        assert dict.fromkeys(before, True) == {n: torch.equal(p, before[n]) for n, p in model.named_parameters()}
        assert model.config == config and model.adapter is None and not adapters_of(model)
        assert all(p.requires_grad for p in model.parameters())
        assert (model.head.plain().weight is model.embed.weight) == tied


def test_low_bit_weights_stay_as_they_are(tmp_path: Path) -> None:
    base_in(tmp_path / "base", d_model=32, n_heads=2)
    save_adapter(hg.load(tmp_path / "base"), tmp_path / "a")
    save_adapter(hg.load(tmp_path / "base"), tmp_path / "b", modules_to_save=["lm_head"])
    model = hg.load(tmp_path / "base", bits=8)
    logits = model.logits(IDS)
    attached = hg.lora.Attachment(model, tmp_path / "a")
    assert torch.equal(model.logits(IDS), hg.load(tmp_path / "a", bits=8).logits(IDS))
    attached.detach()
    with pytest.raises(hg.HandgradError, match=r"b/adapter_model.safetensors replaces .*, which is packed"):
        hg.lora.Attachment(model, tmp_path / "b")
    assert torch.equal(model.logits(IDS), logits)


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model = base_in(tmp_path / "base")
    base_in(tmp_path / "same shape", seed=1)
    base_in(tmp_path / "other shape", d_model=24)
    save_adapter(hg.load(tmp_path / "same shape"), tmp_path / "b")
    save_adapter(hg.load(tmp_path / "other shape"), tmp_path / "c")
    logits = model.logits(IDS)
    with pytest.raises(hg.HandgradError, match=r"is an adapter of .*same shape, not of .*base"):
        hg.lora.Attachment(model, tmp_path / "b")
    (tmp_path / "other shape").rename(tmp_path / "moved")  # then only the shapes tell
    with pytest.raises(hg.HandgradError, match="belongs to another model"):
        hg.lora.Attachment(model, tmp_path / "c")
    with pytest.raises(hg.HandgradError, match="not an adapter directory"):
        hg.lora.Attachment(model, tmp_path / "base")
    assert torch.equal(model.logits(IDS), logits) and all(p.requires_grad for p in model.parameters())


def test_one_at_a_time(tmp_path: Path) -> None:
    model = base_in(tmp_path / "base")
    save_adapter(hg.load(tmp_path / "base"), tmp_path / "a")
    hg.lora.Attachment(model, tmp_path / "a")
    logits = model.logits(IDS)
    with pytest.raises(hg.HandgradError, match="detach it"):
        hg.lora.Attachment(model, tmp_path / "a")
    assert torch.equal(model.logits(IDS), logits)
