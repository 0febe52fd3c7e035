"""Plans of every family: parameters and bytes against real models, FLOP against torch's counter."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import handgrad as hg
from conftest import handgrad, plan_of
from handgrad.families import FAMILIES
from handgrad.inference.kv_cache import Cache
from handgrad.kernels import library
from handgrad.lora.patterns import split_names
from handgrad.model.config import ModelConfig
from handgrad.model.names import block_of, without_block
from handgrad.model.precision import why_not_mixed
from handgrad.plan.estimate import make_plan
from handgrad.plan.flop import Work, flop
from handgrad.plan.memory import saved, saved_per_token
from handgrad.plan.outline import kinds_of_blocks, linear_layers, with_blocks
from handgrad.plan.parameters import parameters, target_ranks
from handgrad.plan.timing import predict
from handgrad.proof.oracles import count_multiply_adds

TOKENS = 16
SHAPE = {"n_vocab": 11, "n_context": TOKENS, "d_model": 12, "n_heads": 6, "n_kv_heads": 3, "n_blocks": 3, "d_hidden": 7}
LLAMA = hg.preset("nano-llama", **SHAPE)
FUSED = "fused"  # a family that stores q, k and v in one matrix, and gate and up in another
GPT2: dict[str, Any] = {"family": "gpt2", **{x: getattr(hg.preset("gpt2"), x) for x in (
    "norm", "positions", "gated", "activation", "qkv_bias", "out_bias", "mlp_bias")}, "n_kv_heads": None}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2, untied, with a bias of the logits": {**GPT2, "tied": False, "logits_bias": True},
    "gpt2 without biases of keys": {**GPT2, "key_bias": False, "d_rho": 3, "d_head": 5},
    "llama": {},
    "llama with biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": False},
    "one key head": {"n_kv_heads": 1},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "window": 3, "windowed": (2,)},
    "qwen3": {"family": "qwen3", "qk_norm": True, "d_rho": 4, "d_head": 6},
    "mistral": {"family": "mistral", "window": 5},
    "smollm3": {"family": "smollm3", "unrotated": (1,), "window": 4, "windowed": (1,)},
    "gemma": {"family": "gemma3_text", "gain_offset": 1.0, "qk_norm": True, "activation": "gelu_tanh", "d_rho": 4,
              "d_head": 4, "window": 3, "windowed": (0, 1), "local_rope_base": 50.0, "embedding_scale": 3.0,
              "logit_cap": 2.0},
    "norms after branches": {"family": "olmo2", "qk_norm": True, "qk_norm_joint": True, "tied": False},
    "parallel": {"family": "cohere", "norm": "layer", "norm_bias": False, "parallel": True, "rotary_neighbors": True},
    "parallel, two norms": {**GPT2, "family": "gpt_neox", "positions": "rotary", "parallel": True, "qkv_by_head": True,
                            "n_heads": 3, "rotary_width": 2, "tied": False},
    "scaled": {"family": "granite", "residual_scale": 0.3, "embedding_scale": 2.0, "logit_scale": 0.2},
    "lfm2": {"family": "lfm2", "qk_norm": True, "conv_blocks": (0, 2), "conv_bias": True},
    "fused": {"family": FUSED, "tied": False},
    "fused with biases": {"family": FUSED, "qkv_bias": True, "mlp_bias": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _counted() -> Iterator[None]:
    """torch's counter of operations does not see compiled kernels."""
    with library.disabled():
        yield


@pytest.fixture(autouse=True)
def _fused_family(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = FAMILIES["llama"]
    separate = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.expand")
    names = {ours: name for ours, name in llama.names.items() if ours not in separate}
    names |= {"attn.qkv": "qkv_proj", "mlp.gate_expand": "gate_up_proj"}
    monkeypatch.setitem(FAMILIES, FUSED, replace(llama, name=FUSED, names=names))


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return replace(LLAMA, **CONFIGS[request.param])


def test_parameters_match_the_model(config: ModelConfig) -> None:
    model = hg.GPT(config)
    rows, plan = parameters(config), make_plan(config)
    assert plan.total == sum(p.numel() for p in model.parameters())
    assert plan.per_block == sum(p.numel() for p in model.blocks[1].parameters())
    assert plan.bytes_weights == sum(p.nbytes for p in model.parameters())
    counted: dict[tuple[bool, str], int] = {}
    for row in rows:
        key = row.layer == "conv block", row.name
        counted[key] = counted.get(key, 0) + row.count
    conv = {name: block_of(name) in config.conv_blocks for name, _ in model.named_parameters()}
    assert counted == {(conv[name], without_block(name)): p.numel() for name, p in model.named_parameters()}
    assert len({(row.layer, row.symbol) for row in rows}) == len(rows)
    f_in_f_out = {row.symbol: row.shape for row in rows}
    assert f_in_f_out["w_k"] == (12, config.kv_heads * config.query_width)
    assert f_in_f_out["w_8"] == (7, 12)


def named(config: ModelConfig, layer: str) -> str:
    """The family's name of a layer, or of the one that holds it; other targets stay."""
    fused = {"attn.v": "attn.qkv", "mlp.expand": "mlp.gate_expand"}
    names = config.table.names
    return names.get(layer) or names.get(fused.get(layer, ""), layer.replace("lm_head", names["head"]))


@pytest.mark.parametrize("layer", ["all-linear", "lm_head", r".*\.1\..*|lm_head", "attn.v", "mlp.expand"])
@pytest.mark.some_cases(4)
def test_adapters_match_the_model(config: ModelConfig, layer: str) -> None:
    targets = named(config, layer)
    model = hg.GPT(config)
    hg.lora.inject(model, 2, targets=split_names([targets]))
    ranks = dict.fromkeys(hg.lora.adapters_of(model), 2)
    assert target_ranks(config, 2, targets) == ranks
    factors = sum(p.numel() for adapter in hg.lora.adapters_of(model).values() for p in adapter.factors())
    plan = make_plan(config, rank=2, targets=targets)
    assert plan.trainable == plan.adapters == factors
    assert plan.bytes_weights == sum(p.nbytes for p in model.parameters())


Batch = tuple[torch.Tensor, torch.Tensor, list[int]]  # tokens, targets, lengths


def batches(config: ModelConfig) -> tuple[Batch, Batch]:
    """Two sequences, with all targets and with some."""
    tokens = torch.randint(config.n_vocab, (TOKENS,))
    some = tokens.clone()
    some[:4], some[-2:] = -100, -100
    return (tokens, tokens, [11, 5]), (tokens, some, [11, 5])


def products_alone(work: Work) -> Work:
    """Without attention."""
    return replace(work, pairs=dict.fromkeys(work.pairs, 0), row_pairs=dict.fromkeys(work.row_pairs, 0))


def counted_products(model: hg.GPT, batch: Batch, **options: Any) -> int:
    """Multiply-adds of a step without attention."""
    return count_multiply_adds(lambda: model.loss_and_grads(*batch, **options), batched=False)


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.some_cases(8)
def test_products_of_all_weights_match_torch_counter(config: ModelConfig, recompute: str) -> None:
    for batch in batches(config):
        work = products_alone(Work.of_batch(*batch[1:], config))
        planned = sum(flop(config, work, {}, recompute))
        assert 2 * counted_products(hg.GPT(config), batch, recompute=recompute) == planned


@pytest.mark.parametrize(
    "targets", ["all-linear", "lm_head", r".*\.1\..*", r".*\.2\..*|lm_head", "attn.v", "mlp.contract"]
)
@pytest.mark.some_cases(10)
def test_products_of_adapters_match_torch_counter(config: ModelConfig, targets: str) -> None:
    """A layer with an adapter computes a d twice."""
    layers = linear_layers(config)
    for batch in batches(config):
        model = hg.GPT(config)
        hg.lora.inject(model, 2, targets=split_names([named(config, targets)]))
        blocks = {name: block_of(name) for name in hg.lora.adapters_of(model)}
        work = products_alone(Work.of_batch(*batch[1:], config))
        again = 0
        for name, i in blocks.items():
            layer = layers[without_block(name)]
            rows = work.tokens if layer.every_row or i in (0, 1) else work.rows
            again += rows * 2 * layer.f_in
        assert counted_products(model, batch) == sum(flop(config, work, dict.fromkeys(blocks, 2))) // 2 + again


def test_pairs_are_the_entries_of_the_attention_maps(config: ModelConfig) -> None:
    every, some = batches(config)
    trace = hg.trace(hg.GPT(config, dtype="float64"), *every)
    last = config.n_blocks - 1
    maps = {i: trace[f"blocks.{i}.rho"] != 0 for i in range(config.n_blocks) if i not in config.conv_blocks}
    for batch in (every, some):
        work = Work.of_batch(*batch[1:], config)
        every = config.parallel  # then the last block computes every row
        needed = {i: x[:, batch[1] != -100] if i == last and not every else x for i, x in maps.items()}
        entries = int(sum(x.sum() for x in needed.values()))
        forward, backward = flop(config, work, {})
        products = flop(config, products_alone(work), {})
        d_rho, d_h = config.query_width, config.value_width
        assert forward - products[0] == 2 * entries * (d_rho + d_h)
        assert backward - products[1] == 2 * entries * (3 * d_rho + 2 * d_h)


@pytest.mark.parametrize("n_kv_heads", [6, 3, 2, 1])
def test_products_of_attention_match_torch_counter(n_kv_heads: int) -> None:
    """Without a mask every entry of a tile is needed; the forward kernel is counted only where it works in tiles."""
    config = replace(LLAMA, causal=False, n_kv_heads=n_kv_heads, d_rho=4, d_head=6)
    model = hg.GPT(config)
    tokens = torch.randint(11, (2, 8))
    work = Work.of_batch(tokens, None, config)
    planned = sum(flop(config, work, {})) - sum(flop(config, products_alone(work), {}))
    assert count_multiply_adds(lambda: model.loss_and_grads(tokens, tokens), batched=True) == planned // 2
    assert planned == 2 * 3 * 6 * 128 * (4 * 4 + 3 * 6)


def storages(saved: Any) -> dict[int, int]:
    """Bytes of every storage in nested tuples and lists."""
    if isinstance(saved, torch.Tensor):
        return {saved.untyped_storage().data_ptr(): saved.untyped_storage().nbytes()}
    return {key: size for part in saved or () for key, size in storages(part).items()}


@pytest.mark.skipif(why_not_mixed() is not None, reason=f"no mixed precision: {why_not_mixed()}")
@pytest.mark.some_cases(3)
def test_saved_bytes_match_the_blocks_in_mixed_precision(config: ModelConfig) -> None:
    model = hg.GPT(config, precision="mixed")
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with torch.no_grad():
        state = model.forward_pass(model.prepare(model.pack(tokens), tokens))
    for i, (block,) in enumerate(state.blocks):
        assert sum(storages(block).values()) == 4 * 16 * saved_per_token(config, i, mixed=True)
    assert sum(storages([state.blocks, state.rotations]).values()) == 4 * saved(config, 2, 8, 16, "none", mixed=True)


@pytest.mark.some_cases(3)
def test_saved_numbers_match_the_blocks(config: ModelConfig) -> None:
    model = hg.GPT(config, dtype="float64")
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with torch.no_grad():
        state = model.forward_pass(model.prepare(model.pack(tokens), tokens))
    for i, (block,) in enumerate(state.blocks):
        assert sum(storages(block).values()) == 8 * 16 * saved_per_token(config, i)
    assert sum(storages([state.blocks, state.rotations]).values()) == 8 * saved(config, 2, 8, 16, "none")


def test_saved_numbers_by_name() -> None:
    """a_1, a_5 and their statistics; q, k, v, a_3 and the log-sum-exp; gate and up."""
    assert saved_per_token(LLAMA) == 2 * (12 + 1) + (12 + 6 + 6 + 12 + 6) + 2 * 7
    normed = replace(LLAMA, **CONFIGS["qwen3"])  # also q, k and their statistics before the norms
    assert saved_per_token(normed) == 2 * (12 + 1) + (24 + 12 + 18 + 36 + 6) + (24 + 6 + 12 + 3) + 2 * 7
    assert saved_per_token(replace(LLAMA, family=FUSED)) == saved_per_token(LLAMA)


def test_cache_per_token(config: ModelConfig) -> None:
    cache = Cache(hg.GPT(config))
    cache.reserve(cache.add(), config.n_context)
    states = len(config.conv_blocks) * (config.conv_taps - 1) * config.d_model  # kept after every 64 tokens
    assert make_plan(config).bytes_cache_per_token == cache.nbytes // config.n_context + 4 * -(-states // 64)


def test_temporary_buffers_of_a_gate() -> None:
    wide = replace(
        LLAMA, d_hidden=1000
    )  # Δ_8, a_8 and the error signals of gate and up, twice if they are stored together
    least = make_plan(wide, 1, 1)
    assert least.bytes_temporary - make_plan(replace(wide, d_hidden=999), 1, 1).bytes_temporary == 4 * 4
    fused = replace(wide, family=FUSED)
    assert make_plan(fused, 1, 1).bytes_temporary - least.bytes_temporary == 4 * 2000


def test_kinds_of_blocks() -> None:
    config = replace(LLAMA, n_blocks=4, family="smollm3", unrotated=(3,), window=4, windowed=(1, 3))
    assert kinds_of_blocks(config) == {0: 2, 1: 1, 3: 1}
    picked = with_blocks(config, (0, 3, 1))
    assert (picked.n_blocks, picked.unrotated, picked.windowed) == (3, (1,), (1, 2))
    assert kinds_of_blocks(LLAMA) == {0: 3}


@pytest.mark.parametrize("rank", [0, 300])
@pytest.mark.some_cases(4)
def test_seconds_of_any_family_are_predicted(config: ModelConfig, rank: int) -> None:
    plan = make_plan(config, 1, TOKENS, rank=rank, targets="paper" if rank else ())
    assert 1e-5 < predict(plan, 0.0) < 10


def test_counts_of_known_models() -> None:
    """The numbers of parameters that Hugging Face reports for these models."""
    assert make_plan(hg.preset("smollm2-shape")).total == 134_515_008
    assert make_plan(hg.preset("tinyllama-shape")).total == 1_100_048_384
    plan = make_plan(hg.preset("smollm2-shape"), rank=16)
    assert plan.targets == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert plan.trainable == 30 * 16 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)) == 4_884_480
    assert plan.bytes_cache_per_token == 4 * 30 * 3 * (64 + 64)


def test_parts_and_the_papers_targets() -> None:
    fused = replace(LLAMA, family=FUSED)
    apart = make_plan(LLAMA, rank=2, targets="paper")
    assert make_plan(fused, rank=2, targets="paper").trainable == apart.trainable
    assert apart.trainable == make_plan(LLAMA, rank=2, targets="all-linear,lm_head").trainable
    assert (
        make_plan(fused, rank=2, targets="gate,q").trainable
        == make_plan(LLAMA, rank=2, targets="gate_proj,q_proj").trainable
    )
    with pytest.raises(hg.HandgradError, match=r"gate_up_proj is gate and up together"):
        make_plan(fused, rank=2, targets="up,gate_up_proj")
    with pytest.raises(hg.HandgradError, match=r"no linear layer matches q; .*q_proj"):
        make_plan(LLAMA, rank=2, targets="q")


def test_command(tmp_path: Path) -> None:
    """Presets, folders and adapters of a Llama."""
    assert plan_of("--model", "smollm2-shape")["total"] == 134_515_008
    model = hg.GPT(LLAMA)
    hg.save(model, tmp_path / "llama")
    whole = plan_of("--model", tmp_path / "llama")
    assert whole["total"] == sum(p.numel() for p in model.parameters())
    assert whole["config"]["rope_scaling"]["rope_type"] == "default"
    some = plan_of("--model", tmp_path / "llama", "--rank", "2", "--targets", "q_proj,gate_proj")
    assert some["trainable"] == 3 * 2 * (12 + 12 + 12 + 7)
    model = hg.load(tmp_path / "llama")
    hg.lora.inject(model, 2, targets=("q_proj", "gate_proj"))
    hg.lora.save(model, tmp_path / "adapter")
    assert plan_of("--model", tmp_path / "adapter")["backward_flop"] == some["backward_flop"]
    shown = handgrad("plan", "--model", tmp_path / "llama", "--rank", "1")
    assert shown.returncode == 0 and "3 blocks" in shown.stdout
    assert "trainable parameters" in shown.stdout
