"""The balance loss of routers against transformers in float64: value and every gradient, with padding, and config.json."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from members import LIMIT, assert_equal_gradients, float_means_double, in_file_names, opened, our_gradients
from torch import Tensor
from transformers import AutoConfig

import handgrad as hg
from handgrad.formats.convert import convert_model
from handgrad.proof.oracles import relative_error

ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
NAMES = (
    "mixtral, 3 queries to a key", "mixtral, many experts", "qwen2_moe, normalized, some blocks dense",
    "qwen3_moe, normalized, some blocks dense", "olmoe, 1 queries to a key", "gpt_oss, 3 queries to a key",
)  # fmt: skip
LENGTHS = [9, 1, 14, 6]


def padded(lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, a mask that is 0 at padding on the right, and labels; the third sequence has no target."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(29, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=generator) < 0.3), -100)
    labels[2] = -100
    return ids, mask, labels


def packed(ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The same as tokens and targets end to end."""
    after = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return ids[mask.bool()], after[mask.bool()]


def their_loss(network: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, balance loss and every gradient of transformers' own forward pass."""
    network.zero_grad()
    with float_means_double():
        found = network(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    found.loss.backward()
    assert found.loss.dtype == found.aux_loss.dtype == torch.float64
    named = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in network.named_parameters()}
    return found.loss.item(), found.aux_loss.item(), in_file_names(network, named)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some_cases(3)
def test_value_and_every_gradient(name: str, tmp_path: Path) -> None:
    theirs, ours = opened(name, tmp_path, **ASKED)
    assert ours.config.balance_loss == 0.7
    batch = padded()
    loss, balance, grads = their_loss(theirs, *batch)
    tokens, targets = packed(*batch)
    routers = ours.count_routers(tokens, LENGTHS)
    assert routers.balance == pytest.approx(balance, rel=LIMIT)
    for options in ({}, {"recompute": "blocks"}, {"tokens_at_once": 8}, {"tokens_at_once": 1}):
        ours.zero_grad()
        text = ours.loss_and_grads(tokens, targets, LENGTHS, **options)  # type: ignore[arg-type]
        assert text + routers.total == pytest.approx(loss, rel=LIMIT)
        assert_equal_gradients(our_gradients(ours), grads, 1e-8)
    assert ours.loss(tokens, targets, LENGTHS) == pytest.approx(text, rel=LIMIT)


def test_without_the_balance_loss_the_comparison_fails(tmp_path: Path) -> None:
    theirs, ours = opened("olmoe, 1 queries to a key", tmp_path)
    theirs.config.output_router_logits = True
    batch = padded()
    ours.loss_and_grads(*packed(*batch), LENGTHS)
    with pytest.raises(AssertionError):
        assert_equal_gradients(our_gradients(ours), their_loss(theirs, *batch)[2], 1e-8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some_cases(3)
def test_config_json_says_the_same_afterwards(name: str, tmp_path: Path) -> None:
    _, ours = opened(name, tmp_path / "theirs", **ASKED)
    hg.save(ours, tmp_path / "ours")
    read = AutoConfig.from_pretrained(tmp_path / "ours")
    assert {field: getattr(read, field) for field in ASKED} == ASKED
    assert hg.load(tmp_path / "ours").config == ours.config
    quiet = opened(name, tmp_path / "quiet", router_aux_loss_coef=0.7)[1]
    assert quiet.config.balance_loss == 0
    hg.save(quiet, tmp_path / "quiet again")
    assert AutoConfig.from_pretrained(tmp_path / "quiet again").output_router_logits is False
    convert_model(str(tmp_path / "quiet"), tmp_path / "converted")
    read = AutoConfig.from_pretrained(tmp_path / "converted")
    assert (read.output_router_logits, read.router_aux_loss_coef) == (False, 0.7)


def test_a_z_loss_does_not_hide_the_model_from_transformers(tmp_path: Path) -> None:

    _, ours = opened("olmoe, 1 queries to a key", tmp_path / "theirs")
    ours.config = replace(ours.config, z_loss=0.25)
    hg.save(ours, tmp_path / "ours")
    assert AutoConfig.from_pretrained(tmp_path / "ours").model_type == "olmoe"
    assert hg.load(tmp_path / "ours").config == ours.config


def test_a_family_to_whose_loss_transformers_adds_nothing(tmp_path: Path) -> None:
    theirs, ours = opened("dots1, groups", tmp_path, output_router_logits=True)
    assert not ours.config.router_losses
    ids, mask, labels = padded()
    with float_means_double():
        loss = theirs(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.item()
    assert ours.loss_and_grads(*packed(ids, mask, labels), LENGTHS) == pytest.approx(loss, rel=LIMIT)


def test_a_wrapped_model_returns_the_loss_of_transformers(tmp_path: Path) -> None:
    """One call is one batch there: with another number of items to divide by as well."""
    theirs, ours = opened("qwen3_moe, normalized, some blocks dense", tmp_path, **ASKED)
    ids, mask, labels = padded()
    wrapped, items = hg.nn.wrap(ours), 40
    with float_means_double():
        expected = theirs(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=items, use_cache=False)
    expected.loss.backward()
    found = wrapped(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=items)
    found.loss.backward()
    assert relative_error(found.loss.detach(), expected.loss.detach()) <= LIMIT
    grads = {n: p.grad for n, p in theirs.named_parameters()}
    assert_equal_gradients(our_gradients(ours), in_file_names(theirs, grads), 1e-8)


@pytest.mark.parametrize("fields", [{"output_router_logits": "yes"}, ASKED | {"router_aux_loss_coef": -1}], ids=str)
def test_nonsense_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    opened("olmoe, 1 queries to a key", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))
    with pytest.raises(hg.HandgradError, match="output_router_logits must be true or false and router_aux_loss_coef"):
        hg.load(tmp_path)
