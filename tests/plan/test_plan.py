"""Plans: the paper's counts, FLOP against torch's counter, bytes, and predicted seconds."""

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

import handgrad as hg
from conftest import make_batch, make_model
from handgrad import optim
from handgrad.display.plan_table import tables
from handgrad.kernels import library
from handgrad.lora.patterns import split_names
from handgrad.model.names import block_of, without_block
from handgrad.model.passes.options import PassOptions
from handgrad.plan.estimate import make_plan
from handgrad.plan.flop import Work, flop
from handgrad.plan.memory import saved_per_token
from handgrad.plan.outline import linear_layers
from handgrad.plan.parameters import target_ranks
from handgrad.plan.timing import Forecast, Peak, best_of, predict, too_large
from handgrad.proof.oracles import count_multiply_adds
from handgrad.training.config import FinetuneOptions

COMPLETE = hg.preset("paper", n_blocks=12)


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    """torch's counter of operations does not see compiled kernels."""
    with library.disabled():
        yield


def test_counts_of_section_7() -> None:
    paper = make_plan(hg.preset("paper"))
    assert (paper.per_block, paper.total, paper.logits) == (7_087_872, 85_120_849, 38_647_633)
    assert make_plan(COMPLETE).total == 163_087_441
    assert make_plan(hg.preset("gpt2")).total == 124_439_808
    assert make_plan(hg.preset("paper"), rank=16, targets="lm_head").trainable == 816_400
    assert make_plan(COMPLETE, rank=16, targets="paper").trainable == 3_470_608
    assert make_plan(COMPLETE, rank=16, targets="c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj,lm_head").trainable == 3_175_696
    assert make_plan(hg.preset("paper", n_blocks=12, key_bias=False)).total == 163_078_225


def test_flop_match_torch_counter() -> None:
    """Attention differs: the plan counts only causal pairs, and torch does not count the forward kernel."""
    model = make_model(n_blocks=3)
    tokens, targets = make_batch(model, [16], ignored=0)
    plan = make_plan(model.config, 1, 16)
    pairs = 3 * 3 * 16 * 17 // 2  # blocks, heads, (query, key) pairs
    weights = plan.forward_flop // 2 - 8 * pairs
    assert count_multiply_adds(lambda: model.logits(tokens)) == weights
    tiles = 3 * 3 * 20 * 16 * 16  # one tile, five products, over the full square
    assert count_multiply_adds(lambda: model.loss_and_grads(tokens, targets)) == 3 * weights + tiles
    assert plan.backward_flop == 2 * (2 * weights + 20 * pairs)


@pytest.mark.parametrize(
    "targets", ["all-linear", "c_attn,lm_head", "lm_head", "transformer.h.1.mlp.c_fc", "attn.c_proj"]
)
def test_flop_of_frozen_layers_are_excluded(targets: str) -> None:
    """Where only adapters train, weight gradients and everything below the lowest adapter are skipped."""
    model = make_model(n_blocks=3)
    tokens, answers = make_batch(model, [16], ignored=0)
    hg.lora.inject(model, 2, targets=split_names([targets]))
    ranks = dict.fromkeys(hg.lora.adapters_of(model), 2)
    assert ranks == target_ranks(model.config, 2, targets)
    forward, backward = flop(model.config, Work.of(16, model.config), ranks)
    n_backward = 3 - min((int(name.split(".")[2]) for name in ranks if name != "lm_head"), default=3)
    masked = n_backward * 20 * 3 * (16 * 16 - 16 * 17 // 2)  # computed in a tile, not counted by the plan
    kernel = 8 * 3 * 3 * 16 * 17 // 2  # counted by the plan, not by torch
    # a branch computes a d twice
    branch = 16 * 2 * sum(layer.effective_weight().shape[0] for layer in hg.lora.adapters_of(model).values())
    counted = count_multiply_adds(lambda: model.loss_and_grads(tokens, answers))
    assert counted == (forward + backward) // 2 + masked - kernel + branch


def test_flop_of_rows_without_a_target_are_excluded() -> None:
    """The last block and the head compute only rows with a target."""
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [16], ignored=0)
    targets[:12] = -100
    work = Work.of_batch(targets, [16], model.config)
    assert work == Work(16, 4, {None: 16 * 17 // 2}, {None: 13 + 14 + 15 + 16})
    forward, backward = flop(model.config, work, {})
    pairs = 3 * (work.pairs[None] + work.row_pairs[None])
    tile = 3 * 16 * (20 * 16 + (8 + 20) * 4)  # heads, keys, queries; the last block's forward pass is tiled too
    counted = count_multiply_adds(lambda: model.loss_and_grads(tokens, targets))
    assert counted == (forward + backward) // 2 - (8 + 20) * pairs + tile
    assert forward + backward < sum(flop(model.config, Work.of(16, model.config), {}))


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("targets", ["", "c_attn,lm_head"])
def test_flop_of_common_prefixes_are_counted_once(targets: str, recompute: str) -> None:
    """Every row of a prefix once; the head reads it again for each target that follows it."""
    model = make_model(n_blocks=3)
    common, ends = torch.arange(8), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    rows = [torch.cat([common, end]) for end in ends]
    answers = [torch.cat([torch.full((7,), -100), x[8:], x[:1]]) for x in rows]
    batch = torch.cat(rows), torch.cat(answers), [12, 12]
    ranks: dict[str, int] = {}
    if targets:
        hg.lora.inject(model, 2, targets=split_names([targets]))
        ranks = dict.fromkeys(hg.lora.adapters_of(model), 2)
    options = PassOptions(share=True)
    pieces = model.prepare(model.pack(batch[0], batch[2]), batch[1], options=options).pieces
    work = Work.of_pieces(pieces, model.config)
    pairs, own = 8 * 9 // 2 + 2 * (9 + 10 + 11 + 12), 8 + 2 * (9 + 10 + 11 + 12)
    assert work == Work(16, 9, {None: pairs}, {None: own}, read_again=1)
    alone = replace(work, pairs={None: 0}, row_pairs={None: 0})
    planned = sum(flop(model.config, alone, ranks, recompute)) // 2
    again, layers = 0, linear_layers(model.config)  # a branch computes a d twice
    for name in ranks:
        layer = layers[without_block(name)]
        needed = 10 if name == "lm_head" else 9 if block_of(name) == 2 and not layer.every_row else 16
        again += needed * 2 * layer.f_in
    run = lambda: model.loss_and_grads(*batch, share=True, recompute=recompute)  # noqa: E731
    assert count_multiply_adds(run, batched=False) == planned + again


def test_work_of_a_batch() -> None:
    causal, both_ways = hg.preset("nano"), hg.preset("nano", causal=False)
    even = torch.zeros(3, 8, dtype=torch.int64)
    assert Work.of_batch(even, None, causal) == Work.of(8, causal).times(3)
    uneven = torch.zeros(6, dtype=torch.int64)
    assert Work.of_batch(uneven, [5, 1], causal) == Work(6, 6, {None: 16}, {None: 16})
    assert Work.of_batch(uneven, [5, 1], both_ways) == Work(6, 6, {None: 26}, {None: 26})


def test_bytes() -> None:
    plan = make_plan(hg.preset("gpt2"), 4, 1024)
    assert plan.bytes_weights == plan.bytes_gradients == 4 * 124_439_808
    assert plan.bytes_optimizer == 8 * 124_439_808
    assert plan.bytes_saved == 4 * 1024 * 12 * saved_per_token(plan.config)  # one piece of 1024 tokens at a time
    least = make_plan(hg.preset("gpt2"), 4, 1024, recompute="blocks", update_inside=True)
    assert least.bytes_gradients == 4 * (39_383_808 + 7_087_872)
    assert least.bytes_peak < plan.bytes_peak and least.backward_flop > plan.backward_flop
    adapted = make_plan(hg.preset("gpt2"), rank=16)
    assert adapted.bytes_optimizer == 8 * adapted.adapters
    two_bytes = make_plan(hg.preset("gpt2"), 1, 16, "bfloat16")
    assert two_bytes.bytes_gradients == 2 * 124_439_808 and two_bytes.bytes_optimizer == 8 * 124_439_808
    assert two_bytes.bytes_saved + two_bytes.bytes_temporary == 8 * 50_257 * 768  # the embedding's update


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("how", ["all", "adapters", "kept"])
def test_state_of_muon(family: str, how: str) -> None:
    """One copy of a matrix of the blocks, two of everything else: as many numbers as a real step stores."""
    preset = hg.preset("nano" if family == "gpt2" else "nano-llama", n_blocks=2)
    model = hg.GPT(preset)
    ranks = {}
    if how != "all":
        kept = ("lm_head",) if how == "kept" else ()
        ranks = dict.fromkeys(hg.lora.inject(model, 3, modules_to_save=kept), 3)
    extra = sum(p.numel() for p in model.head.parameters()) if how == "kept" else 0
    make = optim.maker("muon", 1e-3, 0.0, (0.9, 0.99), matrices=optim.matrices(model))
    optimizer = make(model.parameters())
    tokens = torch.randint(256, (2, 8))
    model.loss_and_grads(tokens, tokens)
    optim.step(optimizer, 1.0)
    stored = sum(x.numel() for state in optimizer.state.values() for x in state.values() if x.ndim)
    plan = make_plan(model.config, ranks=ranks, extra=extra, optimizer="muon")
    assert plan.bytes_optimizer == 4 * stored < make_plan(model.config, ranks=ranks, extra=extra).bytes_optimizer
    of_maps = [x.shape for p, maps in optim.matrices(model).items() if p.requires_grad for x in maps.of(p)]
    assert plan.update_flop == sum(5 * (4 * a * a * b + 2 * a**3) for a, b in map(sorted, of_maps))


def test_predicted_seconds_match_a_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes dominated by call overhead and by the dtype. Prediction and measurement alternate and the best of each is
    compared, in processor time, because the machine may be busy."""
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    for dtype, blocks in ((torch.float32, 6), (torch.bfloat16, 3)):
        model = hg.GPT(hg.preset("nano", n_blocks=blocks), dtype=dtype)
        plan = make_plan(model.config, 4, 32, str(dtype).removeprefix("torch."))
        tokens = torch.randint(256, (4, 32))
        rounding = optim.StochasticRounding(0, model.parameters())
        optimizer = optim.maker("AdamW", 1e-3, 0.0, (0.9, 0.99), rounding)(model.parameters())

        def step(model: hg.GPT = model, tokens: torch.Tensor = tokens, optimizer: Any = optimizer) -> None:
            model.loss_and_grads(tokens, tokens)
            optimizer.step()
            optimizer.zero_grad()

        pairs = [(predict(plan, 0.1), best_of(step, 0.1)) for _ in range(4)]
        predicted, measured = (min(x) for x in zip(*pairs, strict=True))
        assert 0.5 < predicted / measured < 2, (predicted, measured, dtype)


def test_model_too_large_for_a_trial_is_predicted() -> None:
    plan = make_plan(hg.preset("gpt2", d_model=30_000), tokens=1)  # a block alone has 10.8 G parameters
    assert 1e-3 < predict(plan) < 1e6 and too_large(plan) and not too_large(make_plan(hg.preset("gpt2")))


def test_mfu_is_at_most_one() -> None:
    peak = Peak("float32")
    assert 0 < peak.mfu(1e6, 1.0) < 1
    assert peak.mfu(peak.rate / 2, 1.0) == pytest.approx(0.5)
    assert peak.mfu(3 * peak.rate, 1.0) == 1.0  # the machine was busy when the peak was measured
    assert peak.mfu(peak.rate / 2, 1.0) == pytest.approx(0.5), "the higher peak is remembered"


def test_targets_with_commas_or_repeated() -> None:
    config = hg.preset("nano")
    for targets in ("c_attn,mlp.c_fc", ("c_attn", "mlp.c_fc"), ("c_attn,mlp.c_fc", "c_attn")):
        assert make_plan(config, rank=4, targets=targets).trainable == 4 * 4 * (128 + 384 + 128 + 512)
    assert make_plan(config, rank=4).targets == ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")
    assert make_plan(config, rank=4, targets="paper").targets == (
        "q",
        "k",
        "v",
        "attn.c_proj",
        "c_fc",
        "mlp.c_proj",
        "lm_head",
    )
    assert split_names(["c_attn, lm_head", "h.[0,1].*", "h.{0,2}", ""]) == ("c_attn", "lm_head", "h.[0,1].*", "h.{0,2}")
    by_pattern = make_plan(config, rank=4, targets="c_proj").trainable  # matches two layers, as in finetune
    assert by_pattern == make_plan(config, rank=4, targets="attn.c_proj,mlp.c_proj").trainable
    assert FinetuneOptions.parse({"targets": ("c_attn,lm_head",)}).adapter.targets == ("c_attn", "lm_head")


def test_bad_input() -> None:
    config = hg.preset("nano")
    for arguments, message in [
        ({"dtype": "int8"}, "unknown dtype"),
        ({"tokens": 65}, "do not fit into a context of 64"),
        ({"targets": "c_attn"}, "give rank"),
        ({"rank": 4, "targets": "attention"}, "no linear layer matches attention"),
        ({"rank": 4, "targets": "q,attention"}, "no linear layer matches attention"),
        ({"recompute": "some"}, "none or blocks"),
        ({"rank": 4, "targets": "c_attn,q"}, "c_attn is q, k and v together"),
        ({"rank": 4, "targets": ","}, "no target layers"),
        ({"ranks": {"model.layers.0.mlp.up_proj": 2}}, "no linear layer model.layers.0.mlp.up_proj"),
        ({"ranks": {"transformer.h.4.mlp.c_fc": 2}}, "no linear layer transformer.h.4.mlp.c_fc"),
        ({"batch": 0}, "at least 1"),
    ]:
        with pytest.raises(hg.HandgradError, match=message):
            make_plan(config, **arguments)


@pytest.mark.parametrize("width", [40, 60, 100])
def test_tables_show_every_digit_at_any_width(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    plan = make_plan(hg.preset("nano"))
    for table in tables(plan, Forecast(1.0, 100), "nano", width):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{plan.total:,}" in text and "65,536" in text
