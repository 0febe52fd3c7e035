"""handgrad bench generate: what is counted and compared, and llama.cpp's benchmark, for which a program stands in that reads
the model's file and prints what llama-bench prints."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from bench import generate, generators, lowbit
from bench.attempts import Attempts, WrongError
from bench.generators import bytes_of_steps, check_same, copy_as, our_decoding, ours
from bench.sizes import TINY

import handgrad as hg

SIZE = replace(TINY, base="smollm2")  # a tiny Llama in a GGUF file
STAND_IN = """\
#!{python}
import json, sys
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert Path(given["-m"]).read_bytes()[:4] == b"GGUF"
if given["-p"] == "48":
    sys.exit("no memory")
print(json.dumps([{{"avg_ns": 2e9, "n_prompt": int(given["-p"]), "n_gen": int(given["-n"])}}]))
"""


@pytest.fixture
def llama_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    program = tmp_path / "llama-bench"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    yield program


def test_llama_cpp_is_a_contender_of_single_sequences(llama_bench: Path) -> None:
    cases = generate.cases(SIZE)
    rows = cases["decode, 4 bits, 1×16"](Attempts())
    assert [row.contender for row in rows] == ["handgrad", "handgrad, float32", "llama.cpp Q4_1", "bandwidth bound"]
    assert rows[2].seconds == 2 and rows[2].problem == "" and rows[2].of_bound == rows[3].seconds / 2
    rows = cases["prefill, float32, 1×48"](Attempts())
    assert [row.contender for row in rows] == ["handgrad", "transformers", "llama.cpp F32"]
    assert (
        rows[2].problem == "failed: RuntimeError: llama-bench: no memory" and rows[0].problem == rows[1].problem == ""
    )
    assert not any("llama" in row.contender for row in cases["decode, 8 bits, 3×16"](Attempts()))


def test_without_llama_bench_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "shutil", SimpleNamespace(which=lambda *_, **__: None))
    *rest, llama, bound = generate.cases(SIZE)["decode, 8 bits, 1×16"](Attempts())
    assert llama.problem == "missing: llama-bench is not on PATH: make llama-bench builds it"
    assert all(row.seconds > 0 for row in (*rest, bound)) and not llama.has_failed


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_llama_cpp_gets_the_same_model(kind: str) -> None:
    path = generate.base_for(SIZE).path
    copy = copy_as(path, kind)
    matrices = {t.name: t.tensor_type.name for t in gguf.GGUFReader(copy).tensors if len(t.shape) == 2}
    head = matrices.pop("token_embd.weight")
    assert set(matrices.values()) == {kind} and head == ("Q8_0" if kind == "Q4_1" else kind)
    ids = torch.arange(20)[None]
    ours, theirs = hg.load(copy).logits(ids), hg.load(path).logits(ids)
    error = float((ours - theirs).std() / theirs.std())
    assert 0 < error < 0.02 if kind == "Q8_0" else error == 0  # the file has Q4_1, with a head of Q8_0, and is copied


def test_decoding_alone_gives_the_same_tokens_every_time() -> None:
    model, prompts = generate.model_for(SIZE), generate.prompts_for(SIZE, [9, 9, 9])
    decoding, expected = our_decoding(model, prompts, 6), ours(model, prompts, 7).generate()
    assert decoding.generate() == decoding.generate() == expected and decoding.seconds() > 0


def test_other_tokens_are_not_timed_unless_two_are_as_probable() -> None:
    model, prompt = hg.GPT(hg.preset("nano", n_vocab=11, n_blocks=1), seed=1), [1, 2, 3]
    found = hg.generate(model, prompt, 4)
    other = [*found[:2], (found[2] + 1) % 11, found[3]]
    check_same(model, [prompt], [found], [found], "them")
    with pytest.raises(WrongError, match=f"new token 2 is {found[2]}, that of them {other[2]}"):
        check_same(model, [prompt], [found], [other], "them")
    with torch.no_grad():
        model.head.plain().weight.zero_()  # all tokens are equally probable
    check_same(model, [prompt], [found], [other], "them")


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_bytes_that_decoding_reads(bits: int | None) -> None:
    """Counted by hand for the tiny Llama: 2 blocks of 64·64·2 + 64·32·2 + 64·96·3 weights, a tied head of 259·64."""
    weights = {
        None: 4 * (2 * 30720 + 16576),
        8: 34 * (2 * 30720 + 16576) // 32,
        4: 20 * 2 * 30720 // 32 + 34 * 16576 // 32,
    }
    cached = 2 * 2 * (16 + 16) * 4  # blocks, key heads, widths, bytes
    expected = 3 * weights[bits] + 5 * cached * (7 + 8 + 9)
    assert bytes_of_steps(generate.model_for(SIZE, bits), 5, 10, 3) == expected


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong by one step of the rounding, everywhere; the others go on."""
    real = lowbit.packed.pack
    monkeypatch.setattr(lowbit.packed, "pack", lambda w, kind: real(w + 2 * w.abs().amax() / 127, kind))
    lowbit.packed_layers.cache_clear()
    ours, *others = lowbit.cases(TINY)[lowbit.case_name(8, 3, TINY)](Attempts())
    lowbit.packed_layers.cache_clear()
    assert ours.problem.startswith("wrong: the product has an error of") and ours.has_failed
    assert len(others) == 4 and all(row.seconds > 0 and row.problem == "" for row in others)
