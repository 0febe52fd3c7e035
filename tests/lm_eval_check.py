"""Let lm-eval score a multiple-choice task over HTTP, and compare with log-likelihoods computed by transformers.

    python tests/lm_eval_check.py --program build/lm-eval/bin/lm_eval --model smollm2

lm-eval is in a separate environment (`make lm-eval-check` makes it); its model is `local-completions`, unmodified. The
log-likelihood of each of 64 answers must be that of transformers up to the rounding of float32, and the scores, acc and
acc_norm, must be equal. The exit status is 1 if they are not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

import handgrad as hg
from handgrad.formats.models import weights_folder
from handgrad.inference.model_text import model_text
from handgrad.serve.routes import Server
from handgrad.serve.served_models import open_models
from handgrad.tolerances import TOLERANCE

TASK = Path(__file__).parent / "data" / "lm_eval"
LIMIT = TOLERANCE[torch.float32]


class Scores(NamedTuple):
    """The log-likelihoods of all answers, question by question, and the two scores."""

    answers: list[list[float]]
    acc: float
    acc_norm: float


def questions() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASK / "choices.jsonl").read_text(encoding="utf-8").splitlines()]


def context_of(question: dict[str, Any]) -> str:
    return f"Question: {question['question']}\nAnswer:"


def scores_of(answers: list[list[float]]) -> Scores:
    """acc takes the most probable answer, acc_norm the most probable one per character."""
    right = [0, 0]
    for question, found in zip(questions(), answers, strict=True):
        per_character = [x / len(choice) for x, choice in zip(found, question["choices"], strict=True)]
        for i, values in enumerate((found, per_character)):
            right[i] += values.index(max(values)) == question["answer"]
    return Scores(answers, right[0] / len(answers), right[1] / len(answers))


@torch.no_grad()
def by_transformers(folder: Path) -> Scores:
    """One text at a time, without padding or cache."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for question in questions():
        answers.append(list[float]())
        before = len(tokenizer(context_of(question), add_special_tokens=False).input_ids)
        for choice in question["choices"]:
            ids = torch.tensor(
                tokenizer(f"{context_of(question)} {choice}", add_special_tokens=False).input_ids, dtype=torch.int64
            )
            logprobs = torch.log_softmax(network(ids[None]).logits[0, :-1].double(), 1)
            answers[-1].append(logprobs.gather(1, ids[1:, None])[before - 1 :].sum().item())
    return scores_of(answers)


def by_lm_eval(program: Path, url: str, name: str, folder: Path, out: Path) -> Scores:
    """Run lm-eval on the server; four requests at a time, each with three answers."""
    arguments = f"model={name},base_url={url}v1/completions,tokenizer={folder},num_concurrent=4"
    command = [str(program), "--model", "local-completions", "--model_args", arguments, "--batch_size", "3"]
    command += ["--include_path", str(TASK), "--tasks", "handgrad_choices", "--log_samples", "--output_path", str(out)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(out / "datasets"), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, cwd=TASK, env={**os.environ, **offline, "PYTHONPATH": ""}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"lm-eval failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    (samples,) = out.rglob("samples_handgrad_choices_*.jsonl")
    (results,) = out.rglob("results_*.json")
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: int(line["doc_id"]))
    found = json.loads(results.read_text(encoding="utf-8"))["results"]["handgrad_choices"]
    answers = [[float(response[0][0]) for response in line["resps"]] for line in lines]
    return Scores(answers, found["acc,none"], found["acc_norm,none"])


def difference(a: Scores, b: Scores) -> float:
    """The largest relative difference of log-likelihoods."""
    pairs = [(x, y) for xs, ys in zip(a.answers, b.answers, strict=True) for x, y in zip(xs, ys, strict=True)]
    return max(abs(x - y) / abs(y) for x, y in pairs)


def check(program: Path, model: str, work: Path) -> bool:
    """Write the model as transformers reads it, serve it as it is, compare, and print the scores."""
    source, folder = weights_folder(model), work / "model"
    network = hg.load(source, dtype="float32")
    hg.save(network, folder)
    model_text(network).tokenizer.write(folder)
    del network
    expected = by_transformers(folder)
    with Server(open_models(source, "served")) as url:
        found = by_lm_eval(program, url, "served", folder, work / "out")
    error = difference(found, expected)
    equal = (found.acc, found.acc_norm) == (expected.acc, expected.acc_norm)
    print(f"{'':14}   acc      acc_norm")
    print(f"transformers   {expected.acc:<8.4f} {expected.acc_norm:.4f}")
    print(f"lm-eval        {found.acc:<8.4f} {found.acc_norm:.4f}   {'equal' if equal else 'DIFFERENT'}")
    answers = sum(map(len, expected.answers))
    print(f"log-likelihoods of {answers} answers: largest relative difference {error:.1e} (limit {LIMIT:.0e})")
    return equal and error <= LIMIT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=Path("lm_eval"), help="lm-eval's command")
    parser.add_argument("--model", default="smollm2")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        sys.exit(not check(given.program.absolute(), given.model, Path(work)))


if __name__ == "__main__":
    main()
