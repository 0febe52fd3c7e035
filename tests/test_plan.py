"""handgrad plan: the paper's counts, and its own model of cost against what torch counts."""

import time
from typing import Any

import pytest
import torch

import handgrad as hg
from conftest import make_batch, make_model
from handgrad.adapters.patterns import split_names
from handgrad.plan.estimate import make_plan
from handgrad.plan.flop import Work, flop
from handgrad.plan.memory import saved_per_token
from handgrad.plan.parameters import lora_targets, parameters, target_ranks
from handgrad.plan.timing import Peak, best_of, predict
from handgrad.proof.oracles import count_multiply_adds
from handgrad.training.config import FinetuneOptions

COMPLETE = hg.preset("paper", n_blocks=12)


def test_every_count_of_section_7() -> None:
    paper = make_plan(hg.preset("paper"))
    assert (paper.per_block, paper.total, paper.logits) == (7_087_872, 85_120_849, 38_647_633)
    assert make_plan(COMPLETE).total == 163_087_441
    assert make_plan(hg.preset("gpt2")).total == 124_439_808
    assert make_plan(hg.preset("paper"), rank=16, targets="lm_head").trainable == 816_400
    assert make_plan(COMPLETE, rank=16, targets="paper").trainable == 3_470_608
    assert make_plan(COMPLETE, rank=16, targets="c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj,lm_head").trainable == 3_175_696
    assert make_plan(hg.preset("paper", n_blocks=12, key_bias=False)).total == 163_078_225


@pytest.mark.parametrize(
    "shape", [{}, {"tied": False, "logits_bias": True}, {"key_bias": False}, {"d_rho": 3, "d_head": 5}, {"d_hidden": 7}]
)
def test_counts_are_those_of_the_real_model(shape: dict[str, object]) -> None:
    model = make_model(n_blocks=3, **shape)
    assert make_plan(model.config).total == sum(p.numel() for p in model.parameters())
    assert (
        sum(p.count * (3 if p.layer == "block" else 1) for p in parameters(model.config))
        == make_plan(model.config).total
    )


def test_flop_are_those_torch_counts() -> None:
    """Attention aside: a causal row visits only what it can see, and torch does not count that kernel."""
    model = make_model(n_blocks=3)
    tokens, targets = make_batch(model, [16], ignored=0)
    plan = make_plan(model.config, 1, 16)
    pairs = 3 * 3 * 16 * 17 // 2  # blocks, heads, what a token and one before it make
    weights = plan.forward_flop // 2 - 8 * pairs
    assert count_multiply_adds(lambda: model.logits(tokens)) == weights
    tiles = 3 * 3 * 20 * 16 * 16  # one tile, five products, over the whole square
    assert count_multiply_adds(lambda: model.loss_and_grads(tokens, targets)) == 3 * weights + tiles
    assert plan.backward_flop == 2 * (2 * weights + 20 * pairs)


@pytest.mark.parametrize(
    "targets", ["all-linear", "c_attn,lm_head", "lm_head", "transformer.h.1.mlp.c_fc", "attn.c_proj"]
)
def test_flop_of_frozen_layers_are_not_counted(targets: str) -> None:
    """Where only adapters train, weight gradients and everything below the lowest adapter are skipped."""
    model = make_model(n_blocks=3)
    tokens, answers = make_batch(model, [16], ignored=0)
    hg.lora.inject(model, 2, targets=split_names([targets]))
    ranks = dict.fromkeys(hg.lora.adapters_of(model), 2)
    assert ranks == target_ranks(model.config, 2, targets)
    forward, backward = flop(model.config, Work.of([16]), ranks)
    walked = 3 - min((int(name.split(".")[2]) for name in ranks if name != "lm_head"), default=3)
    masked = walked * 20 * 3 * (16 * 16 - 16 * 17 // 2)  # computed in a tile, not counted by the plan
    kernel = 8 * 3 * 3 * 16 * 17 // 2  # counted by the plan, not by torch
    # A branch computes a d and Δ uᵗ twice, and torch does not see its two in-place products, which are as large. The
    # lowest c_attn sends no error signal on: it computes Δ uᵗ once, and has one in-place product.
    branch = 16 * 2 * (12 - 36) if "transformer.h.0.attn.c_attn" in ranks else 0
    counted = count_multiply_adds(lambda: model.loss_and_grads(tokens, answers))
    assert counted == (forward + backward) // 2 + masked - kernel + branch


def test_flop_of_rows_without_a_target_are_not_counted() -> None:
    """In the last block and the head only rows that have a target are computed."""
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [16], ignored=0)
    targets[:12] = -100
    work = Work.of_batch(targets, [16])
    assert work == Work(16, 4, 16 * 17 // 2, 13 + 14 + 15 + 16)
    forward, backward = flop(model.config, work, {})
    pairs = 3 * (work.pairs + work.row_pairs)
    tile = 3 * 16 * (20 * 16 + (8 + 20) * 4)  # heads, keys, queries; the last block's forward pass is in tiles as well
    counted = count_multiply_adds(lambda: model.loss_and_grads(tokens, targets))
    assert counted == (forward + backward) // 2 - (8 + 20) * pairs + tile
    assert forward + backward < sum(flop(model.config, Work.of([16]), {}))


def test_the_work_of_a_batch() -> None:
    even = torch.zeros(3, 8, dtype=torch.int64)
    assert Work.of_batch(even, None) == Work.of([8, 8, 8])
    uneven = torch.zeros(6, dtype=torch.int64)
    assert Work.of_batch(uneven, [5, 1]) == Work.of([5, 1]) == Work(6, 6, 16, 16)
    assert Work.of_batch(uneven, [5, 1], causal=False) == Work.of([5, 1], causal=False) == Work(6, 6, 26, 26)


def test_saved_numbers_are_those_the_blocks_keep() -> None:
    model = make_model(n_blocks=2, dtype=torch.float32)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with torch.no_grad():
        saved = model.forward_pass(model.pieces(tokens, tokens, None)).blocks
    kept = sum(x.numel() for (s,) in saved for x in (*s.norm_1, *s.heads, *s.norm_5, s.a_7))
    assert kept == 16 * 2 * saved_per_token(model.config)


def test_bytes() -> None:
    plan = make_plan(hg.preset("gpt2"), 4, 1024)
    assert plan.bytes_weights == plan.bytes_gradients == 4 * 124_439_808
    assert plan.bytes_optimizer == 8 * 124_439_808
    assert plan.bytes_saved == 4 * 1024 * 12 * saved_per_token(plan.config)  # one piece of 1024 tokens at a time
    lean = make_plan(hg.preset("gpt2"), 4, 1024, recompute="blocks", update_inside=True)
    assert lean.bytes_gradients == 4 * (39_383_808 + 7_087_872)
    assert lean.bytes_peak < plan.bytes_peak and lean.backward_flop > plan.backward_flop
    adapted = make_plan(hg.preset("gpt2"), rank=16)
    assert adapted.bytes_optimizer == 8 * adapted.adapters


def test_predicted_seconds_are_those_of_a_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes of which bare matrix products tell neither the fixed cost of a call nor the dtype. Prediction and
    measurement take turns, the best of each counts, and the clock is the processor's: the machine may be busy."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    for dtype, blocks in ((torch.float32, 6), (torch.bfloat16, 3)):
        model = hg.GPT(hg.preset("nano", n_blocks=blocks), dtype=dtype)
        plan = make_plan(model.config, 4, 32, str(dtype).removeprefix("torch."))
        tokens = torch.randint(256, (4, 32))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(model: hg.GPT = model, tokens: torch.Tensor = tokens, optimizer: Any = optimizer) -> None:
            model.loss_and_grads(tokens, tokens)
            optimizer.step()
            optimizer.zero_grad()

        pairs = [(predict(plan, 0.1), best_of(step, 0.1)) for _ in range(4)]
        predicted, measured = (min(x) for x in zip(*pairs, strict=True))
        assert 0.5 < predicted / measured < 2, (predicted, measured, dtype)


def test_a_model_too_large_to_try_is_predicted_all_the_same() -> None:
    plan = make_plan(hg.preset("gpt2", d_model=30_000), tokens=1)  # a block alone has 10.8 G parameters
    assert 1e-3 < predict(plan) < 1e6


def test_a_share_of_the_peak_is_never_above_one() -> None:
    peak = Peak("float32")
    assert 0 < peak.share(1e6, 1.0) < 1
    assert peak.share(peak.rate / 2, 1.0) == pytest.approx(0.5)
    assert peak.share(3 * peak.rate, 1.0) == 1.0  # the machine was busy when the peak was measured
    assert peak.share(peak.rate / 2, 1.0) == pytest.approx(0.5), "and now it is known better"


def test_targets_by_comma_or_one_by_one() -> None:
    config = hg.preset("nano")
    for targets in ("c_attn,mlp.c_fc", ("c_attn", "mlp.c_fc"), ("c_attn,mlp.c_fc", "c_attn")):
        assert make_plan(config, rank=4, targets=targets).trainable == 4 * 4 * (128 + 384 + 128 + 512)
    assert split_names(["c_attn, lm_head", "h.[0,1].*", "h.{0,2}", ""]) == ("c_attn", "lm_head", "h.[0,1].*", "h.{0,2}")
    by_pattern = make_plan(config, rank=4, targets="c_proj").trainable  # the end of two names, as in finetune
    assert by_pattern == make_plan(config, rank=4, targets="attn.c_proj,mlp.c_proj").trainable
    assert FinetuneOptions.parse({"targets": ("c_attn,lm_head",)}).adapter.targets == ("c_attn", "lm_head")


def test_cache_per_token() -> None:
    assert make_plan(hg.preset("gpt2")).bytes_cache_per_token == 4 * 18_432


def test_bad_input() -> None:
    config = hg.preset("nano")
    for arguments, message in [
        ({"dtype": "int8"}, "unknown dtype"),
        ({"tokens": 65}, "do not fit into a context of 64"),
        ({"targets": "c_attn"}, "give a rank"),
        ({"rank": 4, "targets": "attention"}, "no linear layer matches attention"),
        ({"rank": 4, "targets": "q,attention"}, "no linear layer is called 'attention'"),
        ({"recompute": "some"}, "none or blocks"),
        ({"rank": 4, "targets": "c_attn,q"}, "c_attn is q, k and v together"),
        ({"batch": 0}, "at least 1"),
    ]:
        with pytest.raises(hg.HandgradError, match=message):
            make_plan(config, **arguments)
    assert lora_targets("all-linear") == ("c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
