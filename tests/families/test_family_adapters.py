"""LoRA adapters of every family, exchanged with PEFT in both directions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from members import (
    LENGTHS,
    LIMIT,
    TYPICAL,
    assert_equal_gradients,
    batch,
    family_of,
    from_folder,
    in_float64,
    linear_layers,
    opened,
    their_gradients,
    their_logits,
    their_tensors,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import handgrad as hg
from conftest import perturb
from handgrad.proof.oracles import relative_error

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "dora": {"use_dora": True}}

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT warns about names of GPT-2's layers and about DoRA


def layers_of(name: str) -> list[str]:
    return linear_layers(family_of(name))


def factors(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PEFT's parameter names without its prefix and the adapter's name."""
    return {n.removeprefix("base_model.model.").replace(".default", ""): grad for n, grad in grads.items()}


@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.some_cases(4)
def test_we_load_pefts_adapter_and_take_the_same_step(name: str, kind: str, tmp_path: Path) -> None:
    base, ours = opened(name, tmp_path / "m")
    options = LoraConfig(
        r=3, lora_alpha=5, task_type="CAUSAL_LM", target_modules=layers_of(name), **KINDS[kind]
    )  # fmt: skip
    theirs = get_peft_model(base, options).double().eval()
    perturb(theirs, seed=5)
    theirs.save_pretrained(tmp_path / "adapter")
    names = hg.lora.load(ours, tmp_path / "adapter")
    assert len(names) == sum("lora_A." in x for x in theirs.state_dict())

    tokens, targets = batch()
    assert relative_error(ours.logits(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS)) <= LIMIT
    loss, their_grads = their_gradients(theirs, tokens, targets, LENGTHS)
    expected = factors(their_grads)
    assert ours.loss_and_grads(tokens, targets, LENGTHS) == pytest.approx(loss, rel=LIMIT)
    found = dict(ours.named_parameters())
    for layer in names:
        pairs = [(f"{layer}.down", f"{layer}.lora_A.weight", True), (f"{layer}.up", f"{layer}.lora_B.weight", True)]
        if kind == "dora":
            pairs.append((f"{layer}.magnitude", f"{layer}.lora_magnitude_vector.weight", False))
        for mine, other, transposed in pairs:
            grad = found[mine].grad
            assert grad is not None, mine
            assert relative_error(grad.t() if transposed else grad, expected.pop(other), floor=1e-4) <= LIMIT, mine
    assert not expected, "PEFT trains more than we do"
    assert {n for n, p in ours.named_parameters() if p.grad is not None} == {
        n for n, p in ours.named_parameters() if p.requires_grad
    }

    trained = [[p for p in model.parameters() if p.requires_grad] for model in (ours, theirs)]
    for parameters in trained:
        torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4).step()
    theirs.save_pretrained(tmp_path / "after")
    hg.lora.save(ours, tmp_path / "ours")
    after, mine_after = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("after", "ours"))
    assert set(mine_after) == set(after)
    for tensor in after:
        assert relative_error(mine_after[tensor], after[tensor]) <= LIMIT, tensor


@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.some_cases(4)
def test_peft_loads_our_adapter(name: str, kind: str, tmp_path: Path) -> None:
    _, ours = opened(name, tmp_path / "m")
    hg.lora.inject(ours, rank=3, alpha=5, targets=layers_of(name), dora=kind == "dora")
    perturb(ours)
    hg.lora.save(ours, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(from_folder(tmp_path / "m"), tmp_path / "adapter").eval()
    tokens, _ = batch()
    assert relative_error(ours.logits(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS)) <= LIMIT


@pytest.mark.parametrize("name", TYPICAL)
@pytest.mark.some_cases(3)
def test_merged_adapter_is_the_model_that_peft_merges(name: str, tmp_path: Path) -> None:
    base, ours = opened(name, tmp_path / "m")
    theirs = get_peft_model(base, LoraConfig(r=2, lora_alpha=3, target_modules=layers_of(name))).double()
    perturb(theirs, seed=5)
    theirs.save_pretrained(tmp_path / "adapter")
    hg.lora.load(ours, tmp_path / "adapter")
    hg.lora.merge(ours)
    hg.save(ours, tmp_path / "merged")
    merged, expected = from_folder(tmp_path / "merged").state_dict(), theirs.merge_and_unload().state_dict()
    assert set(merged) == set(expected)
    for tensor in expected:
        assert relative_error(merged[tensor], expected[tensor]) <= LIMIT, tensor


@pytest.mark.parametrize("name", ["gpt2, tied", "gptj, tied", "gpt_neox, tied", "nemotron, biases", "gpt_oss, window"])
@pytest.mark.parametrize(("bias", "kind"), [("all", "plain"), ("lora_only", "dora")])
@pytest.mark.some_cases(3)
def test_biases_that_train_with_an_adapter_in_both_directions(name: str, bias: str, kind: str, tmp_path: Path) -> None:
    base, ours = opened(name, tmp_path / "m")
    targets = layers_of(name)[1:3]
    options = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=targets, bias=bias, **KINDS[kind])
    theirs = get_peft_model(base, options).double().eval()
    perturb(theirs, seed=5)
    theirs.save_pretrained(tmp_path / "theirs")
    hg.lora.load(ours, tmp_path / "theirs")
    tokens, targets_ = batch()
    assert relative_error(ours.logits(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS)) <= LIMIT

    loss, their_grads = their_gradients(theirs, tokens, targets_, LENGTHS)
    expected = {n.replace(".base_layer.", "."): g for n, g in factors(their_grads).items() if n.endswith(".bias")}
    assert ours.loss_and_grads(tokens, targets_, LENGTHS) == pytest.approx(loss, rel=LIMIT)
    named = {n.replace(".base.", "."): p for n, p in ours.named_parameters() if p.requires_grad}
    found = {n: p.grad for n, p in named.items() if n.endswith(".bias")}
    assert expected and len(named) == len(their_grads)
    assert_equal_gradients(found, expected)  # type: ignore[arg-type]

    for parameters in ([p for p in model.parameters() if p.requires_grad] for model in (ours, theirs)):
        torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4).step()
    theirs.save_pretrained(tmp_path / "after")
    hg.lora.save(ours, tmp_path / "ours")
    after, mine = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("after", "ours"))
    assert set(mine) == set(after)
    assert all(relative_error(mine[x], after[x], floor=1e-4) <= LIMIT for x in after)

    reopened = PeftModel.from_pretrained(from_folder(tmp_path / "m"), tmp_path / "ours").eval()
    assert relative_error(ours.logits(tokens, LENGTHS), their_logits(reopened, tokens, LENGTHS)) <= LIMIT
    hg.lora.merge(ours)
    merged, parts = reopened.merge_and_unload(), dict(ours.named_parameters())
    for tensor, value in their_tensors(merged).items():
        assert tensor not in parts or relative_error(parts[tensor], value, floor=1e-4) <= LIMIT, tensor


def test_all_linear_selects_the_seven_layers_of_a_block_but_not_the_head(tmp_path: Path) -> None:
    _, model = opened("llama, 3 queries to a key", tmp_path)
    names = hg.lora.inject(model, rank=2)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert sorted(n.rpartition(".")[2] for n in names) == sorted(2 * layers)


@pytest.mark.parametrize(("name", "saved"), [("llama", "norm"), ("llama", "mlp"), ("qwen3", "norm"), ("gpt2", "ln_f")])
def test_modules_to_save_are_ends_of_names_in_both_directions(name: str, saved: str, tmp_path: Path) -> None:
    """As in PEFT: norm is every layer whose name ends so, mlp every layer of such a module."""
    name = next(one for one in TYPICAL if one.startswith(name))
    _, ours = opened(name, tmp_path / "m")
    base, other = (AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float64) for _ in range(2))
    targets = layers_of(name)[:1]
    tokens, _ = batch()

    options = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=targets, modules_to_save=[saved])
    theirs = in_float64(get_peft_model(base, options).eval())  # after PEFT has copied the layers
    perturb(theirs, seed=5)
    theirs.save_pretrained(tmp_path / "theirs")
    hg.lora.load(ours, tmp_path / "theirs")
    assert relative_error(ours.logits(tokens, LENGTHS), their_logits(theirs, tokens, LENGTHS)) <= LIMIT
    trained = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in (ours, theirs)]
    assert trained[0] == trained[1]

    made = hg.load(tmp_path / "m", dtype="float64")
    hg.lora.inject(made, 2, targets=targets, modules_to_save=[saved])
    perturb(made, seed=6)
    hg.lora.save(made, tmp_path / "ours")
    stored = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("ours", "theirs"))
    assert len({frozenset(tensors) for tensors in stored}) == 1
    reopened = in_float64(PeftModel.from_pretrained(other, tmp_path / "ours").eval())
    assert relative_error(made.logits(tokens, LENGTHS), their_logits(reopened, tokens, LENGTHS)) <= LIMIT
