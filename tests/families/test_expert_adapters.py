"""LoRA on experts, exchanged with PEFT: what it writes for stacked experts, and what it reads of ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from members import LENGTHS, LIMIT, batch, from_folder, in_float64, opened, their_logits
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file

import handgrad as hg
from conftest import perturb
from handgrad.display.run_progress import Silent
from handgrad.errors import HandgradError
from handgrad.proof.oracles import relative_error
from handgrad.text import tokenizer
from handgrad.training import finetune
from handgrad.training.config import FinetuneOptions
from handgrad.training.distributed import Ranks

MIXTURES = [
    "mixtral, 3 queries to a key", "qwen3_moe, normalized, some blocks dense", "olmoe, 1 queries to a key", "dots1, groups",
    "gpt_oss, 3 queries to a key", "qwen2_moe, normalized, some blocks dense",
]  # fmt: skip
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]


def in_float64_again(theirs: Any) -> Any:
    """PEFT has copied modules, with forward passes that `in_float64` has bound to the original."""
    for module in theirs.modules():
        vars(module).pop("forward", None)
    return in_float64(theirs)


pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about names


@pytest.mark.parametrize(
    "patterns", [{}, {"rank_pattern": {"down_proj": 5}, "alpha_pattern": {"gate_up_proj": 9}}], ids=str
)
@pytest.mark.parametrize("name", MIXTURES)
def test_we_load_pefts_adapter_of_stacked_experts(name: str, patterns: dict[str, object], tmp_path: Path) -> None:
    base, ours = opened(name, tmp_path / "m")
    options = LoraConfig(
        r=3, lora_alpha=5, target_modules=ATTENTION, target_parameters=STACKED, task_type="CAUSAL_LM", **patterns
    )
    theirs = get_peft_model(base, options).double().eval()
    perturb(theirs, seed=5)
    theirs.save_pretrained(tmp_path / "adapter")
    hg.lora.load(ours, tmp_path / "adapter")
    tokens, _ = batch()
    assert relative_error(ours.logits(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS)) <= LIMIT

    hg.lora.save(ours, tmp_path / "again")
    again = hg.load(tmp_path / "m", dtype="float64")
    hg.lora.load(again, tmp_path / "again")
    assert torch.equal(again.logits(tokens, LENGTHS), ours.logits(tokens, LENGTHS))


OF_ROUTERS = {"targets": ("all-linear", "gate"), "dropout": 0.1, "rslora": True}
# members and what `inject` is given, beside rank and alpha
OURS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in MIXTURES),
    (MIXTURES[0], OF_ROUTERS | {"rank_pattern": {"w2": 2, "q_proj": 4}, "alpha_pattern": {"v_proj": 7, "gate": 9}}),
    (MIXTURES[3], OF_ROUTERS | {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"gate": 9}}),
    (MIXTURES[4], {"targets": ("o_proj", r".*experts\.[13]\.up_proj"), "modules_to_save": ("router",)}),
    (MIXTURES[5], {"targets": ("q_proj", "mlp.down_proj", "shared_expert.up_proj"), "modules_to_save": ("gate",)}),
]


@pytest.mark.parametrize(("name", "options"), OURS, ids=str)
def test_peft_loads_our_adapters(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """PEFT computes the same, and we read back the same factors."""
    _, ours = opened(name, tmp_path / "m")
    hg.lora.inject(ours, rank=3, alpha=5, **options)
    perturb(ours)
    hg.lora.save(ours, tmp_path / "adapter")
    tokens, _ = batch()
    expected = ours.logits(tokens, LENGTHS)
    theirs = in_float64_again(PeftModel.from_pretrained(from_folder(tmp_path / "m"), tmp_path / "adapter").eval())
    assert relative_error(their_logits(theirs, tokens, LENGTHS), expected) <= LIMIT

    again = hg.load(tmp_path / "m", dtype="float64")
    hg.lora.load(again, tmp_path / "adapter")
    assert again.adapter.dropout == ours.adapter.dropout
    written, read = hg.lora.adapters_of(ours), hg.lora.adapters_of(again)
    assert list(written) == list(read)
    for layer, adapter in written.items():
        assert torch.equal(adapter.down, read[layer].down) and torch.equal(adapter.up, read[layer].up)
        assert adapter.scale == read[layer].scale


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dora": True}, "PEFT has no DoRA for .* of a mixture"), ({"rank_pattern": {"w1": 2}}, "one scale for all of")],
)
def test_adapters_that_peft_cannot_hold_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, ours = opened(MIXTURES[0], tmp_path / "m")
    hg.lora.inject(ours, rank=3, **options)
    with pytest.raises(HandgradError, match=message):
        hg.lora.save(ours, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_finetune_says_what_peft_does_not_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a step is computed: DoRA of experts could not be saved, and a factor that PEFT shares is trained twice."""
    opened(MIXTURES[0], tmp_path / "m", vocab_size=259)
    tokenizer.make("bytes", []).write(tmp_path / "m")
    (tmp_path / "data.jsonl").write_text('{"text": "some text"}\n' * 4)
    options = LoraConfig(r=2, target_modules=[], target_parameters=STACKED)
    get_peft_model(from_folder(tmp_path / "m"), options).save_pretrained(tmp_path / "a")
    said: list[str] = []
    monkeypatch.setattr(Silent, "say", lambda _, text: said.append(text))

    def prepare(**options: Any) -> None:
        given = {"data": (str(tmp_path / "data.jsonl"),), "steps": 1, **options}
        finetune.prepare(FinetuneOptions.parse(given), Ranks(), Silent(Console()))

    with pytest.raises(HandgradError, match="PEFT has no DoRA for"):
        prepare(model=str(tmp_path / "m"), rank=2, dora=True)
    prepare(model=str(tmp_path / "m"), rank=2)
    assert not any("PEFT" in text for text in said)
    prepare(model=str(tmp_path / "a"))
    assert any("one factor A for gate and up" in text for text in said)


# PEFT's names; a rank or alpha of "gate" is not that of the parameter gate.weight
THEIRS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear", "alpha_pattern": {"gate": 9}},
    "router": {"target_modules": [*ATTENTION, "gate"], "rank_pattern": {"q_proj": 2}},
    "router in full": {"target_modules": ATTENTION, "modules_to_save": ["mlp.gate"]},
}


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("name", [MIXTURES[0], MIXTURES[4]])
def test_we_load_pefts_adapters_of_routers(name: str, kind: str, tmp_path: Path) -> None:
    base, ours = opened(name, tmp_path / "m")
    router = "router" if name.startswith("gpt_oss") else "gate"
    options = json.loads(json.dumps(THEIRS[kind]).replace('gate"', f'{router}"'))
    if kind == "router" and name.startswith("gpt_oss"):  # which PEFT does not find by its name
        options |= {"target_modules": ATTENTION, "target_parameters": [f"{router}.weight"]}
    theirs = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **options)).eval()
    perturb(in_float64_again(theirs), seed=5)
    theirs.save_pretrained(tmp_path / "adapter")
    hg.lora.load(ours, tmp_path / "adapter")
    tokens, _ = batch()
    assert relative_error(ours.logits(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS)) <= LIMIT


@pytest.mark.parametrize("name", MIXTURES)
def test_merged_experts(name: str, tmp_path: Path) -> None:
    base, ours = opened(name, tmp_path / "m")
    theirs = get_peft_model(base, LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=STACKED)).double()
    perturb(theirs, seed=5)
    theirs.save_pretrained(tmp_path / "adapter")
    hg.lora.load(ours, tmp_path / "adapter")
    hg.lora.merge(ours)
    hg.save(ours, tmp_path / "merged")
    merged, expected = from_folder(tmp_path / "merged").state_dict(), theirs.merge_and_unload().state_dict()
    for tensor in expected:
        assert relative_error(merged[tensor], expected[tensor]) <= LIMIT, tensor


def test_factors_of_another_number_of_experts_are_refused(tmp_path: Path) -> None:
    base, ours = opened(MIXTURES[0], tmp_path / "m")
    theirs = get_peft_model(base, LoraConfig(r=2, target_modules=[], target_parameters=STACKED))
    theirs.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, x in tensors.items():
        tensors[name] = x[:-1].contiguous() if "lora_A" in name else x[:, :-1].contiguous()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(HandgradError, match="do not fit the 5 experts of this model"):
        hg.lora.load(ours, tmp_path / "adapter")
