"""Low-bit weights: a model with them computes what its unpacked weights compute; what they cost; what is refused."""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import handgrad as hg
import tiny_gguf
from conftest import handgrad, perturb, save_with_bytes
from handgrad.errors import HandgradError
from handgrad.inference import engine
from handgrad.inference.quantization_loss import PASSAGE, measure_cost
from handgrad.kernels import library
from handgrad.model.layers.linear import Linear
from handgrad.model.passes.arguments import Pass
from handgrad.model.storage.quantize import quantize
from handgrad.ops import packed
from handgrad.text.tokenizer import make

SHAPES = {
    "gpt2": hg.preset("nano", n_vocab=256, n_context=64, d_model=64, n_heads=2, n_blocks=2),
    "llama": hg.preset("nano-llama", n_context=64, d_model=64, n_heads=2, n_kv_heads=1, n_blocks=2, d_hidden=96),
    "odd": hg.preset("nano-llama", n_context=64, d_model=64, n_heads=2, n_kv_heads=1, n_blocks=1, d_hidden=50),
}


def model(name: str, seed: int = 1) -> hg.GPT:
    made = hg.GPT(SHAPES[name], seed=seed)
    perturb(made, scale=0.1)
    return made


def unpacked(low: hg.GPT) -> hg.GPT:
    """A float32 model with the numbers of the low-bit one."""
    plain = hg.GPT(low.config)
    with torch.no_grad():
        for name, layer in low.named_modules():
            if isinstance(layer, Linear):
                plain.get_submodule(name).set_effective_weight(layer.w)
        weights = dict(low.named_parameters())
        for name, p in plain.named_parameters():
            if name in weights:
                p.copy_(weights[name])
    return plain


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", list(SHAPES))
def test_computes_with_its_unpacked_weights(name: str, bits: int) -> None:
    low = quantize(model(name), bits)
    plain = unpacked(low)
    for n in (1, 5, 16, 17, 60):
        tokens = torch.randint(256, (1, n), generator=torch.Generator().manual_seed(n))
        assert close(low.logits(tokens), plain.logits(tokens))
        with library.disabled():
            assert close(low.logits(tokens), plain.logits(tokens))
    low.rounds_activations = False
    prompts = [[1, 2, 3], [4] * 20, [5]]
    for some in ([[7, 8]], prompts):  # few rows, and more than the kernel takes
        ours, theirs = (
            hg.generate(m, some, 12, logprobs=1, prompt_logprobs=True, details=True, cache=cache)
            for m, cache in ((low, True), (plain, False))
        )
        for a, b in zip(ours, theirs, strict=True):
            assert a.ids == b.ids
            for x, y in zip(a.prompt_logprobs + a.logprobs, b.prompt_logprobs + b.logprobs, strict=True):
                assert abs(x.logprob - y.logprob) < 1e-5


def test_generates_with_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    if library.load(torch.float32) is None:
        pytest.skip("products with packed weights need kernels")
    low = quantize(model("llama"), 4)
    rows = {"product": [], "rounded_product": []}
    for name, found in rows.items():
        right = getattr(packed, name)
        wrapped = lambda a, *rest, right=right, found=found: found.append(len(a)) or right(a, *rest)  # noqa: E731
        monkeypatch.setattr(packed, name, wrapped)
    for rounds in (True, False):
        low.rounds_activations, used = rounds, rows["rounded_product" if rounds else "product"]
        prompt = [20] * 14 if rounds and library.multiplies_bytes() else []  # seven layers of both blocks
        with monkeypatch.context() as patch:
            hg.generate(low, [[1] * 20], 4)
            assert used == prompt + [1] * 4  # the head; after the prompt, the blocks run in one call
            used.clear()
            patch.setattr(engine, "describe", lambda _: None)
            hg.generate(low, [[1] * 20], 4)
            assert used == prompt + [1] + [1] * 15 * 3
            used.clear()
        low.logits(torch.tensor([[1, 2]]))
        low.loss(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]))
        assert not any(
            rows.values()
        )  # only when generating: elsewhere the numbers of unpacked weights, to the last bit


@pytest.mark.parametrize("bits", [8, 4])
def test_generation_rounds_activations(bits: int) -> None:
    """With any number of rows, with kernels and without."""
    low = quantize(model("llama"), bits)
    layers = [x for x in low.modules() if isinstance(x, Linear)]
    for n in (1, 16, 17, 60):
        for layer in layers:
            a = torch.randn(n, layer.w.shape[0], generator=torch.Generator().manual_seed(n))
            expected = packed.rounded(a) @ layer.w
            for context in (contextlib.nullcontext, library.disabled):
                with context(), low.weights(layer, generating=True) as weights:
                    found = layer.forward(a, Pass(weights=weights))
                    assert close(found, expected) and not close(found, a @ layer.w)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_batch_changes_no_bit(name: str, bits: int) -> None:
    """Sums of another order would move an activation by a step now and then, and change the text."""
    if library.load(torch.float32) is None:
        pytest.skip("products with packed weights need kernels")
    low = quantize(model(name), bits)
    prompts = [[1, 2, 3], [4] * 20, [5], *([6, i] for i in range(10))]
    options = {"temperature": 1.0, "seed": 3, "logprobs": 1, "details": True}
    together = hg.generate(low, prompts, 12, **options)
    for i in (0, 1, 2, 12):
        alone = hg.generate(low, prompts[i], 12, **(options | {"seed": 3 + i}))
        assert alone.ids == together[i].ids and alone.logprobs == together[i].logprobs


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())


def blocks_of(w: Tensor) -> Tensor:
    """(f_in, f_out) → (blocks, 32): the numbers that share a scale"""
    return w.t().reshape(-1, 32)


def steps_of(blocks: Tensor, kind: str) -> Tensor:
    """(blocks, 1): the distance of neighboring numbers, d"""
    low, high = blocks.aminmax(dim=1, keepdim=True)
    return blocks.abs().amax(1, keepdim=True) / 127 if kind == "Q8_0" else (high - low) / 15


def check_rounding(w: Tensor, rounded: Tensor, kind: str) -> None:
    """Rounding to the nearest multiple of d has an error of d/2 at most, and of d²/12 in the mean square. The float16 d and
    m, rounded by 2⁻¹¹ of themselves, add to it: 127 d 2⁻¹¹, or (15 d + m) 2⁻¹¹. Q4_1 has the d and m of the smallest squared
    error: the bound is that of a block's mean square, and single numbers may be further away."""
    blocks = blocks_of(w)
    error, d = (blocks_of(rounded) - blocks).abs(), steps_of(blocks, kind)
    if kind == "Q8_0":
        assert (error <= d * (0.5 + 127 * 2**-11)).all()
    else:
        largest = d / 2 + (15 * d + blocks.amin(1, keepdim=True).abs()) * 2**-11
        assert (error.square().mean(1, keepdim=True).sqrt() <= largest).all()
    assert error.square().mean() <= 1.05 * d.square().mean() / 12


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", list(SHAPES))
def test_weights_are_near_and_the_rest_is_unchanged(name: str, bits: int) -> None:
    before = model(name)
    low = quantize(copy.deepcopy(before), bits)
    assert low.size == before.size
    for path, layer in before.named_modules():
        if isinstance(layer, Linear):
            matrix = low.get_submodule(path).packed
            assert (matrix is None) == (layer.w.shape[0] % 32 != 0)
            if matrix is None:
                assert torch.equal(layer.w, low.get_submodule(path).w)
            else:
                check_rounding(layer.w, low.get_submodule(path).w, matrix.kind)
    assert low.head.packed.kind == "Q8_0"
    if before.config.tied:
        assert low.embed.packed is low.head.packed
    given = dict(before.named_parameters())
    for path, p in low.named_parameters():
        assert torch.equal(p, given[path]) and not p.requires_grad


def with_noise(plain: hg.GPT, bits: int, seed: int) -> hg.GPT:
    """The model with random numbers in place of rounding errors: uniform within half a step."""
    noisy, generator = copy.deepcopy(plain), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in noisy.modules():
            if isinstance(layer, Linear):
                blocks = blocks_of(layer.w)
                d = steps_of(blocks, "Q8_0" if bits == 8 or layer is noisy.head.plain() else "Q4_1")
                blocks = blocks + d * (torch.rand(blocks.shape, generator=generator) - 0.5)
                layer.set_effective_weight(blocks.view(layer.w.t().shape).t())
    return noisy


def test_cost() -> None:
    """The change of the loss is that of random errors of the same size."""
    plain = model("llama")
    ids = make("bytes", []).encode(PASSAGE)
    same = measure_cost(plain, plain, ids)
    assert (same.tokens, same.change, same.differ, same.differ_by_activations) == (len(ids) - 1, 0, 0, 0)
    windows = [torch.tensor(ids[i : i + 65]) for i in range(0, len(ids) - 1, 64)]
    whole = sum(plain.loss(x[None, :-1], x[None, 1:]) * (len(x) - 1) for x in windows) / (len(ids) - 1)
    assert abs(same.loss - whole) < 1e-5
    eight, four = (measure_cost(plain, quantize(copy.deepcopy(plain), bits), ids) for bits in (8, 4))
    for found, bits in ((eight, 8), (four, 4)):
        expected = [measure_cost(plain, with_noise(plain, bits, seed), ids) for seed in range(6)]
        assert abs(found.change) < 5 * sum(x.change**2 / len(expected) for x in expected) ** 0.5
        assert found.differ < 2 * max(x.differ for x in expected)
    assert eight.differ < four.differ
    low = quantize(copy.deepcopy(plain), 4)
    low.rounds_activations = False
    weights = measure_cost(plain, low, ids)
    assert weights.low_bit_loss == weights.weights_loss == four.weights_loss != four.low_bit_loss
    assert weights.differ_by_activations == 0 < four.differ_by_activations < four.differ
    assert f"{four.low_bit_loss - four.weights_loss:+.4f} nats" in str(four).splitlines()[1]
    with pytest.raises(HandgradError, match="at least two tokens"):
        measure_cost(plain, plain, [1])


def test_files_keep_their_own_bits(tmp_path: Path) -> None:
    tiny_gguf.write_tiny_smollm2(tmp_path / "m.gguf")  # Q8_0
    stored, eight, four = (hg.load(tmp_path / "m.gguf", **x) for x in ({"packed": True}, {"bits": 8}, {"bits": 4}))
    kinds = {x.packed.kind for b in four.blocks for x in b.modules() if isinstance(x, Linear)}
    assert (kinds, four.head.packed.kind) == ({"Q4_1"}, "Q8_0")
    tokens = torch.randint(256, (1, 9))
    assert torch.equal(eight.logits(tokens), stored.logits(tokens))
    assert not torch.equal(four.logits(tokens), stored.logits(tokens))
    assert close(eight.logits(tokens), hg.load(tmp_path / "m.gguf").logits(tokens))
    kept = [x.packed for x in four.modules() if isinstance(x, Linear)]
    quantize(four, 8)  # not rounded again
    assert [x.packed for x in four.modules() if isinstance(x, Linear)] == kept


def test_directories_and_adapters(tmp_path: Path) -> None:
    plain = model("llama")
    hg.save(plain, tmp_path / "base")
    low = hg.load(tmp_path / "base", bits=8)
    tokens = torch.randint(256, (1, 9))
    assert torch.equal(low.logits(tokens), quantize(plain, 8).logits(tokens))
    hg.lora.inject(low, 2, seed=1)
    perturb(low)
    hg.lora.save(low, tmp_path / "adapter")
    again = hg.load(tmp_path / "adapter", bits=8)
    assert torch.equal(again.logits(tokens), low.logits(tokens))


def test_refused(tmp_path: Path) -> None:
    hg.save(model("llama"), tmp_path / "m")
    for options, message in (
        ({"bits": 5}, "bits must be 8 or 4, not 5"),
        ({"bits": True}, "bits must be 8 or 4"),
        ({"bits": "4"}, "bits must be 8 or 4"),
        ({"bits": 4, "dtype": "bfloat16"}, "bits=4 computes in float32"),
        ({"bits": 4, "packed": True}, "one of them"),
        ({"bits": 4, "base_dtype": "bfloat16"}, "one of them"),
    ):
        with pytest.raises(HandgradError, match=message):
            hg.load(tmp_path / "m", **options)
    with pytest.raises(HandgradError, match="computes in float32 and the model is float64"):
        quantize(model("llama").double(), 4)
    with pytest.raises(HandgradError, match="no matrix of this model"):
        quantize(hg.GPT(hg.preset("nano", d_model=20, n_heads=2, n_blocks=1)), 4)
    broken = model("llama")
    with torch.no_grad():
        broken.blocks[1].mlp.contract.weight[3, 3] = torch.nan
    with pytest.raises(HandgradError, match=r"NaN or infinity in model.layers.1.mlp.down_proj"):
        quantize(broken, 4)
    assert not broken.packed  # nothing was changed
    low = hg.load(tmp_path / "m", bits=4)
    with pytest.raises(HandgradError, match="load it without"):
        hg.save(low, tmp_path / "again")
    hg.lora.inject(low, 2, seed=1)
    with pytest.raises(HandgradError, match="cannot be changed: load the model without"):
        hg.lora.merge(low)


def test_the_command(tmp_path: Path) -> None:
    folder, text = tmp_path / "m", tmp_path / "text.txt"
    save_with_bytes(model("llama"), folder)
    text.write_text("Some text to compare on.")
    low = hg.load(folder, bits=4)
    greedy = "generate", "--model", folder, "--temperature", 0, "--max-new-tokens", 9
    done = handgrad(*greedy, "--prompt", "ab", "--bits", 4)
    assert done.stdout == f"ab{hg.generate(low, 'ab', 9)}\n"
    expected = measure_cost(hg.load(folder), low, list(text.read_bytes()))
    assert handgrad(*greedy, "--bits", 4, "--cost", text).stdout == f"4 bits: {expected}\n"
    assert "nats per token" in handgrad(*greedy, "--bits", 8, "--cost", "sample").stdout
    for arguments, message in (
        (["--bits", 3], "bits must be 8 or 4, not 3"),
        (["--cost", text], "give --bits 8 or --bits 4"),
        (["--bits", 4, "--cost", tmp_path / "none.txt"], "none.txt"),
    ):
        done = handgrad(*greedy, *arguments)
        assert done.returncode == 1 and message in done.stderr and done.stdout == ""
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
