"""handgrad plan: the paper's counts, and its own model of cost against what torch counts."""

import pytest
import torch

import handgrad as hg
from conftest import make_batch, make_model
from handgrad.plan import Rates, lora_targets, make_plan, parameters, saved_per_token
from handgrad.verify import count_multiply_adds

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
    adapted = make_plan(model.config, 1, 16, rank=2)
    assert adapted.backward_flop == 2 * (weights + 20 * pairs + 2 * 16 * adapted.adapters)


def test_saved_numbers_are_those_the_blocks_keep() -> None:
    model = make_model(n_blocks=2, dtype=torch.float32)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with torch.no_grad():
        saved = model.down(model.pieces(tokens, tokens, None)).blocks
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


def test_seconds_come_from_measured_rates() -> None:
    rates = Rates.measure(0.05)
    assert rates.flop_per_second > 1e8 and rates.bytes_per_second > 1e8
    small, large = (rates.seconds(make_plan(hg.preset("gpt2"), b, 64)) for b in (1, 8))
    assert 0 < small < large


def test_cache_per_token() -> None:
    assert make_plan(hg.preset("gpt2")).bytes_cache_per_token == 4 * 18_432


def test_bad_input() -> None:
    config = hg.preset("nano")
    for arguments, message in [
        ({"dtype": "int8"}, "unknown dtype"),
        ({"tokens": 65}, "do not fit into a context of 64"),
        ({"targets": "c_attn"}, "give a rank"),
        ({"rank": 4, "targets": "attention"}, "no linear layer is called 'attention'"),
        ({"rank": 4, "targets": "c_attn,q"}, "c_attn is q, k and v together"),
        ({"batch": 0}, "at least 1"),
    ]:
        with pytest.raises(hg.HandgradError, match=message):
            make_plan(config, **arguments)
    assert lora_targets("all-linear") == ("c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
