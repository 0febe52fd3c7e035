"""Rounding to llama.cpp's types: the `gguf` package unpacks what was packed, as close to the weights as the bits allow."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from handgrad.errors import HandgradError
from handgrad.gguf import k_quants
from handgrad.gguf.quantize import K_QUANTS, MIXTURE, TYPES, check_type, pack, packed_bytes, type_for

WEIGHTS = {
    "normal": lambda g: torch.randn(6, 512, generator=g) * 0.02,
    "heavy tails": lambda g: torch.randn(6, 512, generator=g) ** 3,
    "one outlier to a row": lambda g: torch.randn(6, 512, generator=g).scatter(1, torch.full((6, 1), 77), 50.0),
    "all negative": lambda g: -torch.rand(6, 512, generator=g) - 0.5,
    "all positive": lambda g: torch.rand(6, 512, generator=g) + 0.5,
    "groups of very different size": lambda g: torch.randn(6, 16, 32, generator=g).mul(
        10.0 ** -torch.arange(16.0)[:, None]
    ).flatten(1),
    "tiny": lambda g: torch.randn(6, 512, generator=g) * 1e-5,
}  # fmt: skip


def unpacked(packed: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(np.array(gguf.quants.dequantize(packed.numpy(), GGMLQuantizationType[kind])))


def error(w: torch.Tensor, kind: str) -> float:
    packed = pack(w, kind, "w")
    assert packed.dtype == torch.uint8 and packed.numel() == packed_bytes(tuple(w.shape), kind)
    return ((unpacked(packed, kind) - w).norm() / w.norm()).item()


@pytest.mark.parametrize("name", WEIGHTS)
def test_more_bits_are_nearer_and_k_quants_nearer_than_plain_rounding(name: str) -> None:
    """An outlier makes all groups of its block coarse, and numbers of one sign use half of a type without a minimum."""
    w = WEIGHTS[name](torch.Generator().manual_seed(0))
    errors = {kind: error(w, kind) for kind in TYPES}
    assert errors["F32"] == 0
    if name == "tiny":  # scales near the least number of float16
        assert max(errors.values()) < 0.15
        return
    pairs = [("F16", "Q8_0"), ("Q8_0", "Q5_0"), ("Q8_0", "Q6_K"), ("Q5_K", "Q4_K"), ("Q5_0", "Q4_0"), ("Q5_1", "Q4_1")]
    if name in ("normal", "heavy tails"):
        pairs += [("Q6_K", "Q5_K"), ("Q5_K", "Q5_0"), ("Q4_K", "Q4_0"), ("Q6_K", "Q5_1")]
    for better, worse in pairs:
        assert errors[better] < errors[worse], (better, worse, errors)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_what_a_block_can_hold_exactly_stays(kind: str) -> None:
    """Integers from 0 to the largest (or around 0) with one scale for all groups."""
    g = torch.Generator().manual_seed(1)
    if kind == "Q6_K":
        l = torch.randint(-32, 32, (4, 16, 16), generator=g).float()
        l[..., 0] = -32
        w = (l * 128 * 2.0**-12).flatten(1)
    else:
        levels = k_quants.LEVELS[kind]
        l = torch.randint(0, levels + 1, (4, 8, 32), generator=g).float()
        l[..., 0], l[..., 1] = 0, levels
        w = (l * 63 * 2.0**-10).flatten(1)
    assert (unpacked(pack(w, kind, "w"), kind) - w).abs().max() <= 2.0**-20 * w.abs().max()  # of sums in float32


@pytest.mark.parametrize("kind", K_QUANTS)
def test_zeros_and_constants(kind: str) -> None:
    assert not unpacked(pack(torch.zeros(2, 256), kind, "w"), kind).any()
    for value in (0.37, -0.37):
        w = torch.full((1, 256), value)
        assert error(w, kind) < 2**-7  # of a scale of 6 bits
    mixed = torch.cat([torch.zeros(1, 32), torch.randn(1, 224, generator=torch.Generator().manual_seed(2))], 1)
    assert not unpacked(pack(mixed, kind, "w"), kind)[:, :32].any()


def test_rows_are_packed_alone_for_any_number_of_threads() -> None:
    w = torch.randn(1030, 512, generator=torch.Generator().manual_seed(3))
    whole = pack(w, "Q4_K", "w")
    for i in (0, 511, 1029):
        assert torch.equal(whole[i : i + 1], pack(w[i : i + 1], "Q4_K", "w"))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(pack(w, "Q4_K", "w"), whole) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_rows_that_do_not_divide_take_a_type_of_smaller_blocks() -> None:
    def chosen(columns: int, wanted: str) -> str:
        return type_for("blk.0.attn_q.weight", 8, (4, columns), wanted, tied=False)

    assert [chosen(576, kind) for kind in ("Q4_K", "Q5_K", "Q6_K", "Q4_0")] == ["Q5_0", "Q5_1", "Q8_0", "Q4_0"]
    assert [chosen(20, kind) for kind in ("Q4_K", "Q8_0", "BF16", "F32")] == ["F16", "F16", "BF16", "F32"]
    assert type_for("blk.0.attn_norm.weight", 8, (512,), "Q4_K", tied=True) == "F32"
    assert type_for("position_embd.weight", 8, (64, 512), "Q8_0", tied=True) == "F32"


def test_mixture_keeps_more_bits_where_llama_cpp_does() -> None:
    def chosen(layer: str, tied: bool = False) -> list[str]:
        return [type_for(f"blk.{i}.{layer}.weight", 24, (256, 256), MIXTURE, tied) for i in range(24)]

    more = [i < 3 or i >= 21 or (i - 3) % 3 == 2 for i in range(24)]
    assert chosen("ffn_down") == chosen("attn_v") == ["Q6_K" if m else "Q4_K" for m in more]
    assert set(chosen("attn_q")) == set(chosen("token_embd")) == {"Q4_K"}
    assert set(chosen("output")) == set(chosen("token_embd", tied=True)) == {"Q6_K"}


def test_bad_types_and_weights_are_named() -> None:
    assert check_type("q4_k_m") == "Q4_K_M"
    with pytest.raises(HandgradError, match=r"type='IQ2_XS': weights can be written as F32, F16, .*Q4_K_M"):
        check_type("IQ2_XS")
    for bad in (torch.nan, torch.inf):
        with pytest.raises(HandgradError, match=r"blk\.0 has values that are not finite"):
            pack(torch.full((1, 256), bad), "Q8_0", "blk.0")
    for kind in ("F16", "Q8_0", "Q4_K"):
        with pytest.raises(HandgradError, match=r"blk\.0 has values up to 1e\+06, above float16's"):
            pack(torch.full((1, 256), 1e6), kind, "blk.0")
    assert error(torch.full((1, 256), 1e6), "BF16") < 2**-8
