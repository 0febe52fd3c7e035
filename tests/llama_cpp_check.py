"""Perplexities and greedy continuations of real models, equal to llama.cpp's.

    python tests/llama_cpp_check.py --program build/llama-cpp/bin/python --only gemma3

For each model that handgrad fetches:

- The perplexity of a passage, of its own file and of files of its weights in float32 and in 16 bits, within 0.1 %. Without
  OpenBLAS, llama.cpp rounds to 8 bits what it multiplies packed weights with: then the difference is only shown.
- Greedy continuations of five prompts in float32: each of our tokens must be llama.cpp's most probable one after the same
  tokens. The only exception are two tokens that are closer to each other, in both programs, than logits of the two programs
  are. Then all four logits are printed, and the comparison goes on from the token that llama.cpp prefers.

The exit status is 1 if something differs. Our weights are unpacked from the model's own file, which gives those of the
float32 file exactly and needs less memory.
"""

import argparse
import json.decoder
import sys
import tempfile
from pathlib import Path

from torch import Tensor

import handgrad as hg
from handgrad.formats.gguf_out import write_gguf
from handgrad.formats.models import weights_folder
from handgrad.text import downloads, tokenizer
from handgrad.text.tokenizer import Tokenizer
from llama_cpp_client import LlamaCpp, Results, logits, perplexity, relative

LIMIT = 1e-3  # of perplexity, relative
CHARACTERS = 1600  # the end of the text: 400 to 600 tokens
N = 64  # tokens of a continuation
PROMPTS = {
    "smollm2": ("The capital of France is", "Once upon a time", "Water boils at", "In 1492,", "The recipe needs"),
    "gemma3": ("The capital of France is", "Once upon a time", "Water boils at", "In 1492,", "The recipe needs"),
    "qwen-coder": ("def fibonacci(n):", "import os\n\nfor", "class Stack:", "# Sort a list\n", "SELECT name FROM"),
}


def text_of(name: str) -> str:
    """The end of tiny Shakespeare; for a coder, of a module of Python"""
    path = Path(json.decoder.__file__) if name == "qwen-coder" else downloads.fetch("shakespeare")[0]
    return path.read_text()[-CHARACTERS:]


def exact_model(path: Path) -> hg.GPT:
    """The model of a file, which computes in float32 throughout."""
    model = hg.load(path, packed=True)
    model.rounds_activations = False
    return model


def check_passage(results: Results, name: str, mine: Tensor, other: Tensor, ids: list[int], known: bool) -> None:
    """Logits of both programs; `known`: a difference of rounding is expected."""
    values = [perplexity(x, ids) for x in (mine, other)]
    difference = abs(values[1] / values[0] - 1)
    found = "perplexity {:.4f}, llama.cpp {:.4f}".format(*values)
    found += f" ({difference:.4%}); logits {relative(other, mine):.1e}; {len(ids)} tokens"
    results.line(f"{name}, a passage", difference < LIMIT or known, found)


def check_greedy(
    llama: LlamaCpp, results: Results, name: str, model: hg.GPT, path: Path, known: Tokenizer, close: float
) -> None:
    """Continuations, against llama.cpp's logits after the same tokens. `close`: the largest difference of two logits."""
    prompts = [known.encode_prompt(x) for x in PROMPTS[name]]
    made = hg.generate(model, prompts, N, stop_at_end=False)
    for text, ids, ours in zip(PROMPTS[name], prompts, made, strict=True):
        ties = 0
        while True:
            theirs = llama.logits_of(path, ids + ours[:-1])[len(ids) - 1 :]
            at = next((i for i, row in enumerate(theirs) if row.argmax() != ours[i]), N)
            if at == N:
                break
            first, second = theirs[at].topk(2).indices.tolist()
            mine = logits(model, ids + ours[:at])[-1]
            both = [[x[id].item() for id in (first, second)] for x in (theirs[at], mine)]
            gaps = [a - b for a, b in both]
            tie = ours[at] == second and max(map(abs, gaps)) < 2 * close
            words = " and ".join(repr(known.decode([id])) for id in (first, second))
            found = "llama.cpp {:.5f} {:.5f}, ours {:.5f} {:.5f}; gaps {:.1e} {:.1e}".format(*both[0], *both[1], *gaps)
            found = f"token {at + 1}, {words}: {found}; elsewhere logits differ by {close:.1e}"
            results.line(f"{name}, {text!r}, {'a tie' if tie else 'other tokens'}", tie, found)
            if not tie:
                break
            ties += 1
            taken = [*ours[:at], first]
            ours = taken + (hg.generate(model, [ids + taken], N - at - 1, stop_at_end=False)[0] if at + 1 < N else [])
        if at == N:
            results.line(f"{name}, {text!r}", True, f"{N - ties} of {N} tokens equal, {ties} ties")


def check(llama: LlamaCpp, results: Results, name: str, folder: Path) -> None:
    source = weights_folder(name)
    known, model = tokenizer.read(source), exact_model(source)
    ids = known.encode_prompt(text_of(name))
    mine = logits(model, ids)
    check_passage(results, f"{name}, {source.name}", mine, llama.logits_of(source, ids), ids, not llama.exact)
    for kind in ("F32", "F16", "BF16"):
        path = folder / f"{kind}.gguf"
        write_gguf(str(source), path, kind)
        other = llama.logits_of(path, ids)
        if kind == "F32":
            check_passage(results, f"{name}, {kind}", mine, other, ids, False)
            check_greedy(llama, results, name, model, path, known, (other - mine).abs().max().item())
        else:
            check_passage(results, f"{name}, {kind}", logits(exact_model(path), ids), other, ids, False)
        path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="Python of the environment with llama-cpp-python")
    parser.add_argument("--only", choices=tuple(PROMPTS))
    given = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        llama = LlamaCpp(given.program, Path(folder))
        for name in PROMPTS if given.only is None else (given.only,):
            downloads.fetch(name)
            check(llama, results, name, Path(folder))
        llama.close()
    return results.conclude()


if __name__ == "__main__":
    sys.exit(main())
