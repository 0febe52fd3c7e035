"""hg.nn.wrap: a model of handgrad under tools that call loss.backward()."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import handgrad as hg
from conftest import make_model, perturb
from families.members import from_folder
from handgrad.errors import HandgradError
from handgrad.model.config import FAMILIES
from handgrad.model.precision import why_not_mixed
from handgrad.model.storage.rounded import round_frozen
from handgrad.ops import loss as softmax_loss

LLAMA: dict[str, Any] = {
    "family": "llama", **FAMILIES["llama"].fixed, "activation": "silu", "qkv_bias": False, "out_bias": False,
    "mlp_bias": False, "d_hidden": 10,
}  # fmt: skip


def batch() -> dict[str, Tensor]:
    """Two sequences of 7 and 4 tokens, padded on the right."""
    ids = torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed() -> tuple[Tensor, Tensor, list[int]]:
    """The same as handgrad takes it."""
    given = batch()
    rows = given["attention_mask"].bool()
    targets = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:]
    return given["input_ids"][rows], targets[rows], [7, 4]


@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt2", "llama"])
def test_loss_backward_is_loss_and_grads(shape: dict[str, Any]) -> None:
    model = make_model(**shape)
    plain, wrapped = copy.deepcopy(model), hg.nn.wrap(model)
    loss = wrapped(**batch()).loss
    assert all(p.grad is None for p in model.parameters()), "gradients arrive with backward()"
    (loss / 2).backward()
    (wrapped(**batch()).loss / 2).backward()
    assert loss.item() == pytest.approx(plain.loss_and_grads(*packed()), rel=1e-12)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    wrapped.zero_grad()
    wrapped.activation_checkpointing_enable()
    out = wrapped(**batch(), num_items_in_batch=torch.tensor(18))
    out.loss.backward()
    assert "logits" not in out and out[0] is out.loss is out["loss"]
    torch.testing.assert_close(model.embed.weight.grad, plain.embed.weight.grad / 2)
    for number in (4.5, 0.5):
        wrapped.zero_grad()
        part = wrapped(**batch(), num_items_in_batch=torch.tensor(number)).loss
        part.backward()
        assert part.item() == pytest.approx(loss.item() * 9 / number, rel=1e-12)
        torch.testing.assert_close(model.embed.weight.grad, plain.embed.weight.grad * 9 / number)
        with torch.no_grad():
            assert wrapped(**batch(), num_items_in_batch=number).loss.item() == pytest.approx(part.item(), rel=1e-12)
    with torch.no_grad():
        out = wrapped.eval()(**batch())
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    assert out.logits.shape == (2, 7, 11) and out.logits[1, 4:].abs().max() == 0
    torch.testing.assert_close(wrapped(batch()["input_ids"][:1]).logits, model.logits(batch()["input_ids"][:1]))


@pytest.mark.skipif(why_not_mixed() is not None, reason=f"no mixed precision: {why_not_mixed()}")
@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("adapter", [None, {}, {"dora": True, "targets": ("all-linear", "lm_head")}], ids=str)
def test_mixed_precision_has_the_bits_of_loss_and_grads(shape: dict[str, Any], adapter: dict[str, Any] | None) -> None:
    model = make_model(dtype=torch.float32, n_blocks=2, **{"tied": False, **shape})
    if adapter is not None:
        hg.lora.inject(model, 2, **adapter)
        perturb(model)
    model.precision = "mixed"
    exact = copy.deepcopy(model)
    exact.precision = "float32"
    if adapter is not None:
        round_frozen(model)
    plain, wrapped, ids = copy.deepcopy(model), hg.nn.wrap(model), batch()["input_ids"]

    def assert_equal() -> None:
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad), name
        model.zero_grad()
        plain.zero_grad()

    for side in ("right", "left"):
        mask = batch()["attention_mask"] if side == "right" else batch()["attention_mask"].flip(1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        labels = ids.masked_fill(positions == 0, -100)  # no first token, which padding would predict; and no padding
        labels = labels.masked_fill(mask == 0, -100)
        targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        for recompute in (False, True):
            wrapped.gradient_checkpointing = recompute
            loss = wrapped(ids, attention_mask=mask, position_ids=positions, labels=labels).loss
            loss.backward()
            rows = mask.bool()
            expected = plain.loss_and_grads(
                ids[rows], targets[rows], mask.sum(1).tolist(), recompute="blocks" if recompute else "none"
            )
            assert loss.dtype == torch.float32 and loss == torch.tensor(expected)
            assert loss.item() != exact.loss(ids[rows], targets[rows], mask.sum(1).tolist()), "nothing was rounded"
            assert_equal()
    targets = torch.randint(11, ids.shape, generator=torch.Generator().manual_seed(3))  # of every row
    for recompute in (False, True):
        wrapped.gradient_checkpointing = recompute
        logits = wrapped(ids).logits
        assert torch.equal(logits, model.logits(ids)) and not torch.equal(logits, exact.logits(ids))
        delta = softmax_loss.forward_and_delta(logits.detach().flatten(0, 1), targets.flatten(), 1 / ids.numel())[1]
        logits.backward(delta.view_as(logits))
        plain.loss_and_grads(ids, targets)
        assert_equal()


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("tied", [True, False])
def test_trainer_and_saving(tied: bool, tmp_path: Path) -> None:
    model = make_model(tied=tied)
    plain, wrapped = copy.deepcopy(model), hg.nn.wrap(model)
    data = [{key: x[i] for key, x in batch().items()} for i in range(2)] * 2
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=2, optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", report_to=[], save_steps=3, use_cpu=True, disable_tqdm=True,
        max_grad_norm=0.0, logging_strategy="no", train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(wrapped, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        plain.loss_and_grads(*packed())
        optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert trainer.evaluate()["eval_loss"] > 0
    wrapped.save_pretrained(tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    torch.testing.assert_close(
        theirs(batch()["input_ids"]).logits, model.logits(batch()["input_ids"]).as_subclass(Tensor)
    )
    assert set(wrapped.state_dict()) == set(theirs.state_dict()) - ({"lm_head.weight"} if tied else set())
    other = hg.nn.wrap(make_model(seed=5, tied=tied))
    other.load_state_dict(wrapped.state_dict())
    assert torch.equal(other(batch()["input_ids"]).logits, wrapped(batch()["input_ids"]).logits)
    inside, outer = (torch.nn.ModuleList([x]) for x in (hg.nn.wrap(make_model(seed=6, tied=tied)), wrapped))
    inside.load_state_dict(outer.state_dict())  # as a module of Lightning holds it
    assert torch.equal(inside[0](batch()["input_ids"]).logits, wrapped(batch()["input_ids"]).logits)
    assert (tmp_path / "run" / "checkpoint-3" / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt2", "llama"])
def test_a_loss_of_your_own(shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits carry gradients: those of autograd through transformers' model, also for Trainer's label smoothing."""
    model = make_model(**shape)
    hg.save(model, tmp_path / "model")
    theirs = from_folder(tmp_path / "model")
    wrapped = hg.nn.wrap(model)
    given = batch()
    rows, weight = given["attention_mask"].bool(), torch.randn(11, dtype=torch.float64)
    inputs = {name: given[name] for name in ("input_ids", "attention_mask")}

    def compare() -> None:
        for name, p in theirs.named_parameters():
            found = dict(wrapped.named_parameters())[name].grad
            assert found is not None and p.grad is not None
            assert (found - p.grad).norm() <= 1e-10 * p.grad.norm() + 1e-15, name
        wrapped.zero_grad()
        theirs.zero_grad()

    for at_once, recompute in ((1024, False), (4, False), (4, True)):
        monkeypatch.setattr(model, "tokens_at_once", lambda at_once=at_once: at_once)
        wrapped.gradient_checkpointing = recompute
        for x in (wrapped, theirs):
            ((x(**inputs).logits[rows].tanh() @ weight) ** 2).sum().backward()
        compare()
    arguments = TrainingArguments(str(tmp_path / "run"), label_smoothing_factor=0.3, report_to=[], use_cpu=True)
    losses = [Trainer(x, arguments).compute_loss(x, batch()) for x in (wrapped, theirs)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    compare()
    assert json.loads(wrapped.config.to_json_string())["vocab_size"] == theirs.config.vocab_size
    assert wrapped.config.get_text_config().vocab_size == wrapped.config.to_dict()["vocab_size"]
    loss = wrapped(given["input_ids"]).logits.sum()
    loss.backward(retain_graph=True)
    once = next(model.parameters()).grad.clone()
    loss.backward()
    torch.testing.assert_close(next(model.parameters()).grad, 2 * once)
    with pytest.raises(HandgradError, match="compute the logits again"):
        loss.backward()
    loss = wrapped(**inputs).logits.sum()
    with torch.no_grad():
        next(model.final_norm.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt2", "llama"])
def test_positions_and_padding_are_transformers(shape: dict[str, Any], tmp_path: Path) -> None:
    """Padding on the left counts as positions unless others are given; positions that restart are another sequence."""
    model = make_model(**shape)
    hg.save(model, tmp_path / "model")
    theirs, wrapped = from_folder(tmp_path / "model"), hg.nn.wrap(model)
    ids, left = batch()["input_ids"], batch()["attention_mask"].flip(1)
    counted = (left.cumsum(1) - 1).clamp(min=0)
    for given in (
        {"attention_mask": left}, {"attention_mask": left, "position_ids": counted},
        {"position_ids": (torch.arange(7) % 3).expand(2, -1)},
    ):  # fmt: skip
        rows = given.get("attention_mask", torch.ones_like(ids)).bool()
        labels = ids.masked_fill(~rows, -100)
        first = rows & ~torch.nn.functional.pad(rows, (1, 0))[:, :-1]  # transformers would predict it from padding
        if not rows.all():
            with pytest.warns(UserWarning, match="the first token after padding on the left"):
                wrapped(ids, labels=labels, **given)
        labels = labels.masked_fill(first, -100)
        expected = theirs(ids, **given, use_cache=False).logits
        torch.testing.assert_close(wrapped(ids, **given).logits[rows], expected[rows])
        loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        theirs.zero_grad()
        wrapped.zero_grad()
        loss.backward()
        found = wrapped(ids, labels=labels, **given).loss
        found.backward()
        assert found.item() == pytest.approx(loss.item(), rel=1e-8)
        for name, p in theirs.named_parameters():
            torch.testing.assert_close(dict(wrapped.named_parameters())[name].grad, p.grad)


def test_packed_sequences_as_collators_describe_them() -> None:
    wrapped, ids = hg.nn.wrap(make_model(**LLAMA)), batch()["input_ids"][:1]
    given = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    described = {
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 4, "max_length_k": 4,
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1]]),
    }  # fmt: skip
    for call in (wrapped, wrapped.hidden_states):
        assert torch.equal(call(ids, **given, **described)[0], call(ids, **given)[0])
        with pytest.raises(HandgradError, match="cu_seq_lens_q does not begin the sequences where position_ids"):
            call(ids, **described)


def test_logits_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass drops what the forward pass dropped: gradients are those of differences with the same seed."""
    model = make_model(tied=False)
    hg.lora.inject(model, rank=2, dropout=0.4, targets=["c_attn", "c_proj", "c_fc", "lm_head"])
    wrapped = hg.nn.wrap(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(2)
    size, along = 1e-6, [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in trained]

    @torch.no_grad()
    def move(step: float) -> None:
        for p, v in zip(trained, along, strict=True):
            p += step * v

    def loss(seed: int) -> Tensor:
        torch.manual_seed(seed)
        logits: Tensor = wrapped(batch()["input_ids"], batch()["attention_mask"]).logits
        return (logits.softmax(-1) * torch.arange(11)).square().sum()

    move(0.1)
    for at_once, recompute in ((1024, False), (4, False), (4, True)):
        monkeypatch.setattr(model, "tokens_at_once", lambda at_once=at_once: at_once)
        wrapped.gradient_checkpointing = recompute
        wrapped.zero_grad()
        first, second = loss(3), loss(4)  # two forward passes before a backward pass
        assert first != second
        first.backward()
        ends = []
        for step in (size, -size):
            move(step)
            ends.append(loss(3).item())
            move(-step)
        claimed = sum(float((p.grad * v).sum()) for p, v in zip(trained, along, strict=True) if p.grad is not None)
        assert claimed == pytest.approx((ends[0] - ends[1]) / (2 * size), rel=1e-6)


def test_under_autocast() -> None:
    """It evaluates, and a backward pass that is called under autocast is as exact as one that is not."""
    wrapped = hg.nn.wrap(make_model(**LLAMA))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            assert wrapped(**batch()).logits.dtype == torch.float64
        wrapped(batch()["input_ids"]).logits.square().sum().backward()
    inside = [p.grad for p in wrapped.parameters()]
    wrapped.zero_grad()
    wrapped(batch()["input_ids"]).logits.square().sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(wrapped.parameters(), inside, strict=True))


def test_adapters_and_accelerate(tmp_path: Path) -> None:
    model = make_model()
    base = copy.deepcopy(model)
    hg.lora.inject(model, rank=2)
    wrapped = hg.nn.wrap(model)
    accelerator = Accelerator(cpu=True)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    prepared, optimizer = accelerator.prepare(wrapped, torch.optim.SGD(trained, lr=0.1))
    before = prepared(**batch()).loss
    accelerator.backward(before)
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    optimizer.step()
    assert prepared(**batch()).loss < before
    wrapped.save_pretrained(tmp_path / "adapter")
    hg.save(base, tmp_path / "base")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    theirs = PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    ids = batch()["input_ids"]
    torch.testing.assert_close(theirs(ids).logits, model.logits(ids).as_subclass(Tensor))


def test_copies_and_modes() -> None:
    wrapped = hg.nn.wrap(make_model())
    for found in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        found(**batch()).loss.backward()
        assert found.handgrad_model.embed.weight is dict(found.named_parameters())["transformer.wte.weight"]
        assert found.handgrad_model.embed.weight.grad is not None
    assert not wrapped.eval().handgrad_model.training and wrapped.train().handgrad_model.training
    assert wrapped.float().handgrad_model.dtype == torch.float32


def test_wrong_arguments() -> None:
    wrapped, given = hg.nn.wrap(make_model()), batch()
    gaps, jump = given["attention_mask"].clone(), torch.arange(7).expand(2, -1) % 3
    gaps[1, 1] = 0
    for change, reason in (
        ({"attention_mask": gaps}, "one range of ones"),
        ({"position_ids": jump}, "must count up by 1"),
        ({"position_ids": torch.arange(7) + 10}, "position 16 does not fit"),
        ({"labels": given["input_ids"]}, "labels at padding"),
        ({"labels": given["labels"][:1]}, "the shape of input_ids"),
        ({"input_ids": given["input_ids"][0]}, r"must be \(B, T\)"),
        ({"inputs_embeds": given["input_ids"]}, "not inputs_embeds"),
        ({"output_hidden_states": True, "output_attentions": False}, "not output_hidden_states$"),
    ):
        with pytest.raises(HandgradError, match=reason):
            wrapped(**{**given, **change})
    with pytest.raises(HandgradError, match=r"use\s+hg\.nn\.replace"):
        hg.nn.wrap(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt2", "llama"])
def test_trainer_decays_what_it_would_of_transformers(shape: dict[str, Any], tmp_path: Path) -> None:
    wrapped = hg.nn.wrap(make_model(**shape))
    wrapped.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    found, expected = (set(Trainer.get_decay_parameter_names(None, x)) for x in (wrapped, theirs))  # type: ignore[arg-type]
    assert found == expected
