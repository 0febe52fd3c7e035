"""Several adapters of one base in one batch: each sequence gets what it would get with its adapter loaded alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import handgrad as hg
from conftest import make_model, save_adapter
from handgrad.files import manifest
from handgrad.inference.engine import Engine, Options
from handgrad.lora.named import NamedAdapters, groups, load_named, selected

SHAPE = {"n_blocks": 2, "n_context": 64}
KINDS = {
    "plain": {"rank": 2, "targets": ("c_attn", "mlp.c_proj")},
    "head": {"rank": 3, "targets": ("lm_head", "c_fc"), "rslora": True},
    "dora": {"rank": 2, "dora": True},
}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Adapters of different kinds, with factors far from zero, for one base."""
    for i, (name, options) in enumerate(KINDS.items()):
        save_adapter(make_model(**SHAPE), tmp_path / name, i, **options)
    return {name: tmp_path / name for name in KINDS}


def alone(folder: Path | None) -> hg.GPT:
    model = make_model(**SHAPE)
    if folder is not None:
        hg.lora.load(model, folder)
    return model


PROMPT = list(range(10)) * 2 + [3]  # long enough that prompts of one adapter share their beginning


@pytest.mark.parametrize("cache", [True, False])
def test_rows_of_different_adapters_share_a_pass(folders: dict[str, Path], cache: bool) -> None:
    model = make_model(**SHAPE)
    load_named(model, folders)
    engine = Engine(model, cache=cache, tokens_at_once=50)  # prompts take several steps
    names = [None, "plain", "head", "plain", "dora", None, "head"]
    prompts = [PROMPT[: 18 + i % 3] for i in range(len(names))]
    options = [Options(6, logprobs=3, prompt_logprobs=i % 3 == 0, adapter=name) for i, name in enumerate(names)]
    found = [engine.add(prompt, option) for prompt, option in zip(prompts, options, strict=True)]
    while engine.busy:
        engine.step()
    outputs = set()
    for sequence, name, prompt in zip(found, names, prompts, strict=True):
        judge = alone(None if name is None else folders[name])
        ids = torch.tensor(sequence.ids)
        expected = torch.log_softmax(judge.logits(ids[None])[0], 1)
        assert sequence.new == expected[len(prompt) - 1 : -1].argmax(1).tolist()
        for t, logprob in enumerate(sequence.logprobs, len(prompt)):
            assert logprob.logprob == pytest.approx(expected[t - 1, ids[t]].item(), abs=1e-10)
        for t, logprob in enumerate(sequence.prompt_logprobs, 1):
            assert logprob.logprob == pytest.approx(expected[t - 1, ids[t]].item(), abs=1e-10)
        outputs.add(tuple(round(x.logprob, 6) for x in sequence.logprobs[:1]))
    assert len(outputs) >= 4, "the adapters must differ for this test to mean anything"


def test_selected_is_the_adapter_alone(folders: dict[str, Path]) -> None:
    model = make_model(**SHAPE)
    load_named(model, folders)
    ids = torch.tensor([PROMPT])
    for name in (None, *folders):
        with selected(model, name):
            found = model.logits(ids)
        torch.testing.assert_close(
            found, alone(None if name is None else folders[name]).logits(ids), rtol=0, atol=1e-12
        )
    assert sum(isinstance(x, NamedAdapters) for x in model.modules()) > 1


def test_rows_of_each_adapter() -> None:
    assert groups([(None, 3)]) == ()
    assert groups([("a", 2), ("a", 1), (None, 1), ("b", 2)]) == (("a", slice(0, 3)), ("b", slice(4, 6)))
    ((name, rows),) = groups([("a", 2), (None, 3), ("a", 1)])
    assert name == "a" and isinstance(rows, torch.Tensor) and rows.tolist() == [0, 1, 5]


def test_what_cannot_be_loaded_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    save_adapter(make_model(d_model=24), tmp_path / "other")
    save_adapter(make_model(**SHAPE), tmp_path / "full", modules_to_save=("ln_f",))
    save_adapter(make_model(**SHAPE), tmp_path / "biases", bias="lora_only")
    model = make_model(**SHAPE)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for name, reason in (("other", "belongs to another model"), ("full", "modules_to_save"), ("biases", "bias=")):
        with pytest.raises(hg.HandgradError, match=reason):
            load_named(model, {**folders, name: tmp_path / name})
        assert {n: p.requires_grad for n, p in model.named_parameters()} == dict.fromkeys(before, True)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    head = model.head.plain().weight
    assert head is not None
    tensors = load_file(folders["head"] / "adapter_model.safetensors")
    (folders["head"] / manifest.FILE).unlink()  # as others write it
    for copied in (head.detach() + 1, head.detach().clone()):  # the second is this model's, and loads below
        tensors["base_model.model.lm_head.base_layer.weight"] = copied
        save_file(tensors, folders["head"] / "adapter_model.safetensors")
        if copied[0, 0] != head[0, 0]:
            with pytest.raises(hg.HandgradError, match=r"has its own lm_head\.weight"):
                load_named(model, folders)
    load_named(model, folders)
    with pytest.raises(hg.HandgradError, match="no adapter 'nobody'; loaded: plain, head, dora"):
        Engine(model).add([1], Options(adapter="nobody"))
    with pytest.raises(hg.HandgradError, match="has an adapter already"):
        load_named(alone(folders["plain"]), folders)
