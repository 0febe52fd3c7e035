"""Open files of `handgrad convert --gguf` in llama.cpp, and compare what it computes with what we do.

    python tests/gguf_check.py --program build/llama-cpp/bin/python

llama-cpp-python is in a separate environment (`make gguf-check` makes it, which takes ten minutes). Compared are: logits
of every small model of tests/families that can be written, and of mixtures with packed experts; logits of SmolLM2 in
float32, alone and with a merged adapter; packed weights as llama.cpp unpacks them, bit by bit, and the error of our rounding
with that of its own; ids of 1,000 texts by the tokenizers of SmolLM2, Gemma 3 and Qwen2.5-Coder and by small ones of every
kind. The exit status is 1 if something differs. Perplexities and continuations: llama_cpp_check.py.
"""

import argparse
import json
import sys
import tempfile
import unicodedata
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path += [str(HERE / "families"), str(HERE / "gguf_files")]

from members import MEMBERS, family_of, transformers_model  # noqa: E402
from test_gguf_families import CLASSES, OPENED, REFUSED, saved  # noqa: E402
from test_gguf_tokenizer import SPLITTINGS, byte_pairs, pieces, train_pieces, varied_texts  # noqa: E402
from test_gguf_tokenizer import read as read_metadata  # noqa: E402

import handgrad as hg  # noqa: E402
from handgrad.families import FAMILIES  # noqa: E402
from handgrad.formats.gguf_out import write_gguf  # noqa: E402
from handgrad.formats.models import open_folder, weights_folder  # noqa: E402
from handgrad.gguf.file import dequantize, open_gguf  # noqa: E402
from handgrad.gguf.quantize import FILE_TYPES  # noqa: E402
from handgrad.text import downloads, tokenizer  # noqa: E402
from handgrad.text.tokenizer import Tokenizer, make  # noqa: E402
from llama_cpp_client import LlamaCpp, Results, logits, perplexity, relative  # noqa: E402

LIMIT = 1e-5  # relative, of logits in float32: two programs that add in different orders
GELU_LIMIT = 2.0**-10  # llama.cpp looks GELU up in a table of float16
TEXT = (
    "The history of the bicycle begins in 1817, when Karl von Drais rode a wooden machine without pedals from Mannheim. "
    "Forty years later, mechanics in Paris added cranks to the front wheel; the first chain drove a rear wheel in 1885."
)


def check_families(llama: LlamaCpp, results: Results, folder: Path) -> None:
    tokens = torch.randint(259, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    for i, name in enumerate(MEMBERS):
        if name in REFUSED or FAMILIES[family_of(name)].architecture not in CLASSES:
            continue
        where = folder / str(i)
        written = write_gguf(str(saved(name, where)), where / "out.gguf")
        if any("at whole features" in note for note in written.notes):  # what llama.cpp computes instead
            fields = json.loads((where / "config.json").read_text())
            fields["rope_parameters"]["truncate"] = True
            (where / "config.json").write_text(json.dumps(fields))
        model = hg.load(where, dtype="float32")
        no_window = any("without a window" in note for note in written.notes)
        n = min(len(tokens), model.config.window or 0) if no_window else len(tokens)
        try:
            error = relative(llama.logits_of(where / "out.gguf", tokens[:n]), logits(model, tokens[:n]))
        except RuntimeError as reason:
            results.line(f"logits of {name}", False, str(reason))
            continue
        limit = GELU_LIMIT if model.config.activation in ("gelu_tanh", "gelu") else LIMIT
        results.line(f"logits of {name}", error < limit, f"{error:.1e}  {n} tokens")


def check_smollm2(llama: LlamaCpp, results: Results, folder: Path) -> None:
    source, whole = weights_folder("smollm2"), folder / "model"
    hg.save(open_folder(source), whole)
    model, known = hg.load(whole), tokenizer.read(source)
    tokens = known.encode(TEXT)
    exact = folder / "f32.gguf"
    write_gguf(str(whole), exact)
    error = relative(llama.logits_of(exact, tokens), logits(model, tokens))
    results.line("logits of SmolLM2, F32", error < LIMIT, f"{error:.1e}")
    check_ids(llama, results, "SmolLM2", exact, known)
    found = llama.ask(model=str(exact), tokens=[], texts=[])
    original = llama.ask(model=str(source), tokens=[], texts=[])
    results.line(
        "template, ends and begin as the original's", found == original, f"{len(found['template'])} characters"
    )
    for kind in ("F16", "BF16", "Q8_0", "Q5_1", "Q4_0", "Q4_K_M"):
        check_rounding(llama, results, folder, exact, kind, tokens, "SmolLM2")
    check_own_rounding(llama, results, folder)
    check_adapter(llama, results, folder, whole, tokens)


def check_experts(llama: LlamaCpp, results: Results, folder: Path) -> None:
    """Packed experts, of gpt-oss with biases, and of Qwen3-MoE in blocks of 256."""
    tokens = torch.randint(259, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    for name, kinds in (("gpt_oss", ("MXFP4", "Q5_0", "BF16")), ("qwen3_moe", ("MXFP4", "Q4_K_M", "Q6_K"))):
        sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "vocab_size": 259}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
        if name == "gpt_oss":
            del sizes["moe_intermediate_size"]
        where = folder / name
        network = transformers_model(f"{name}, 3 queries to a key", **sizes, **OPENED.get(name, {})).float()
        for p in network.parameters():
            p.data *= 0.25 if p.ndim > 1 else 1  # N(0, 0.3²) is too much for this width: every layer would saturate
        network.save_pretrained(where)
        make("bytes", []).write(where)
        write_gguf(str(where), where / "f32.gguf")
        for kind in kinds:
            check_rounding(llama, results, where, where / "f32.gguf", kind, tokens, name)


def check_rounding(
    llama: LlamaCpp, results: Results, folder: Path, exact: Path, kind: str, tokens: list[int], name: str
) -> None:
    """llama.cpp must read the weights that we read, and compute with them what we do. With packed weights its products round
    activations to 8 bits as well, unless it has OpenBLAS, so that the perplexity on the packed file is only shown."""
    packed, unpacked = folder / "packed.gguf", folder / "unpacked.gguf"
    for path in (packed, unpacked):
        path.unlink(missing_ok=True)
    write_gguf(str(exact), packed, kind)
    llama.quantize(packed, unpacked, FILE_TYPES["F32"])
    ours, theirs = open_gguf(packed).tensors, open_gguf(unpacked).tensors
    same = all(torch.equal(dequantize(ours[x]), dequantize(theirs[x])) for x in ours)
    results.line(f"weights of {name}, {kind}, as llama.cpp unpacks them", same, f"{len(ours)} tensors")
    mine, other, rounding = logits(hg.load(packed), tokens), *(llama.logits_of(x, tokens) for x in (unpacked, packed))
    error = relative(other, mine)
    values = [perplexity(x, tokens) for x in (mine, rounding, logits(hg.load(exact), tokens))]
    shown = "perplexity {:.3f}; packed in llama.cpp {:.3f}; in float32 {:.3f}".format(*values)
    results.line(f"logits of {name}, {kind}", error < LIMIT, f"{error:.1e}  {shown}")


def check_own_rounding(llama: LlamaCpp, results: Results, folder: Path) -> None:
    """Our k-quants of random weights and of SmolLM2's contractions, against llama.cpp's of the same weights."""
    config = hg.preset("nano-llama", n_vocab=512, d_model=256, n_heads=4, n_kv_heads=2, d_hidden=768, n_blocks=2)
    hg.save(hg.GPT(config, seed=0), folder / "wide")
    make("bytes", []).write(folder / "wide")
    write_gguf(str(folder / "wide"), folder / "wide.gguf", "F32")
    exact = open_gguf(folder / "wide.gguf").tensors
    for kind in ("Q4_K", "Q5_K", "Q6_K"):
        ours, theirs = folder / f"ours-{kind}.gguf", folder / f"theirs-{kind}.gguf"
        write_gguf(str(folder / "wide.gguf"), ours, kind)
        llama.quantize(folder / "wide.gguf", theirs, FILE_TYPES[kind])
        mine, other = open_gguf(ours).tensors, open_gguf(theirs).tensors
        both = [name for name in exact if mine[name].kind == other[name].kind == kind]
        worst = max(
            relative(dequantize(mine[name]), dequantize(exact[name]))
            / relative(dequantize(other[name]), dequantize(exact[name]))
            for name in both
        )
        results.line(f"error of {kind} over llama.cpp's", worst < 1.02, f"{worst:.3f} at most, {len(both)} matrices")


def check_adapter(llama: LlamaCpp, results: Results, folder: Path, whole: Path, tokens: list[int]) -> None:
    model = hg.load(whole)
    hg.lora.inject(model, rank=4, targets="all-linear", rslora=True, dora=True)
    generator = torch.Generator().manual_seed(0)
    for layer in hg.lora.adapters_of(model).values():
        layer.up.data = 0.02 * torch.randn(layer.up.shape, generator=generator)
    hg.lora.save(model, folder / "adapter")
    before, expected = logits(hg.load(whole), tokens), logits(model, tokens)
    write_gguf(str(folder / "adapter"), folder / "merged.gguf", "F32")
    error = relative(llama.logits_of(folder / "merged.gguf", tokens), expected)
    change = relative(before, expected)
    results.line(
        "logits of SmolLM2 with a merged adapter (rsLoRA, DoRA)",
        error < LIMIT < change,
        f"{error:.1e}, without {change:.1e}",
    )


def check_tokenizers(llama: LlamaCpp, results: Results, folder: Path) -> None:
    kinds: dict[str, Tokenizer] = {"bytes": make("bytes", []), "bpe:600": make("bpe:600", varied_texts(300, seed=8))}
    for pre in dict.fromkeys(SPLITTINGS.values()):
        name = next(name for name, known in SPLITTINGS.items() if known == pre and name != "default")
        kinds[name] = read_metadata(folder / "source.gguf", byte_pairs(name))
    (folder / "spm").mkdir()
    trained = train_pieces(folder / "spm")
    for prefix in (True, False):
        metadata = pieces(trained, add_space_prefix=prefix)
        kinds[f"SentencePiece, {'a' if prefix else 'no'} space before"] = read_metadata(
            folder / "source.gguf", metadata
        )
    for i, (name, known) in enumerate(kinds.items()):
        where = folder / f"tokenizer{i}"
        hg.save(hg.GPT(hg.preset("nano-llama", n_vocab=known.n_vocab, n_blocks=1), seed=0), where)
        known.write(where)
        write_gguf(str(where), where / "out.gguf", "F16")
        check_ids(llama, results, name, where / "out.gguf", known)


def check_ids(
    llama: LlamaCpp, results: Results, name: str, path: Path, known: Tokenizer, without: str = "\0\0"
) -> None:
    texts = [
        unicodedata.normalize("NFC", text) for text in varied_texts(1000) if without not in text
    ]  # llama.cpp does not compose characters
    ids = llama.ids_of(path, texts)
    wrong = [text for text, found in zip(texts, ids, strict=True) if found != known.encode(text)]
    results.line(
        f"ids of {name}", not wrong, f"{len(texts)} texts" if not wrong else f"{len(wrong)} differ: {wrong[0]!r}"
    )


def check_gemma3(llama: LlamaCpp, results: Results, folder: Path) -> None:
    source, known = weights_folder("gemma3"), tokenizer.read(weights_folder("gemma3"))
    check_ids(llama, results, "Gemma 3", source, known)
    begun = llama.ask(model=str(source), tokens=[], texts=[])["with_bos"]
    results.line("Gemma 3 begins a text as llama.cpp does", known.encode_prompt("a") == begun, f"{begun}")


def check_qwen_coder(llama: LlamaCpp, results: Results, folder: Path) -> None:
    source, known = weights_folder("qwen-coder"), tokenizer.read(weights_folder("qwen-coder"))
    check_ids(
        llama, results, "Qwen2.5-Coder", source, known, "</s>"
    )  # llama.cpp takes this plain token for a special one


CHECKS = {
    "families": check_families, "experts": check_experts, "tokenizers": check_tokenizers, "smollm2": check_smollm2,
    "gemma3": check_gemma3, "qwen-coder": check_qwen_coder,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="Python of the environment with llama-cpp-python")
    parser.add_argument("--only", choices=tuple(CHECKS))
    given = parser.parse_args()
    for model in ("smollm2", "gemma3", "qwen-coder"):
        if given.only in (None, model):
            downloads.fetch(model)
    results = Results()
    with tempfile.TemporaryDirectory() as name:
        llama = LlamaCpp(given.program, Path(name))
        for part, check in CHECKS.items():
            if given.only in (None, part):
                (Path(name) / part).mkdir()
                check(llama, results, Path(name) / part)
        llama.close()
    return results.conclude()


if __name__ == "__main__":
    sys.exit(main())
