"""LoRA on experts, exchanged with PEFT: what it writes for stacked experts, and what it reads of ours."""

from pathlib import Path

import pytest
import torch
from members import LENGTHS, LIMIT, batch, from_folder, opened, their_logits
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import handgrad as hg
from conftest import perturb
from handgrad.errors import HandgradError
from handgrad.proof.oracles import relative_error

MIXTURES = [
    "mixtral, 3 queries to a key", "qwen3_moe, normalized, some blocks dense", "olmoe, 1 queries to a key", "dots1, groups",
]  # fmt: skip
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]

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


@pytest.mark.parametrize("name", MIXTURES)
def test_peft_loads_our_adapter_of_every_expert(name: str, tmp_path: Path) -> None:
    _, ours = opened(name, tmp_path / "m", **({"mlp_only_layers": []} if name.startswith("qwen") else {}))
    if name.startswith("dots"):
        pytest.skip("PEFT takes the layers of shared experts and dense blocks for stacked ones")
    names = [x for x in hg.lora.layers_of(ours) if "self_attn" in x or ".experts." in x]
    hg.lora.inject(ours, rank=3, alpha=5, targets=names)
    perturb(ours)
    hg.lora.save(ours, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(from_folder(tmp_path / "m"), tmp_path / "adapter").eval()
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
