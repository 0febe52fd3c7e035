"""hg.nn.replace on a transformers model of every family: gradients equal to the original's, alone and under the tools that
train it; what it leaves, and how it is undone."""

import copy
import pickle
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from members import (
    DISTINCT,
    IMPLEMENTATION,
    LIMIT,
    MEMBERS,
    TYPICAL,
    assert_equal_gradients,
    family_of,
    transformers_model,
)
from peft import LoraConfig, get_peft_model
from test_family_adapters import layers_of
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GPT2DoubleHeadsModel, Trainer, TrainingArguments

import handgrad as hg
from conftest import perturb
from handgrad.errors import HandgradError
from handgrad.families import FAMILIES
from handgrad.model.precision import why_not_mixed
from handgrad.nn.heads import layout_of_mask
from handgrad.ops import gated, linear
from nn.changes import model_of

LLAMA = "llama, 3 queries to a key"
Batch = dict[str, Tensor]


MIXTURES = [name for name in MEMBERS if FAMILIES[family_of(name)].has("mlp.experts")]
DENSE = [name for name in TYPICAL if name not in MIXTURES]


def without_dropout(network: Any) -> Any:
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in [x for x, value in vars(module).items() if "drop" in x and isinstance(value, float)]:
            setattr(module, name, 0.0)
    return network.train()


def pair(name: str) -> tuple[Any, Any]:
    """The model twice, in float64: for transformers to judge by, and as it is before anything is replaced."""
    judge, model = (transformers_model(name, use_cache=False) for _ in range(2))  # a model without attention has none
    model.load_state_dict(judge.state_dict())
    for module in model.modules():
        if type(module).__name__.endswith("Norm"):
            module.__dict__.pop(
                "forward", None
            )  # the judge's runs in float64 instead of float32; ours does so by itself
    return without_dropout(judge), without_dropout(model)


def padded(side: str) -> Batch:
    """Three sequences of 12, 7 and 3 tokens, with padding on one side or, for "", none."""
    ids = torch.randint(29, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if side:
        mask[1, 7:] = mask[2, 3:] = 0
        mask = mask if side == "right" else mask.flip(1)
    found = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    return {**found, "attention_mask": mask} if side else found


def wide_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The loss of transformers in float64: its own turns logits to float32."""
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return F.cross_entropy(logits, targets)
    return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


def gradients(network: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def capped(model: Any) -> bool:
    """Whether scores and logits are capped, so that attention and loss are left to transformers."""
    return getattr(model.config, "final_logit_softcapping", None) is not None


def class_names(model: Any, names: Iterable[str]) -> list[str]:
    return [type(model.get_submodule(name)).__name__ for name in names]


def assert_no_fallbacks(name: str, result: Any) -> None:
    """Qwen2Moe's attention does not say how wide the window of its mask is."""
    mask = "a mask that is not causal with padding, a window or several sequences in a row"
    assert set(result.fallbacks) <= ({mask} if name.startswith("qwen2_moe, window") else set())


def assert_equal_steps(judge: Any, model: Any, batch: Batch) -> None:
    """Equal losses and gradients of one batch."""
    judge.zero_grad()
    model.zero_grad()
    given = {name: x for name, x in batch.items() if name != "labels"}
    expected = wide_loss(judge(**given, use_cache=False), batch["labels"])
    expected.backward()
    outputs = model(**batch)
    assert ("logits" in outputs) == capped(model)
    loss = wide_loss(outputs, batch["labels"]) if capped(model) else outputs.loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=LIMIT)
    assert_equal_gradients(gradients(model), gradients(judge))


# feed-forward layers with other names or a dropout of their own, whose linear layers are replaced one by one
LEFT = {
    "arcee": "ArceeMLP", "gpt_oss": "GptOssMLP", "phi": "PhiMLP", "seed_oss": "SeedOssMLP", "gptj": "GPTJMLP",
    "nemotron": "NemotronMLP", "jais2": "Jais2MLP",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:handgrad leaves Qwen2MoeAttention")
@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.some_cases(8)
def test_replaced_model_has_the_gradients_of_the_original(name: str) -> None:
    judge, model = pair(name)
    names = list(model.state_dict())
    result = hg.nn.replace(model, loss=True)
    blocks, kinds = model.config.num_hidden_layers, list(result.replaced.values())
    whole = 0 if capped(model) else 1
    left = {
        re.sub(".*(?=Embedding|Experts|Router|Attention|ForCausalLM)", "", n) for n in class_names(model, result.left)
    }
    if name.startswith("lfm2"):  # its feed-forward calls silu itself, and its taps are a Conv1d
        convolutions = model.config.layer_types.count("conv")
        assert left == {"Embedding", "Lfm2MLP", *(["Conv1d"] if convolutions else [])}
        assert [kinds.count(kind) for kind in ("attention", "loss")] == [blocks - convolutions, 1]
    else:  # stacked experts stay transformers'
        norms = sum(type(module).__name__.endswith(("Norm", "LayerNorm1P")) for module in model.modules())
        family = family_of(name)
        # eager ones are left; in the other two, what follows the heads has a dropout of its own
        own = {"Attention"} if family in (*IMPLEMENTATION, "seed_oss", "gpt_bigcode") else set()
        attention = 0 if family in IMPLEMENTATION else blocks
        assert [kinds.count(kind) for kind in ("norm", "attention", "loss")] == [norms, attention, whole]
        own |= {LEFT[family]} if family in LEFT else set()
        assert left <= {"Embedding", "Experts", "Router", *own, *(["ForCausalLM"] if capped(model) else [])}
        assert "Experts" in left or family in LEFT or kinds.count("feed-forward") == blocks
    assert_equal_steps(judge, model, padded(""))
    assert_no_fallbacks(name, result)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.some_cases(3)
def test_padding(name: str, side: str) -> None:
    judge, model = pair(name)
    result = hg.nn.replace(model, loss=True)
    narrow = "window" in name and not name.startswith("qwen3_moe") and "attention" in result.replaced.values()
    if side == "right" and narrow:  # padding sees a part of the window: no layout of ours has that
        with pytest.warns(UserWarning, match="leaves .*Attention to transformers: a mask that is not causal"):
            assert_equal_steps(judge, model, padded(side))
        assert sum(result.fallbacks.values()) > 0 and "fell back" in str(result)
    else:
        assert_equal_steps(judge, model, padded(side))
        assert_no_fallbacks(name, result)


@pytest.mark.filterwarnings("ignore")  # PEFT warns about names of GPT-2's layers
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.some_cases(3)
def test_adapters_of_peft(name: str) -> None:
    dora = name.startswith(("gpt2", "qwen2"))
    options = LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", target_modules=layers_of(name), use_dora=dora)
    judge, model = (get_peft_model(network, options).double() for network in pair(name))
    perturb(judge, seed=5)
    model.load_state_dict(judge.state_dict())
    result = hg.nn.replace(model, loss=True)
    assert list(result.replaced.values()).count("LoRA") == sum("lora_A." in x for x in judge.state_dict())
    assert_equal_steps(judge, model, padded(""))
    assert all("lora" in name for name in gradients(model))
    with model.disable_adapter(), judge.disable_adapter(), torch.no_grad():
        ids = padded("")["input_ids"]
        torch.testing.assert_close(model(ids).logits, judge(ids).logits)


def trainer_of(network: Any, folder: Path, **options: Any) -> Trainer:
    batch = padded("right")
    data = [{key: x[i] for key, x in batch.items()} for i in range(3)] * 4
    arguments = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=0.1,
        optim="sgd", lr_scheduler_type="constant", report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        logging_strategy="no", seed=7,
    )  # fmt: skip
    return Trainer(network, arguments, train_dataset=data, **options)


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(
    "name", ["gpt2, tied", LLAMA, "phi3, 1 queries to a key", "qwen3, 9 queries to a key", "adapters"]
)
def test_trainer_takes_the_same_steps(name: str, tmp_path: Path) -> None:
    judge, model = pair(LLAMA if name == "adapters" else name)
    if name == "adapters":
        options = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=layers_of(LLAMA))
        judge, model = (get_peft_model(network, options).double() for network in (judge, model))
        perturb(judge, seed=5)
        model.load_state_dict(judge.state_dict())
    before = {name: x.clone() for name, x in model.state_dict().items()}
    hg.nn.replace(model, loss=True)
    trainer_of(judge, tmp_path / "judge", compute_loss_func=wide_loss).train()
    trainer_of(model, tmp_path / "ours").train()
    after, expected = model.state_dict(), judge.state_dict()
    assert_equal_gradients(*({n: x[n] - before[n] for n in before} for x in (after, expected)))  # equal updates


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(why_not_mixed() is not None, reason=f"no mixed precision: {why_not_mixed()}")
@pytest.mark.parametrize("adapted", [False, True])
def test_trainer_in_mixed_precision(adapted: bool, tmp_path: Path) -> None:
    """Updates of two steps in the direction of float32's; weights stay float32."""
    updates = []
    for precision in (None, "mixed"):
        model = small()
        if adapted:
            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear"))
            perturb(model, seed=5, scale=0.05)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        hg.nn.replace(model, loss=True, precision=precision)
        trainer_of(model, tmp_path / str(precision)).train()
        assert all(p.dtype == torch.float32 for p in model.parameters())
        changes = [(p - before[name]).flatten() for name, p in model.named_parameters()]
        updates.append(torch.cat(changes).detach().double())
    error = (updates[1] - updates[0]).norm() / updates[0].norm()
    assert 1e-4 < error <= 8 * 2.0**-8  # the second step is one of other weights


@pytest.mark.filterwarnings("ignore")
def test_accelerate_saves_and_trains(tmp_path: Path) -> None:
    judge, model = pair(LLAMA)
    hg.nn.replace(model, loss=True)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = padded("")
    accelerator.backward(prepared(**batch).loss)
    wide_loss(judge(input_ids=batch["input_ids"], use_cache=False), batch["labels"]).backward()
    assert_equal_gradients(gradients(model), gradients(judge))
    optimizer.step()
    accelerator.unwrap_model(prepared).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.architectures == ["LlamaForCausalLM"] and type(loaded).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def small() -> Any:
    """A Llama in float32 without the judge's changes, which pickle cannot copy."""
    return model_of("llama", vocab_size=29)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_audit_compares_with_the_original(dtype: torch.dtype) -> None:
    model = small().to(dtype)
    result = hg.nn.replace(model, loss=True, audit=padded("right"))
    names = [name for name, _ in model.named_parameters()]
    assert result.audit.compared == len(names), names
    assert 0 < result.audit.error <= result.audit.tolerance
    assert f"{len(names)} gradients equal to the original's" in str(result) and model.training
    assert all(p.grad is None for p in model.parameters())


def test_audit_finds_a_wrong_backward_pass_and_undoes_the_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    right = gated.backward

    def wrong(delta: Tensor, *rest: Any, **options: Any) -> Any:
        return right(-delta, *rest, **options)

    monkeypatch.setattr(gated, "backward", wrong)
    with pytest.raises(HandgradError, match=r"gradient of model\.layers.* differs from the original's"):
        hg.nn.replace(model, loss=True, audit=padded(""))
    assert "handgrad" not in str(model)


def test_undo_restores_every_module_and_copies_keep_theirs() -> None:
    model = small()
    classes = [type(module) for module in model.modules()]
    attributes = [set(module.__dict__) for module in model.modules()]
    result = hg.nn.replace(model, loss=True)
    assert "LlamaMLP [handgrad]" in str(model) and model.config._attn_implementation == "handgrad"
    assert model._get_name() == "LlamaForCausalLM"  # by which Trainer shifts labels for label smoothing
    type(model)(model.config)(**padded("")).loss.backward()  # another model of this class has no parts
    with pytest.raises(HandgradError, match="call undo"):
        hg.nn.replace(model, loss=True)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    result.undo()
    result.undo()
    assert [type(module) for module in model.modules()] == classes
    assert [set(module.__dict__) for module in model.modules()] == attributes
    expected = model(**padded(""))
    expected.loss.backward()
    for found in copies:
        loss = found(**padded("")).loss
        loss.backward()
        assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-6) and "handgrad" in str(found)
        assert_equal_gradients(gradients(found), gradients(model), 1e-4)


def test_recomputed_blocks_and_frozen_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, model = pair(LLAMA)
    for network in (judge, model):
        network.requires_grad_(False)
        network.model.layers[1].mlp.down_proj.requires_grad_(True)
        network.model.layers[1].input_layernorm.requires_grad_(True)
    hg.nn.replace(model, loss=True)
    products, plain = [], linear.grad_w
    monkeypatch.setattr(linear, "grad_w", lambda *given: products.append(1) or plain(*given))
    assert_equal_steps(judge, model, padded(""))
    assert len(products) == 1 and set(gradients(model)) == {
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.input_layernorm.weight",
    }
    for network in (judge, model):
        network.requires_grad_(True)
        network.activation_checkpointing_enable()
    assert_equal_steps(judge, model, padded("left"))


def test_calls_that_are_left_to_transformers() -> None:
    judge, model = pair(LLAMA)
    result = hg.nn.replace(model, loss=True)
    ids = padded("")["input_ids"]
    assert torch.equal(
        model.eval().generate(ids[:1], max_new_tokens=6), judge.eval().generate(ids[:1], max_new_tokens=6)
    )
    logits = model(ids, labels=ids).logits  # evaluation has logits
    torch.testing.assert_close(logits, judge(ids).logits)
    assert result.fallbacks == {}  # nothing was differentiated
    mask = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    mask |= torch.eye(12, dtype=torch.bool)
    for given, reason in ((mask, "gaps between the keys"), (mask.double() * -0.3, "changes scores")):
        model.zero_grad()
        judge.zero_grad()
        with pytest.warns(UserWarning, match=reason):
            loss = wide_loss(model(ids, attention_mask=given), ids)
        loss.backward()
        wide_loss(judge(ids, attention_mask=given, use_cache=False), ids).backward()
        assert_equal_gradients(gradients(model), gradients(judge))
    assert list(result.fallbacks.values()) == [2, 2]
    cache = model(ids[:, :5], use_cache=True).past_key_values  # an empty one is no obstacle
    with pytest.warns(UserWarning, match="keys of earlier calls"):
        model(ids[:, 5:], past_key_values=cache)


def test_what_is_left_and_why() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=29, n_positions=16, n_embd=8, n_head=2, n_layer=1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    left = hg.nn.replace(model).left
    assert "'eager'" in left["transformer.h.0.attn"] and "transformer.wte" in left
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    result = hg.nn.replace(model, loss=True)
    assert "attention dropout 0.1" in result.left["transformer.h.0.attn"]
    with pytest.warns(UserWarning, match="attention dropout"):
        model(torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long)).loss.backward()
    assert "replaced   1 × loss" in str(result) and "left       transformer.wte" in str(result)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Conv1d(4, 4, 1), torch.nn.LayerNorm(4))
    result = hg.nn.replace(other)
    assert result.replaced == {"0": "linear", "2": "norm"} and result.left == {"1": "no hand-derived Conv1d"}


@pytest.mark.filterwarnings("error:handgrad leaves")
def test_models_that_keep_their_own_loss() -> None:
    """GPT2DoubleHeadsModel computes its loss from logits itself; loss=False keeps logits in training."""
    config = AutoConfig.for_model("gpt2", vocab_size=29, n_positions=16, n_embd=32, n_head=2, n_layer=1, attn_pdrop=0.0)
    torch.manual_seed(0)
    model = without_dropout(GPT2DoubleHeadsModel(config))
    ids = padded("")["input_ids"]
    expected = model(input_ids=ids, labels=ids).loss
    result = hg.nn.replace(model, loss=True)
    found = model(input_ids=ids, labels=ids)
    assert "loss" not in result.replaced.values()
    torch.testing.assert_close(found.loss, expected)
    model = small()
    expected = model(**padded("")).loss
    hg.nn.replace(model)
    found = model(**padded(""))
    assert found.logits.shape == (3, 12, 29)
    torch.testing.assert_close(found.loss, expected)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_adapters_that_are_left_to_peft_and_merged() -> None:
    model = get_peft_model(small(), LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    perturb(model, seed=5)
    expected = model(**padded("")).loss
    result = hg.nn.replace(model, loss=True)
    model.base_model.set_adapter(["default", "default"])
    with pytest.warns(UserWarning, match="leaves Linear to peft: several adapters"):
        model(**padded(""))
    assert result.fallbacks == {"several adapters": 4}
    model.base_model.set_adapter("default")
    merged = model.merge_and_unload()
    result.undo()  # the modules are no longer where they were
    assert "handgrad" not in str(merged)
    torch.testing.assert_close(merged(**padded("")).loss, expected)


def test_wrong_arguments() -> None:
    with pytest.raises(HandgradError, match=r"use hg\.nn\.wrap"):
        hg.nn.replace(hg.GPT(hg.preset("nano", n_blocks=1)))
    frozen = small().requires_grad_(False)
    with pytest.raises(HandgradError, match="every parameter is frozen"):
        hg.nn.replace(frozen, audit=padded(""))
    assert "handgrad" not in str(frozen)
    with pytest.raises(HandgradError, match="with labels"):
        hg.nn.replace(small(), audit={"input_ids": torch.zeros(1, 2, dtype=torch.long)})


def test_layouts_of_masks() -> None:
    causal = torch.ones(6, 6).tril().bool()
    sequence = torch.tensor([0, 0, 1, 1, 1, 2])
    packed = layout_of_mask((causal & (sequence[:, None] == sequence))[None, None], 2, None)
    assert not isinstance(packed, str) and [span.length for span in packed.spans] == [2, 3, 1] * 2
    hidden = causal.clone()
    hidden[:, :2] = False
    found = layout_of_mask(hidden[None, None], 1, None)
    assert not isinstance(found, str) and found.blind is not None and found.blind.tolist() == [0, 1]
    assert layout_of_mask(torch.zeros(1, 1, 3, 3).bool(), 1, None) == "a mask that hides every key"
    assert "of shape" in str(layout_of_mask(torch.ones(1, 2, 3, 3).bool(), 1, None))


def test_compiled_around_it() -> None:
    """torch.compile leaves a gap where the bridge computes."""
    judge, model = pair(LLAMA)
    hg.nn.replace(model, loss=True)
    part = torch.compile(model.model.layers[0].mlp, backend="eager")
    x = torch.randn(2, 3, 18, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part(x).square().sum().backward()
    found, x.grad = x.grad, None
    judge.model.layers[0].mlp(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_a_cap_that_is_set_later_leaves_the_loss_to_transformers() -> None:
    model = transformers_model("gemma3_text, window")
    hg.nn.replace(without_dropout(model), loss=True)
    model.config.final_logit_softcapping = 1.5
    with pytest.warns(UserWarning, match="its logits are capped"):
        outputs = model(**padded(""))
    assert outputs.logits.abs().max() <= 1.5
