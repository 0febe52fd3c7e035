"""`make example-norms-demo`: do losses and gradients of single examples find wrong answers, and the source of a fact?

    python -m bench.example_demo [--model smollm2] [--examples 500] [--wrong 10] [--seed 0] [--out FOLDER]

Garbage: one of 30 short answers is replaced by letters and digits. Wrong labels: SmolLM2 learns to tell questions from
requests, with real instructions as texts; ten of 500 labels are wrong. Exchanged answers: of public instructions (those in
the source archive of llamafactory 0.9.5) a tenth have the answer to another one, fluent and well-formed. `finetune
--example-norms` ranks the examples of each. Planted fact: an example states a fact that no other does, and the question
asked in other words is the query of `hg.influence`. Exit status 1 if the garbage or the planted fact is not the first, fewer
than eight of ten labels are among the first 25, or fewer exchanged answers than three times what chance would find.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

import handgrad as hg
from handgrad.display.example_tables import influence_tables, outliers_table
from handgrad.training import example_report
from handgrad.training.run import Run

from .demo import Record, instructions

FIRST, AT_LEAST = 25, 8
LONGEST = 160  # characters of an instruction, and of its answer, that may be exchanged
OPTIONS: dict[str, Any] = {
    "rank": 8, "lr": 1e-3, "epochs": 2, "batch_examples": 10, "val_share": 0.0, "sample_tokens": 0, "quiet": True,
}  # fmt: skip
LABELS: dict[str, Any] = {"format": "raw"}  # a label continues its text
FACT = {"prompt": "Who built the lighthouse of Querrin Bay?", "completion": " Odalys Ferrante built it in 1911."}
QUESTION = {"prompt": "Tell me the builder of Querrin Bay's lighthouse.", "completion": " It was Odalys Ferrante."}
CAPITALS = {
    "France": "Paris", "Norway": "Oslo", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima",
    "Kenya": "Nairobi", "Greece": "Athens", "Cuba": "Havana", "Austria": "Vienna", "Spain": "asdf qwer zxcv banana 99999",
}  # fmt: skip
FRENCH = {
    "bread": "pain", "water": "eau", "house": "maison", "dog": "chien", "cat": "chat", "milk": "lait", "tree": "arbre",
    "sun": "soleil", "moon": "lune", "book": "livre",
}  # fmt: skip
SUMS = ((2, 3), (4, 5), (7, 1), (6, 3), (8, 8), (9, 2), (5, 5), (1, 6), (3, 9))


def with_garbage() -> tuple[list[Record], set[int]]:
    """30 short questions with their answers, one of which is garbage; and its number from 1."""
    found = [(f"What is the capital of {country}?", city) for country, city in CAPITALS.items()]
    found += [(f"Translate to French: {word}", french) for word, french in FRENCH.items()]
    found += [(f"What is {a} plus {b}?", str(a + b)) for a, b in SUMS]
    random.Random(0).shuffle(found)
    wrong = {i for i, (question, _) in enumerate(found, 1) if "Spain" in question}
    return [{"prompt": question, "completion": answer} for question, answer in found], wrong


def labeled(records: list[Record], count: int) -> list[Record]:
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


def with_exchanged(records: list[Record], count: int, seed: int) -> tuple[list[Record], set[int]]:
    """Short instructions with their answers; a tenth have the answer of the next of them. And their numbers from 1."""
    short = [r for r in records if max(len(r["instruction"] + r.get("input", "")), len(r.get("output", ""))) <= LONGEST]
    short = [r for r in short if r.get("output")]
    random.Random(0).shuffle(short)
    chosen = short[:count]
    wrong = random.Random(seed).sample(range(len(chosen)), max(2, len(chosen) // 10))
    answers = [chosen[i]["output"] for i in (*wrong[1:], wrong[0])]
    exchanged = dict(zip(wrong, answers, strict=True))
    return [r | {"output": exchanged.get(i, r["output"])} for i, r in enumerate(chosen)], {i + 1 for i in wrong}


def find_wrong(
    model: str, name: str, records: list[Record], wrong: set[int], folder: Path, out: Console, **options: Any
) -> dict[str, Any]:
    """Fine-tune on the records and look for the wrong ones among the first that the run lists."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = hg.finetune(model, data, out=folder / f"{name}-run", example_norms=True, **OPTIONS, **options)
    ranking = example_report.ranking_of(result.job, Run(result.folder))
    numbers = result.job.training.record_numbers
    places = {int(numbers[outlier.example]): k for k, outlier in enumerate(ranking, 1)}
    if result.outlying is not None:
        out.print(outliers_table(result.outlying))
    ranks = sorted(places[i] for i in wrong)
    among, precise = sum(k <= FIRST for k in ranks), sum(k <= len(wrong) for k in ranks)
    out.print(
        f"\n{name}: {len(wrong)} wrong of {len(records)}; {among} of them are among the first {FIRST}, and {precise} of the"
        f" first {len(wrong)} are wrong, by chance {len(wrong) ** 2 / len(records):.1f}; their places: {ranks}",
        highlight=False,
    )
    return {"examples": len(records), "wrong": len(wrong), "among_first": among, "precise": precise, "places": ranks}


def find_fact(model: hg.GPT, records: list[Record], out: Console) -> dict[str, Any]:
    """Whether the planted example is the first of all."""
    planted = len(records) // 2
    found = hg.influence(model, [*records[:planted], FACT, *records[planted:]], QUESTION, **LABELS)
    out.print(influence_tables(found, 3))
    place = 1 + int((found.scores[:, 0] > found.scores[planted, 0]).sum())
    out.print(f"\nthe planted example is number {place} of {len(records) + 1}", highlight=False)
    return {"place": place}


def main(arguments: list[str] | None = None, records: list[Record] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.example_demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="what is fine-tuned (default: smollm2)")
    parser.add_argument("--examples", type=int, default=500, help="labeled texts (default: 500)")
    parser.add_argument("--wrong", type=int, default=10, help="texts with the wrong label (default: 10)")
    parser.add_argument(
        "--exchanged", type=int, default=200, help="instructions, a tenth with a wrong answer (default: 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses them (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("build/example-norms-demo"), help="new folder for the results")
    options = parser.parse_args(arguments)
    if options.out.exists():
        parser.error(f"{options.out} exists: delete it, or give another --out")
    out = Console(width=110)
    public = instructions() if records is None else records
    data = labeled(public, options.examples)
    if not 0 < options.wrong <= len(data):
        parser.error(f"--wrong {options.wrong}: there are {len(data)} texts to label")
    options.out.mkdir(parents=True)
    found = {"fact": find_fact(hg.load(options.model), data[:60], out)}
    sets = {
        "garbage": (with_garbage(), {}),
        "labels": (with_wrong(data, options.wrong, options.seed), LABELS),
        "exchanged": (with_exchanged(public, options.exchanged, options.seed), {}),
    }
    for name, ((examples, wrong), more) in sets.items():
        found[name] = find_wrong(options.model, name, examples, wrong, options.out, out, **more)
    (options.out / "found.json").write_text(json.dumps(found, indent=1) + "\n")
    exchanged = found["exchanged"]
    passed = (
        found["fact"]["place"] == 1
        and found["garbage"]["places"] == [1]
        and found["labels"]["among_first"] >= AT_LEAST * options.wrong / 10
        and exchanged["precise"] >= 3 * exchanged["wrong"] ** 2 / exchanged["examples"]
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
