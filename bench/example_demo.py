"""`make example-norms-demo`: do gradients of single examples find wrong answers, and the example that taught a fact?

    python -m bench.example_demo [--model smollm2] [--examples 500] [--wrong 10] [--json FILE]

Wrong answers: among real instructions, ten get the answer of another; all are ranked by the norm of their gradient, relative
to what is typical for their number of targets. Planted fact: an example states a fact that no other does, and the question
asked in other words is the query. Exit status 1 if fewer than eight of the ten are among the first 25, or the planted example
is not the first.
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
from handgrad.errors import HandgradError
from handgrad.per_example.inputs import as_examples, as_text
from handgrad.per_example.outliers import Measurement, ranked
from handgrad.inference.model_text import model_text

from .demo import Record, instructions

FIRST, AT_LEAST = 25, 8
FACT = {"instruction": "Who built the lighthouse of Querrin Bay?", "input": "", "output": "Odalys Ferrante built it in 1911."}
QUESTION = {
    "instruction": "Tell me the builder of Querrin Bay's lighthouse.",
    "input": "",
    "output": "It was built by Odalys Ferrante.",
}


def chosen(records: list[Record], count: int) -> list[Record]:
    """The shortest ones, in an order of their own: a pass over them takes minutes."""
    found = sorted((r for r in records if r["output"].strip()), key=lambda r: sum(map(len, r.values())))[:count]
    random.Random(0).shuffle(found)
    return found


def with_wrong(records: list[Record], count: int, seed: int) -> tuple[list[Record], list[int]]:
    """The records, of which `count` have exchanged their answers in a circle; and which."""
    wrong = random.Random(seed).sample(range(len(records)), count)
    changed = [dict(record) for record in records]
    for here, other in zip(wrong, wrong[1:] + wrong[:1], strict=True):
        changed[here]["output"] = records[other]["output"]
    return changed, wrong


def find_wrong(model: hg.GPT, records: list[Record], wrong: list[int], out: Console) -> dict[str, Any]:
    data = as_examples(model, records)
    if data.per_epoch != len(records):
        raise HandgradError(f"{len(records)} records gave {data.per_epoch} examples: choose shorter ones")
    norms = hg.example_norms(model, data)
    tokenizer = model_text(model).tokenizer
    targets = [as_text(data, tokenizer, i).targets for i in range(data.per_epoch)]
    order = ranked(Measurement(i, 0, targets[i], float(norms[i])) for i in range(data.per_epoch))
    places = {outlier.example: k for k, outlier in enumerate(order, 1)}
    out.print(outliers_table([(o, as_text(data, tokenizer, o.example)) for o in order[:FIRST]], data.per_epoch))
    found = sum(places[i] <= FIRST for i in wrong)
    ranks = sorted(places[i] for i in wrong)
    out.print(f"\n{found} of {len(wrong)} wrong answers are among the first {FIRST}; their places: {ranks}", highlight=False)
    return {"examples": data.per_epoch, "wrong": len(wrong), "among_first": found, "places": ranks}


def find_fact(model: hg.GPT, records: list[Record], out: Console) -> dict[str, Any]:
    """Whether the planted example is the first of all."""
    planted = len(records) // 2
    found = hg.influence(model, [*records[:planted], FACT, *records[planted:]], QUESTION)
    out.print(influence_tables(found, 3))
    place = 1 + int((found.scores[:, 0] > found.scores[planted, 0]).sum())
    out.print(f"\nthe planted example is number {place} of {len(records) + 1}", highlight=False)
    return {"place": place}


def main(arguments: list[str] | None = None, records: list[Record] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.example_demo")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--wrong", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    out = Console(width=110)
    model = hg.load(options.model)
    data = chosen(instructions() if records is None else records, options.examples)
    result: dict[str, Any] = {"fact": find_fact(model, data[: options.examples // 2], out)}
    result["norms"] = find_wrong(model, *with_wrong(data, options.wrong, options.seed), out)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    right = result["norms"]["among_first"] >= AT_LEAST * options.wrong / 10 and result["fact"]["place"] == 1
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
