"""TRL's trainers on wrapped and replaced models: losses and updates equal to those of plain transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from changes import model_of
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import handgrad as hg
from conftest import perturb
from handgrad.errors import HandgradError
from handgrad.proof.oracles import relative_error

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PROMPTS = ["one and two make", "a", "what is the capital?", "ten"]
COMMON: dict[str, Any] = {
    "max_steps": 2, "learning_rate": 0.05, "optim": "sgd", "lr_scheduler_type": "constant", "report_to": [],
    "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "seed": 7, "bf16": False,
    "dataloader_pin_memory": False,
}  # fmt: skip


def tokenizer() -> Any:
    """A token per byte, padding on the left."""
    vocabulary = {letter: i for i, letter in enumerate([*ALPHABET, "<pad>", "<eos>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def folder_of(kind: str, where: Path) -> Path:
    """A small model on disk."""
    model_of(kind, vocab_size=258, eos_token_id=257, pad_token_id=256).save_pretrained(where)
    return where


def model_from(folder: Path, how: str) -> Any:
    """The model as transformers', replaced, or handgrad's own, wrapped."""
    if how == "wrapped":
        return hg.nn.wrap(hg.load(folder))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    network.loss_type = "ForCausalLM"  # GPT-2 has none, and Trainer then counts the first label of a row as a target
    if how == "replaced":
        hg.nn.replace(network)
    return network


def sft(model: Any, where: Path, packing: bool = False, **options: Any) -> Any:
    data = Dataset.from_list([{"text": text + " x" * i} for i, text in enumerate(PROMPTS)])
    arguments = SFTConfig(str(where), per_device_train_batch_size=2, max_length=24, packing=packing, **COMMON)
    return SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer(), **options)


def dpo(model: Any, where: Path, **options: Any) -> Any:
    rows = [{"prompt": p, "chosen": " yes" * (i + 1), "rejected": " no"} for i, p in enumerate(PROMPTS)]
    arguments = DPOConfig(str(where), per_device_train_batch_size=2, max_length=32, **COMMON)
    return DPOTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), **options
    )


def grpo(model: Any, where: Path, **options: Any) -> Any:
    def reward(completions: list[str], **others: Any) -> list[float]:
        return [len(set(text)) / 10 for text in completions]

    arguments = GRPOConfig(
        str(where), per_device_train_batch_size=4, num_generations=2, max_completion_length=6, beta=0.0, **COMMON
    )
    data = Dataset.from_list([{"prompt": p} for p in PROMPTS])
    return GRPOTrainer(
        model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer(), **options
    )


TRAINERS = {"sft": sft, "dpo": dpo, "grpo": grpo}


def trained(
    name: str, model: Any, where: Path, reference: Any = None, **options: Any
) -> tuple[list[float], dict[str, Any]]:
    """The losses of a run, and the weights it leaves."""
    if name == "dpo" and reference is not None:
        options["ref_model"] = reference
    trainer = TRAINERS[name](model, where, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}


def assert_equal_runs(runs: dict[str, Any], start: dict[str, Any]) -> None:
    """Of two steps: equal losses, and equal changes of the weights."""
    losses, weights = runs.pop("plain")
    assert len(losses) == 2
    moved = {key: weights[key] - x for key, x in start.items() if key in weights}
    largest = max(x.abs().max().item() for x in moved.values())
    assert largest > 1e-4
    for how, (found, after) in runs.items():
        assert found == pytest.approx(losses, rel=1e-5, abs=1e-6), how
        for key, x in after.items():
            assert relative_error(x - start[key], moved[key], floor=1e-2 * largest) < 1e-3, (how, key)


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.some_cases(3)
def test_all_weights(name: str, kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "model")
    runs = {
        how: trained(name, model_from(folder, how), tmp_path / how, reference=model_from(folder, how))
        for how in ("plain", "replaced", "wrapped")
    }
    assert_equal_runs(runs, model_from(folder, "plain").state_dict())


def test_packing(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "model")
    runs = {how: trained("sft", model_from(folder, how), tmp_path / how, packing=True) for how in ("plain", "wrapped")}
    assert_equal_runs(runs, model_from(folder, "plain").state_dict())


OPTIONS: dict[str, Any] = {
    "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM",
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.some_cases(2)
def test_adapters(name: str, tmp_path: Path) -> None:
    """PEFT's adapters on a plain model, and added before or after it is replaced; handgrad's own on a wrapped one."""
    folder = folder_of("llama", tmp_path / "model")
    adapter = hg.load(folder)
    hg.lora.inject(adapter, rank=3, alpha=6, targets=OPTIONS["target_modules"], seed=1)
    perturb(adapter, seed=2, scale=0.05)
    hg.lora.save(adapter, tmp_path / "adapter")
    runs = {}
    for how in ("plain", "replaced before", "replaced after"):
        network = model_from(folder, "replaced" if how == "replaced before" else "plain")
        network = PeftModel.from_pretrained(network, tmp_path / "adapter", is_trainable=True)
        start = {key: x.clone() for key, x in network.state_dict().items() if "lora" in key}
        if how == "replaced after":
            assert "LoRA" in hg.nn.replace(network).replaced.values()
        losses, weights = trained(name, network, tmp_path / how)
        runs[how] = losses, {key: x for key, x in weights.items() if key in start}
    plain = runs["plain"]
    assert_equal_runs(dict(runs), start)
    reference = hg.load(folder)
    hg.lora.load(reference, tmp_path / "adapter")
    found, weights = trained(name, hg.nn.wrap(adapter), tmp_path / "wrapped", reference=hg.nn.wrap(reference))
    assert found == pytest.approx(plain[0], rel=1e-5, abs=1e-6)
    names = {key.replace("base_model.model.", "").replace(".default.weight", ""): x for key, x in plain[1].items()}
    for key, x in weights.items():
        if key.endswith((".down", ".up")):
            layer, _, factor = key.rpartition(".")
            theirs = names[f"{layer}.lora_{'A' if factor == 'down' else 'B'}"]
            assert relative_error(x, theirs.t()) < 1e-4, key


def test_a_trainer_adds_adapters_to_a_replaced_model_but_not_to_a_wrapped_one(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "model")
    options = {"peft_config": LoraConfig(**OPTIONS)}
    runs = {how: trained("sft", model_from(folder, how), tmp_path / how, **options)[0] for how in ("plain", "replaced")}
    assert runs["replaced"] == pytest.approx(runs["plain"], rel=1e-5)
    for add in (lambda x: sft(x, tmp_path / "wrapped", **options), lambda x: get_peft_model(x, LoraConfig(**OPTIONS))):
        with pytest.raises(HandgradError, match=r"hg\.lora\.inject\(model\) before hg\.nn\.wrap"):
            add(model_from(folder, "wrapped"))


def test_wrapped_model_generates_as_transformers(tmp_path: Path) -> None:
    """With padding on the left, positions that transformers counts without it, and samples of the same random numbers."""
    for kind in ("llama", "gpt2"):
        folder = folder_of(kind, tmp_path / kind)
        given = tokenizer()(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
        found = []
        for how in ("plain", "wrapped"):
            torch.manual_seed(3)
            found.append(model_from(folder, how).eval().generate(**given, max_new_tokens=7, do_sample=True))
        assert torch.equal(*found)
