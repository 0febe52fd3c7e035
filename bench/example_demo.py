"""`make example-norms-demo`: do gradients of single examples find wrong labels, and the example that taught a fact?

    python -m bench.example_demo [--model smollm2] [--examples 500] [--wrong 10] [--seed 0] [--out FOLDER]

Wrong labels: SmolLM2 learns to tell questions from requests, with real instructions as texts; ten of 500 labels are wrong.
`finetune --example-norms` ranks all of them by the norms of their gradients. Planted fact: an example states a fact that
no other does, and the question asked in other words is the query of `hg.influence`. Exit status 1 if fewer than eight of
ten are among the first 25, or the planted example is not the first.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

import handgrad as hg
from handgrad.display.influence import influence_tables, outliers_table
from handgrad.training import example_report
from handgrad.training.run import Run

from .demo import Record, instructions

FIRST, AT_LEAST = 25, 8
OPTIONS: dict[str, Any] = {
    "rank": 8, "lr": 1e-3, "epochs": 2, "batch_examples": 10, "val_share": 0.0, "sample_tokens": 0, "quiet": True,
}  # fmt: skip
FACT = {"prompt": "Who built the lighthouse of Querrin Bay?", "completion": " Odalys Ferrante built it in 1911."}
QUESTION = {"prompt": "Tell me the builder of Querrin Bay's lighthouse.", "completion": " It was Odalys Ferrante."}


def labelled(records: list[Record], count: int) -> list[Record]:
    """The shortest instructions, each with its kind as the answer."""
    texts = dict.fromkeys(r["instruction"].strip() for r in records)
    kinds = {text: " question" if text.endswith("?") else " request" for text in texts if text[-1:] in ("?", ".")}
    found = sorted(kinds, key=len)[:count]
    random.Random(0).shuffle(found)
    return [{"prompt": f"{text}\nKind:", "completion": kinds[text]} for text in found]


def with_wrong(records: list[Record], count: int, seed: int) -> tuple[list[Record], set[int]]:
    """The records, of which `count` have the other label; and their numbers from 1."""
    wrong = set(random.Random(seed).sample(range(len(records)), count))
    other = {" question": " request", " request": " question"}
    changed = [r | {"completion": other[r["completion"]]} if i in wrong else r for i, r in enumerate(records)]
    return changed, {i + 1 for i in wrong}


def find_wrong(model: str, records: list[Record], wrong: set[int], folder: Path, out: Console) -> dict[str, Any]:
    """Fine-tune on the labels and look for the wrong ones among the first that the run lists."""
    data = folder / "labels.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = hg.finetune(model, data, out=folder / "run", example_norms=True, **OPTIONS)
    ranking = example_report.ranking_of(result.job, Run(result.folder))
    numbers = result.job.training.record_numbers
    places = {int(numbers[outlier.example]): k for k, outlier in enumerate(ranking, 1)}
    if result.outlying is not None:
        out.print(outliers_table(result.outlying))
    found = sum(places[i] <= FIRST for i in wrong)
    ranks = sorted(places[i] for i in wrong)
    out.print(
        f"\n{found} of {len(wrong)} wrong labels are among the first {FIRST}; their places: {ranks}", highlight=False
    )
    return {"examples": len(records), "wrong": len(wrong), "among_first": found, "places": ranks}


def find_fact(model: hg.GPT, records: list[Record], out: Console) -> dict[str, Any]:
    """Whether the planted example is the first of all."""
    planted = len(records) // 2
    found = hg.influence(model, [*records[:planted], FACT, *records[planted:]], QUESTION)
    out.print(influence_tables(found, 3))
    place = 1 + int((found.scores[:, 0] > found.scores[planted, 0]).sum())
    out.print(f"\nthe planted example is number {place} of {len(records) + 1}", highlight=False)
    return {"place": place}


def main(arguments: list[str] | None = None, records: list[Record] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.example_demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="what is fine-tuned (default: smollm2)")
    parser.add_argument("--examples", type=int, default=500, help="labelled texts (default: 500)")
    parser.add_argument("--wrong", type=int, default=10, help="texts with the wrong label (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="chooses them (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("build/example-norms-demo"), help="new folder for the results")
    options = parser.parse_args(arguments)
    if options.out.exists():
        parser.error(f"{options.out} exists: delete it, or give another --out")
    out = Console(width=110)
    data = labelled(instructions() if records is None else records, options.examples)
    if not 0 < options.wrong <= len(data):
        parser.error(f"--wrong {options.wrong}: there are {len(data)} texts to label")
    options.out.mkdir(parents=True)
    fact = find_fact(hg.load(options.model), data[:60], out)
    norms = find_wrong(options.model, *with_wrong(data, options.wrong, options.seed), options.out, out)
    (options.out / "found.json").write_text(json.dumps({"fact": fact, "norms": norms}, indent=1) + "\n")
    return 0 if norms["among_first"] >= AT_LEAST * options.wrong / 10 and fact["place"] == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
