"""`handgrad convert --gguf`: what it copies, rounds, merges and refuses. tests/gguf_check.py opens files in llama.cpp."""

import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gguf_tokenizer import byte_pairs, pieces, read, train_pieces, varied_texts

import handgrad as hg
from conftest import error_of, succeed
from handgrad.errors import HandgradError
from handgrad.formats.gguf_out import write_gguf
from handgrad.gguf import export
from handgrad.gguf.file import dequantize, open_gguf
from handgrad.gguf.quantize import EXPERTS, TYPES
from handgrad.gguf.tokenizer import SPLITTINGS
from handgrad.text import tokenizer
from handgrad.text.tokenizer import Tokenizer, make
from tiny_gguf import TEMPLATE, write_tiny_smollm2

WIDE = {"n_vocab": 256, "n_context": 64, "d_model": 256, "n_heads": 4, "n_kv_heads": 2, "n_blocks": 2, "d_hidden": 512}


def folder_of(path: Path, known: Tokenizer | None = None, **shape: Any) -> Path:
    """A small Llama with a tokenizer."""
    known = known or make("bytes", [])
    model = hg.GPT(hg.preset("nano-llama", **({"n_vocab": known.n_vocab, "n_blocks": 1} | shape)), seed=0)
    hg.save(model, path)
    known.write(path)
    return path


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("wide") / "model", **WIDE)


# ── types ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_type_of_experts_needs_experts(wide: Path, tmp_path: Path) -> None:
    write_gguf(str(wide), tmp_path / "wide.gguf")
    for source in (wide, tmp_path / "wide.gguf"):
        with pytest.raises(HandgradError, match="is for experts whose width is a multiple of 32"):
            write_gguf(str(source), tmp_path / "out.gguf", EXPERTS)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("kind", [*(x for x in TYPES if x != EXPERTS), "Q4_K_M"])
@pytest.mark.some_cases(3)
def test_every_type_is_read_back_within_its_rounding(kind: str, wide: Path, tmp_path: Path) -> None:
    done = write_gguf(str(wide), tmp_path / "out.gguf", kind.lower())
    exact, found = hg.load(wide), hg.load(tmp_path / "out.gguf")
    assert set(done.types) == {"F32", *({"Q4_K", "Q6_K"} if kind == "Q4_K_M" else {kind})}
    assert done.bytes == (tmp_path / "out.gguf").stat().st_size
    bits = 24 if kind == "F32" else 11 if kind == "F16" else 8 if kind == "BF16" else int(kind[1])
    for (name, p), q in zip(exact.named_parameters(), found.parameters(), strict=True):
        limit = 0 if kind == "F32" or p.ndim == 1 else p.abs().max() * 2.0 ** (1 - bits)
        assert (p - q).abs().max() <= limit, name
    packed = hg.load(tmp_path / "out.gguf", packed=True)
    tokens = torch.arange(0, 64, 5)[None]
    assert torch.allclose(packed.logits(tokens), found.logits(tokens), rtol=1e-4, atol=1e-5)


def test_the_type_is_that_of_the_stored_weights_if_none_is_given(tmp_path: Path) -> None:
    for dtype, kind in (("float64", "F32"), ("float16", "F16"), ("bfloat16", "BF16")):
        hg.save(hg.GPT(hg.preset("nano-llama", n_blocks=1), seed=0), tmp_path / dtype, dtype=dtype)
        make("bytes", []).write(tmp_path / dtype)
        assert kind in write_gguf(str(tmp_path / dtype), tmp_path / f"{dtype}.gguf").types


def test_widths_that_a_type_cannot_pack_are_named(wide: Path, tmp_path: Path) -> None:
    narrow = folder_of(tmp_path / "narrow", **WIDE | {"d_hidden": 44})
    done = write_gguf(str(narrow), tmp_path / "out.gguf", "Q8_0")
    assert done.types["F16"] == 2  # the contraction of two blocks
    assert done.notes[-1] == "2 tensors written as F16: Q8_0 packs 32 numbers of a row, and their rows have 44"
    again = write_gguf(str(tmp_path / "out.gguf"), tmp_path / "again.gguf", "Q4_K_M")
    assert again.types["F16"] == 2 and "Q4_K_M packs 32" in again.notes[-1]
    for source, kind in ((narrow, "F16"), (wide, "Q8_0")):
        done = write_gguf(str(source), tmp_path / f"{kind}.gguf", kind)
        assert not any("packs 32" in note for note in done.notes)


def test_a_file_keeps_its_metadata_and_what_has_the_type_already(tmp_path: Path) -> None:
    write_tiny_smollm2(tmp_path / "in.gguf")
    write_gguf(str(tmp_path / "in.gguf"), tmp_path / "same.gguf")
    write_gguf(str(tmp_path / "in.gguf"), tmp_path / "wide.gguf", "F32")
    write_gguf(str(tmp_path / "wide.gguf"), tmp_path / "back.gguf", "Q8_0")
    before, same, wide, back = (open_gguf(tmp_path / f"{name}.gguf") for name in ("in", "same", "wide", "back"))
    assert same.metadata == before.metadata and same.kinds == before.kinds
    own = {"general.file_type", "general.quantization_version"}
    assert {key: x for key, x in wide.metadata.items() if key not in own} == before.metadata
    assert before.tensors.keys() == same.tensors.keys() == wide.tensors.keys()
    for name, stored in before.tensors.items():
        assert same.tensors[name].kind == stored.kind and torch.equal(same.tensors[name].data, stored.data)
        assert wide.tensors[name].kind == "F32"
        assert torch.equal(dequantize(wide.tensors[name]), dequantize(stored)), name
        assert torch.equal(dequantize(back.tensors[name]), dequantize(stored)), name


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_short_convolutions(kind: str, tmp_path: Path) -> None:
    """Taps stay float32; the blocks that have them are those without heads of keys."""
    conv = {"family": "lfm2", "qk_norm": True, "conv_blocks": (0, 2), "n_blocks": 3, "conv_taps": 4}
    write_gguf(str(folder_of(tmp_path / "model", **WIDE | conv)), tmp_path / "out.gguf", kind)
    file = open_gguf(tmp_path / "out.gguf")
    assert file.metadata["lfm2.attention.head_count_kv"] == [0, 2, 0] and file.metadata["lfm2.shortconv.l_cache"] == 4
    assert file.tensors["blk.0.shortconv.conv.weight"].shape == (256, 4) and "blk.0.attn_q.weight" not in file.tensors
    exact, found = hg.load(tmp_path / "model"), hg.load(tmp_path / "out.gguf")
    assert found.config.conv_blocks == (0, 2)
    for (name, p), q in zip(exact.named_parameters(), found.parameters(), strict=True):
        assert (p - q).abs().max() <= (0 if kind == "F32" or "conv.conv" in name else p.abs().max() / 64), name
    biased = folder_of(tmp_path / "biased", **WIDE | conv | {"conv_bias": True})
    with pytest.raises(HandgradError, match=r"conv\.\w+\.bias"):
        write_gguf(str(biased), tmp_path / "biased.gguf", kind)
    assert not (tmp_path / "biased.gguf").exists()


def test_one_tensor_is_in_memory_at_a_time(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one tensor was packed to is freed before the next one is packed."""
    last: list[weakref.ref[torch.Tensor]] = []
    made = []
    pack = export.pack

    def counting(*arguments: Any) -> torch.Tensor:
        made.append(arguments[2])
        assert all(reference() is None for reference in last)
        found = pack(*arguments)
        last[:] = [weakref.ref(found)]
        return found

    monkeypatch.setattr(export, "pack", counting)
    done = write_gguf(str(wide), tmp_path / "out.gguf", "F16")
    assert len(made) == sum(done.types.values())


# ── adapters and runs ───────────────────────────────────────────────────────────────────────────────────────────────


def adapter_of(base: Path, folder: Path, **options: Any) -> hg.GPT:
    model = hg.load(base)
    hg.lora.inject(model, rank=3, targets="all-linear", **options)
    generator = torch.Generator().manual_seed(1)
    for layer in hg.lora.adapters_of(model).values():
        layer.up.data = 0.1 * torch.randn(layer.up.shape, generator=generator)
    hg.lora.save(model, folder)
    return model


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rslora": True}])
def test_an_adapter_is_merged(options: dict[str, Any], wide: Path, tmp_path: Path) -> None:
    model = adapter_of(wide, tmp_path / "adapter", **options)
    write_gguf(str(tmp_path / "adapter"), tmp_path / "out.gguf", "F32")
    tokens = torch.arange(0, 64, 3)[None]
    merged, expected = hg.load(tmp_path / "out.gguf").logits(tokens), model.logits(tokens)
    assert (merged - expected).norm() < 1e-5 * expected.norm()
    assert (hg.load(wide).logits(tokens) - expected).norm() > 1e-2 * expected.norm()


def test_an_adapter_of_a_gguf_file_keeps_the_tokenizer_of_the_file(tmp_path: Path) -> None:
    write_tiny_smollm2(tmp_path / "base.gguf")
    model = adapter_of(tmp_path / "base.gguf", tmp_path / "adapter")
    with pytest.raises(HandgradError, match=r"types that cannot be written: choose one with type"):
        write_gguf(str(tmp_path / "adapter"), tmp_path / "out.gguf")
    write_gguf(str(tmp_path / "adapter"), tmp_path / "out.gguf", "F32")
    base, out = open_gguf(tmp_path / "base.gguf"), open_gguf(tmp_path / "out.gguf")
    for key, value in base.metadata.items():
        if key.startswith("tokenizer."):
            assert out.metadata[key] == value and out.kinds[key] == base.kinds[key], key
    tokens = torch.arange(0, 64, 3)[None]
    assert torch.allclose(hg.load(out.path).logits(tokens), model.logits(tokens), rtol=1e-4, atol=1e-5)


def test_a_run_is_written_from_its_best_checkpoint(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 60)
    run = tmp_path / "run"
    shape = ["--model", "nano-llama", "--n-blocks", "1", "--d-model", "16", "--n-heads", "2"]
    succeed(
        "train", "--data", str(text), "--tokenizer", "bpe:300", *shape, "--n-context", "16", "--steps", "2",
        "--batch-tokens", "32", "--out", str(run), "--sample-tokens", "0",
    )  # fmt: skip
    said = succeed("convert", str(run), "--gguf", str(tmp_path / "run.gguf")).stdout
    assert "11 F32" in said and str(tmp_path / "run.gguf") in said
    before, after = tokenizer.read(_checkpoint(run)), tokenizer.read(tmp_path / "run.gguf")
    assert before.encode("one two eleven") == after.encode("one two eleven") and before.end == after.end
    tokens = torch.tensor([after.encode("three four five")])
    assert torch.allclose(hg.load(run).logits(tokens), hg.load(tmp_path / "run.gguf").logits(tokens), atol=1e-6)


def _checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


# ── tokenizers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def written(known: Tokenizer, folder: Path) -> dict[str, Any]:
    write_gguf(str(folder_of(folder / "model", known)), folder / "out.gguf")
    return open_gguf(folder / "out.gguf").metadata


@pytest.mark.parametrize("pre", [name for name in SPLITTINGS if name != "default"])
def test_byte_level_metadata_come_back(pre: str, tmp_path: Path) -> None:
    given = byte_pairs(pre, add_bos_token=True, add_eos_token=False)
    known = read(tmp_path / "in.gguf", given)
    found = written(known, tmp_path)
    assert SPLITTINGS[found.pop("tokenizer.ggml.pre")] == SPLITTINGS[given.pop("tokenizer.ggml.pre")]
    assert {key: found.get(key) for key in given} == given
    again = tokenizer.read(tmp_path / "out.gguf")
    texts = varied_texts(100, seed=9)
    assert [list(x) for x in again.encode_batch(texts)] == [list(x) for x in known.encode_batch(texts)]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_metadata_come_back(prefix: bool, tmp_path: Path) -> None:
    """Scores are numbered anew, in the same order; of tokens that no merge makes they have no effect."""
    given = pieces(train_pieces(tmp_path), add_space_prefix=prefix)
    known = read(tmp_path / "in.gguf", given)
    found = written(known, tmp_path)
    scores = found.pop("tokenizer.ggml.scores")
    before = given.pop("tokenizer.ggml.scores")
    assert {key: found.get(key) for key in given} == given
    made = {tuple(pair) for pair in json.loads(known.to_json())["model"]["merges"]}
    ids = [given["tokenizer.ggml.tokens"].index(token) for token in {a + b for a, b in made}]
    assert sorted(ids, key=lambda i: -scores[i]) == sorted(ids, key=lambda i: (-before[i], i))
    again = tokenizer.read(tmp_path / "out.gguf")
    assert all(again.encode(text) == known.encode(text) for text in varied_texts(200, seed=10))


def test_template_ends_and_rows_without_a_token(tmp_path: Path) -> None:
    known = read(tmp_path / "in.gguf", byte_pairs(add_bos_token=False))
    folder = folder_of(tmp_path / "model", known, n_vocab=known.n_vocab + 3)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    bot = known.inner.token_to_id("<｜bot｜>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [known.end, bot]}))
    write_gguf(str(folder), tmp_path / "out.gguf")
    found = open_gguf(tmp_path / "out.gguf").metadata
    assert found["tokenizer.chat_template"] == TEMPLATE
    assert (found["tokenizer.ggml.eos_token_id"], found["tokenizer.ggml.eot_token_id"]) == (known.end, bot)
    n = known.n_vocab
    assert found["tokenizer.ggml.tokens"][n:] == [f"[PAD{i}]" for i in range(n, n + 3)]
    assert found["tokenizer.ggml.token_type"][n:] == [5, 5, 5]


def edited(folder: Path, change: Any) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def _other_splitting(content: Any) -> None:
    content["pre_tokenizer"] = {"type": "Whitespace"}


def _lowercase(content: Any) -> None:
    content["normalizer"] = {"type": "Lowercase"}


def _whole_words(content: Any) -> None:
    content["model"]["ignore_merges"] = True


def _single_word(content: Any) -> None:
    content["added_tokens"][0]["single_word"] = True


REFUSED = {
    "another splitting": (_other_splitting, r'splits text by \[\{"type": "Whitespace".* no known name'),
    "lower case": (_lowercase, r'after \{"type": "Lowercase"'),
    "words that need no merges": (_whole_words, "splits text by"),
    "a token inside of words": (_single_word, r"inside of words \(single_word\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_would_tokenize_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    folder = folder_of(tmp_path / "model", read(tmp_path / "in.gguf", byte_pairs()))
    edited(folder, change)
    with pytest.raises(HandgradError, match=message):
        write_gguf(str(folder), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_merges_that_scores_cannot_express_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", read(tmp_path / "in.gguf", pieces(train_pieces(tmp_path))))
    edited(folder, lambda content: content["model"]["merges"].pop())
    with pytest.raises(HandgradError, match="do not follow from scores"):
        write_gguf(str(folder), tmp_path / "out.gguf")


def test_spaces_beside_a_token_that_llama_cpp_keeps_are_told(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", read(tmp_path / "in.gguf", byte_pairs()))

    def strip(content: Any) -> None:
        content["added_tokens"][0]["rstrip"] = True

    edited(folder, strip)
    with pytest.raises(HandgradError, match="cannot hold this tokenizer"):
        write_gguf(str(folder), tmp_path / "out.gguf")


def test_characters_are_no_tokenizer_of_llama_cpp(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", make("chars", ["abc"]))
    with pytest.raises(HandgradError, match='no tokenizer of the kind "WordLevel"'):
        write_gguf(str(folder), tmp_path / "out.gguf")


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bad_input_is_named_and_nothing_is_written(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    (tmp_path / "there.gguf").write_text("mine")
    (tmp_path / "folder.gguf").mkdir()
    bare = tmp_path / "bare"
    hg.save(hg.load(wide), bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    for arguments, message in (
        (["--gguf", str(tmp_path / "there.gguf")], "there.gguf exists already: choose another name"),
        (["--gguf", str(tmp_path / "folder.gguf")], "it is a folder; give a file name"),
        (["--gguf", str(tmp_path / "no" / "out.gguf")], "does not exist"),
        (["--gguf", str(tmp_path / "out.bin")], "the name of a GGUF file ends with .gguf"),
        (["--gguf", str(out), "--type", "Q3_K"], "--type Q3_K: weights can be written as F32, F16"),
        (["--gguf", str(out), "--out", str(tmp_path / "x")], "give --out for a directory or --gguf for a GGUF file"),
        ([], "give --out for a directory or --gguf for a GGUF file"),
        (["--gguf", str(out), "--dtype", "float16"], "are for a directory; for a GGUF file give --type"),
        (["--out", str(tmp_path / "x"), "--type", "F16"], "--type is for a GGUF file: give --gguf"),
    ):
        assert message in error_of("convert", str(wide), *arguments)
    assert "has no tokenizer, and llama.cpp does not open a file without one" in error_of(
        "convert", str(bare), "--gguf", str(out)
    )
    assert (tmp_path / "there.gguf").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"there.gguf", "folder.gguf", "bare"}


def test_weights_that_are_not_finite_leave_nothing(wide: Path, tmp_path: Path) -> None:
    model = hg.load(wide)
    with torch.no_grad():
        next(model.parameters())[3, 4] = torch.nan
    hg.save(model, tmp_path / "model")
    make("bytes", []).write(tmp_path / "model")
    with pytest.raises(HandgradError, match=r"model.embed_tokens.weight has values that are not finite"):
        write_gguf(str(tmp_path / "model"), tmp_path / "out.gguf", "Q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_named_and_leaves_nothing(wide: Path, tmp_path: Path) -> None:
    program = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
        "from handgrad.cli.app import main; main()"
    )
    command = [sys.executable, "-c", program, "convert", str(wide), "--gguf", str(tmp_path / "out.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "cannot write" in done.stderr and "nothing was written" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_killed_halfway_leaves_no_file_of_that_name(wide: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom handgrad.gguf import writing\n"
        "def slow(write_one, tensors, path):\n"
        "    write_one(tensors[0].packed().numpy()); print('half', flush=True); time.sleep(60)\n"
        "writing._write_tensors = slow\nfrom handgrad.cli.app import main; main()"
    )
    command = [sys.executable, "-c", program, "convert", str(wide), "--gguf", str(tmp_path / "out.gguf")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not (tmp_path / "out.gguf").exists()
    write_gguf(str(wide), tmp_path / "out.gguf")  # sweeps what the killed process left
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
