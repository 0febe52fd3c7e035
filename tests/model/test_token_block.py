"""All blocks in one call, for single new tokens: equal to the blocks one by one, of every family, adapted or packed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import ROUNDING, perturb
from families.members import DISTINCT, transformers_model
from handgrad.inference.kv_cache import Cache
from handgrad.inference.token_block import describe
from handgrad.kernels import library
from handgrad.model.block import Block
from handgrad.model.gpt import GPT
from handgrad.model.passes.arguments import Pass
from handgrad.model.steps import UnknownStep, require_block
from handgrad.model.storage.quantize import quantize
from handgrad.proof.oracles import relative_error

LENGTHS = [3, 1, 9]
pytestmark = pytest.mark.skipif(library.load(torch.float32) is None, reason="no C compiler: there are no kernels")


def both_ways(model: GPT) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a_10 of the last block for one new token of each sequence, and the new keys: in one call, and block by block."""
    results = []
    for at_once in (True, False):
        torch.manual_seed(0)
        cache = Cache(model)
        slots = [cache.add() for _ in LENGTHS]
        for new in (list(zip(slots, LENGTHS, strict=True)), [(slot, 1) for slot in slots]):
            step = cache.step(new)
            ids = torch.randint(model.config.n_vocab, (step.n,))
            rotations = model.rotations(step.positions, [99] * len(new), counts=[count for _, count in new])
            a = model.embeddings(ids, step.positions)
            if at_once and step.places is not None:
                blocks = describe(model)
                assert blocks is not None
                blocks.forward(a, step.places, rotations[0] if rotations else None)
            else:
                for i, block in enumerate(model.blocks):
                    with model.weights(block, generating=True) as weights:
                        a = block.forward(a, Pass(rotations=rotations, cache=step.block(i), weights=weights))[0]
            step.finish()
        pool = slots[0].pool
        assert pool is not None
        results += [a, pool.k]
    return results[0], results[2], results[1], results[3]


def assert_equal(model: GPT, limit: float) -> None:
    with torch.no_grad():
        at_once, one_by_one, keys, expected = both_ways(model)
    assert relative_error(at_once, one_by_one) <= limit and relative_error(keys, expected) <= limit
    assert torch.isfinite(at_once).all()


def known(block: Block) -> bool:
    """Whether the steps of a block are those that the kernel computes."""
    try:
        require_block(block.steps(), "this test")
    except UnknownStep:
        return False
    return True


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.some_cases(10)
def test_every_family(name: str, dtype: str, tmp_path: Path) -> None:
    transformers_model(name).save_pretrained(tmp_path / "m")
    model = hg.load(tmp_path / "m", dtype=dtype)
    if model.config.activation not in ("silu", "gelu_tanh") or not all(map(known, model.blocks)):
        assert describe(model) is None
        return
    assert_equal(model, ROUNDING[model.dtype])


@pytest.mark.parametrize("preset", ["nano", "nano-llama"])
def test_adapters(preset: str) -> None:
    model = hg.GPT(hg.preset(preset, n_vocab=33), dtype="float64", seed=1)
    hg.lora.inject(model, 5, seed=2)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(3))
    assert_equal(model, ROUNDING[model.dtype])
    plain = hg.GPT(hg.preset(preset, n_vocab=33), seed=1)
    hg.lora.inject(plain, 5, dora=True)
    assert describe(plain) is None, "a magnitude is not a low-rank branch"


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("changes", [{"attention_scale": 0.9}, {"score_cap": 0.5}, {"sinks": True, "score_cap": 2.0}])
def test_other_scores(changes: dict[str, object], dtype: str) -> None:
    model = hg.GPT(hg.preset("nano-llama", n_vocab=33, n_blocks=2, **changes), dtype=dtype, seed=1)
    perturb(model)
    assert_equal(model, ROUNDING[model.dtype])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("preset", ["nano", "nano-llama"])
def test_low_bits(preset: str, bits: int) -> None:
    model = quantize(hg.GPT(hg.preset(preset, n_vocab=64), seed=1), bits)
    assert model.blocks[0].attn.out.plain().packed is not None
    assert_equal(model, 0)  # rounded activations: another last bit would be another step
    model.rounds_activations = False
    assert_equal(model, ROUNDING[model.dtype])


def test_what_has_no_kernel() -> None:
    assert describe(hg.GPT(hg.preset("nano-llama", gain_offset=1.0))) is None
    assert describe(hg.GPT(hg.preset("nano", norm_bias=False))) is None
    assert describe(hg.GPT(hg.preset("nano"), dtype="bfloat16")) is None
    with library.disabled():
        assert describe(hg.GPT(hg.preset("nano"))) is None


def test_an_activation_that_the_kernel_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hg.GPT(hg.preset("nano", n_blocks=1), seed=0)
    monkeypatch.setattr("handgrad.kernels.token_block.activation", lambda g: 7)
    with pytest.raises(hg.HandgradError):
        both_ways(model)
