"""Models whose matrices stay packed: equal to the unpacked ones in every way of computing gradients, and frozen."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gguf_models import SMALL, metadata, stored_tensors, write
from transformers import AutoConfig, AutoModelForCausalLM

import handgrad as hg
from conftest import perturb
from handgrad.formats.models import open_folder
from handgrad.model.layers import linear
from handgrad.model.precision import why_not_mixed
from handgrad.model.storage.packed import KINDS, Packed
from handgrad.optim import OptimizerInBackward
from handgrad.training.config import FinetuneOptions

WRITABLE = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "F16", "BF16"]  # those that the gguf package can write
SHAPE = {"vocab_size": 33, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}
LENGTHS = [9, 1, 20]


def gguf_file(folder: Path, packed: str, **changes: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**SMALL, **SHAPE, **changes}))
    perturb(model, seed=1)
    return write(folder / f"{packed}.gguf", "llama", metadata(model.config), dict(stored_tensors(model)), packed)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, targets = torch.randint(33, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(2))
    targets[:4] = -100
    return tokens, targets


def gradients(model: hg.GPT, **call: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model.loss_and_grads(*batch(), LENGTHS, **call)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss, found


def assert_same(a: tuple[float, dict[str, torch.Tensor]], b: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert a[0] == b[0] and a[1].keys() == b[1].keys() and a[1]
    for name, grad in a[1].items():
        assert torch.equal(grad, b[1][name]), name


def adapted(model: hg.GPT, **options: Any) -> hg.GPT:
    hg.lora.inject(model, 3, seed=4, **options)
    perturb(model, scale=0.1)
    return model


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.some_cases(3)
def test_packed_gradients_equal_unpacked_ones(kind: str, tied: bool, tmp_path: Path) -> None:
    path = gguf_file(tmp_path, kind, tie_word_embeddings=tied)
    plain, packed = (adapted(hg.load(path, packed=p), targets=["all-linear", "lm_head"]) for p in (False, True))
    assert packed.packed and not plain.packed
    held = {x.packed.kind for x in packed.modules() if getattr(x, "packed", None) is not None and x is not packed}
    assert held == {kind}
    assert torch.equal(packed.logits(batch()[0], LENGTHS), plain.logits(batch()[0], LENGTHS))
    assert packed.loss(*batch(), LENGTHS) == plain.loss(*batch(), LENGTHS)
    expected = gradients(plain, tokens_at_once=1)
    assert_same(gradients(packed, tokens_at_once=1), expected)
    assert_same(gradients(packed, tokens_at_once=1, recompute="blocks"), expected)


def test_every_listed_kind_is_tried_or_a_k_quant() -> None:
    assert {*WRITABLE, "F32", "Q4_K", "Q5_K", "Q6_K"} == set(KINDS)


@pytest.mark.parametrize("options", [{"dora": True}, {"dropout": 0.3}, {"freeze_down": True}], ids=str)
def test_kinds_of_adapters(options: dict[str, Any], tmp_path: Path) -> None:
    path = gguf_file(tmp_path, "Q4_1")
    plain, packed = (adapted(hg.load(path, packed=p), **options) for p in (False, True))
    assert_same(gradients(packed, seed=7), gradients(plain, seed=7))


@pytest.mark.parametrize("targets", [["all-linear"], ["all-linear", "lm_head"]], ids=["plain head", "adapted head"])
def test_a_large_head_is_never_unpacked_as_a_whole(
    targets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_file(tmp_path, "Q8_0", vocab_size=203)
    loss, whole = gradients(adapted(hg.load(path, dtype="float64"), targets=targets))
    monkeypatch.setattr(linear, "ROWS_OF_PART", 50)  # matrices of a block have more, and are unpacked as a whole
    plain, packed = (adapted(hg.load(path, packed=p, dtype="float64"), targets=targets) for p in (False, True))
    found = gradients(packed)
    with unpacked_matrices() as unpacked:
        assert_same(gradients(packed), found)
    of_blocks = matrices_of(*packed.blocks)
    rows = [matrix.shape[0] for matrix in unpacked if matrix not in of_blocks]
    assert set(rows) == {sum(LENGTHS), 50, 3}  # of the embedding, and parts of the head
    assert packed.loss(*batch(), LENGTHS) == plain.loss(*batch(), LENGTHS) == pytest.approx(loss, rel=1e-12)
    assert_same(found, gradients(plain))
    for name, grad in whole.items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_a_block_is_unpacked_once_per_pass_for_all_pieces(
    recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "ROWS_OF_PART", 50)
    packed = adapted(hg.load(gguf_file(tmp_path, "Q8_0"), packed=True))
    with unpacked_matrices() as unpacked:
        gradients(packed, tokens_at_once=1, recompute=recompute)
    first, second = packed.blocks  # in the first, nothing needs the error signal of the input
    assert {unpacked.count(matrix) for matrix in matrices_of(second)} == {2}
    assert max(unpacked.count(matrix) for matrix in matrices_of(first)) == 2


@contextmanager
def unpacked_matrices() -> Iterator[list[Packed]]:
    """Every matrix that is unpacked in this context."""
    found: list[Packed] = []
    unpack = Packed.unpack

    def noted(matrix: Packed, *rest: Any, **named: Any) -> torch.Tensor:
        found.append(matrix)
        return unpack(matrix, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packed, "unpack", noted)
        yield found


def matrices_of(*blocks: torch.nn.Module) -> list[Packed]:
    found = (x.packed for block in blocks for x in block.modules() if isinstance(x, linear.Linear))
    return [matrix for matrix in found if matrix is not None]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes(dtype: str, tmp_path: Path) -> None:
    path = gguf_file(tmp_path, "Q8_0")
    plain, packed = (adapted(hg.load(path, packed=p, dtype=dtype)) for p in (False, True))
    assert packed.dtype == getattr(torch, dtype)
    assert_same(gradients(packed), gradients(plain))


def test_the_optimizer_inside_the_backward_pass(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, "Q5_1")
    plain, packed = (adapted(hg.load(path, packed=p)) for p in (False, True))
    for model in (plain, packed):
        OptimizerInBackward(model, lambda p: torch.optim.AdamW(p, lr=0.1), clip=0.5).step(*batch(), LENGTHS)
    expected = dict(plain.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in packed.named_parameters())


def test_a_packed_model_is_verified_generates_and_is_copied(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, "Q8_0")
    packed = adapted(hg.load(path, packed=True))
    report = hg.verify(packed, *batch(), LENGTHS)
    assert report.passed, report.failed
    tokens = batch()[0][None, :5]
    plain = adapted(hg.load(path))
    assert torch.equal(hg.generate(packed, tokens, 6), hg.generate(plain, tokens, 6))
    assert_same(gradients(copy.deepcopy(packed)), gradients(packed))
    trace = hg.trace(packed, *batch(), LENGTHS)
    assert "blocks.0.grad_d_q" in trace and "grad_w_tok" not in trace


def test_weights_of_two_bytes(tmp_path: Path) -> None:
    """base_dtype rounds the matrices once; everything else is the model with rounded matrices."""
    model = hg.GPT(hg.preset("nano-llama", n_vocab=33, n_blocks=2), seed=3)
    hg.save(model, tmp_path / "m")
    kept = adapted(hg.load(tmp_path / "m", base_dtype="bfloat16"))
    assert kept.dtype == torch.float32 and kept.packed
    for p in model.parameters():
        p.data = p.data.bfloat16().float() if p.ndim == 2 else p.data
    assert_same(gradients(kept), gradients(adapted(model)))


def test_two_bytes_keep_learned_positions(tmp_path: Path) -> None:
    model = hg.GPT(hg.preset("nano", n_vocab=33, n_blocks=1), seed=3)
    model.positions.w.data.mul_(50)
    hg.save(model, tmp_path / "m")
    for p in model.parameters():
        p.data = p.data.bfloat16().float() if p.ndim == 2 else p.data
    kept = hg.load(tmp_path / "m", base_dtype="bfloat16")
    assert torch.equal(kept.logits(batch()[0], LENGTHS), model.logits(batch()[0], LENGTHS))
    with pytest.raises(hg.HandgradError, match="weights are packed"):
        hg.lora.inject(kept, 2, modules_to_save=("c_attn",))
    model.embed.w.data[0, 0] = 1e6
    hg.save(model, tmp_path / "m")
    with pytest.raises(hg.HandgradError, match="too large for float16"):
        hg.load(tmp_path / "m", base_dtype="float16")


def test_packed_weights_cannot_change(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, "Q8_0")
    hg.save(hg.GPT(hg.preset("nano-llama", n_blocks=1)), tmp_path / "m")
    model = hg.load(path, packed=True)
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(hg.HandgradError, match="weights are packed"):
        hg.save(model, tmp_path / "out")
    with pytest.raises(hg.HandgradError, match="packed weight cannot be changed"):
        hg.lora.merge(adapted(model))
    with pytest.raises(hg.HandgradError, match="base_dtype must be bfloat16 or float16"):
        hg.load(tmp_path / "m", base_dtype="int8")
    assert not (tmp_path / "out").exists()


def test_a_base_that_was_moved_is_named_as_the_adapters_base(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, "Q8_0")
    hg.lora.save(adapted(hg.load(path)), tmp_path / "adapter")
    path.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(hg.HandgradError, match=r"base model of .*adapter was not found: .*Q8_0\.gguf.* back to"):
        hg.load(tmp_path / "adapter")
    path.symlink_to(tmp_path / "elsewhere.gguf")
    assert hg.load(tmp_path / "adapter").adapter is not None


def test_messages_name_options(tmp_path: Path) -> None:
    path = gguf_file(tmp_path, "Q8_0")
    with pytest.raises(
        hg.HandgradError, match=r"GGUF file, which has its own types: leave out base_dtype .* packed=True"
    ):
        hg.load(path, base_dtype="bfloat16")
    hg.save(hg.load(path), tmp_path / "folder")
    with pytest.raises(hg.HandgradError, match=r"not a GGUF file, .* leave out packed=True, .* base_dtype='bfloat16'"):
        hg.load(tmp_path / "folder", packed=True)
    with pytest.raises(hg.HandgradError, match="gguf writes an adapter, and full=True trains all weights"):
        FinetuneOptions.parse({"gguf": True, "full": True})
    with pytest.raises(hg.HandgradError, match="packed freezes the weights, and full=True trains all weights"):
        FinetuneOptions.parse({"packed": True, "full": True})


@pytest.mark.skipif(why_not_mixed() is not None, reason=f"no mixed precision: {why_not_mixed()}")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16"])
def test_mixed_precision_of_a_packed_base(kind: str, tmp_path: Path) -> None:
    """Packed, or read in bfloat16: products read the same numbers. Only rows of the embedding are unpacked to float32."""
    path = gguf_file(tmp_path, kind)
    packed = adapted(hg.load(path, packed=True, precision="mixed"))
    rounded = adapted(open_folder(path, precision="mixed", rounded=True))
    assert packed.unpacks == (kind != "BF16") and not rounded.unpacks
    expected = gradients(packed)
    assert_same(gradients(packed, recompute="blocks"), expected)
    if kind == "BF16":
        assert_same(gradients(rounded), expected)
    for other in (rounded, adapted(hg.load(path))):
        x, y = (torch.cat([g.flatten() for g in grads.values()]) for _, grads in (gradients(other), expected))
        assert torch.cosine_similarity(x, y, 0) > 0.99  # large random weights: 0.984 with everything in bfloat16
