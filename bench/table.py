"""The tables of speed and memory, written from results of `handgrad bench --json` so that they cannot drift: every line in
docs/benchmarks.md, five in README.md. The comments in a page say which of the two it has:

    handgrad bench table train.json lora.json --json docs/bench/results.json --into README.md --into docs/benchmarks.md

Results of a busy machine, of small sizes, or with a failure of ours are refused.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from handgrad.errors import HandgradError
from handgrad.files.atomic import write_text

from . import SCENARIOS
from .cases import LOOP, MATMULS
from .generate import WITHOUT_CACHE
from .machine import Machine
from .outputs import check_outputs
from .picture import draw
from .row import BOUND, NAN, Row
from .scenarios import PRODUCTS, TORCH_BFLOAT16, TORCH_FLOAT32

BEGIN, END = "<!-- begin: written by handgrad bench table -->", "<!-- end: written by handgrad bench table -->"
BEGIN_SHORT = "<!-- begin: headlines, written by handgrad bench table -->"
HEADLINES = (  # scenario and case of the README's five lines
    ("train", "GPT-2 124M, 1×512"),
    ("lora", "LoRA r=16, 1×1024"),
    ("finetune", "batches of 8"),
    ("generate", "decode, float32, 1×512"),
    ("generate", "decode, 4 bits, 1×512"),
)
NOT_IN_A_TABLE = ("precision", "examples", "explain")
TITLES = {
    "train": "training step, {}",
    "memory": "memory of a step, {}",
    "lora": "GPT-2 124M, {}",
    "sft": "GPT-2 124M, {}, prompt-masked",
    "bridge": "`loss.backward()`, {}",
    "finetune": "`handgrad finetune`, {}",
    "shared": "nano recipe, {}",
}
SAME = ("cpu", "cores", "memory", "threads")  # of a machine; memory in GB
NOTHING = "it has no measurements; measure again"
Result = dict[str, Any]  # what --json wrote


def run(options: argparse.Namespace) -> None:
    """Print the table or write it into a page."""
    results = read([Path(name) for name in options.files])
    check_outputs(json=options.json, plot=options.plot)
    for name in options.into:
        check_outputs(into=name, json=options.json, plot=options.plot)
    pages = {Path(name): replace_table(Path(name), results) for name in options.into}
    if options.json:
        write_text(Path(options.json), json.dumps({"results": results}, indent=1, ensure_ascii=False) + "\n")
    if options.plot:
        rows = [with_model(row, result) for result in results for row in rows_of(result)]
        write_text(Path(options.plot), draw(rows, machine_of(results)))
    for path, page in pages.items():
        write_text(path, page)
    if not pages:
        print(render(results), end="")


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(files: list[Path]) -> list[Result]:
    """The publishable results of files; a case that is in several is taken from the last."""
    results: list[Result] = []
    for file in files:
        try:
            found = json.loads(file.read_text())
            several = found.get("results", [found])
            if not several:
                raise HandgradError(NOTHING)
            for result in several:
                check(result)
        except HandgradError as reason:
            raise HandgradError(f"{file}: {reason}") from None
        except OSError as reason:
            raise HandgradError(
                f"cannot read {file}: {reason.strerror}; name a file of handgrad bench --json"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise HandgradError(f"{file} is not a result of handgrad bench --json; measure again") from None
        results += several
    first = results[0]
    for result in results:
        for what, a, b in zip(SAME, *(identity(x["machine"]) for x in (first, result)), strict=True):
            if a != b:
                raise HandgradError(
                    f"results of different machines: {what} is {a} in one and {b} in another; measure all on one"
                )
        if result["versions"] != first["versions"]:
            raise HandgradError("results with different versions of Python or packages; measure all with the same")
    return without_repeats(results)


def identity(machine: dict[str, Any]) -> list[object]:
    """What results of one machine have in common. After a restart the system may leave a few kilobytes more or less."""
    return [round(machine[what] / 1e9) if what == "memory" else machine[what] for what in SAME]


def check(result: Result) -> None:
    """Raise if a result must not be published."""
    if result["size"] != "full":
        raise HandgradError(
            f"its size is {result['size']}: only full sizes are published; measure without --quick and --tiny"
        )
    machine = machine_of([result])
    if machine.busy:
        raise HandgradError(
            f"the machine was busy, {machine.state}: ratios from a busy machine are biased in our favor; measure again"
        )
    for row in rows_of(result):
        if row.has_failed:
            raise HandgradError(
                f"{row.scenario}, {row.case}, {row.contender}: {row.problem}; repair it and measure again"
            )
    if not result["rows"]:
        raise HandgradError(NOTHING)
    for key in ("commit", "dirty", "date", "command", "model", "versions"):
        result[key]


def without_repeats(results: list[Result]) -> list[Result]:
    seen: set[tuple[str, ...]] = set()
    kept = []
    for result in reversed(results):
        names = {(result["model"], row["scenario"], row["case"]) for row in result["rows"]}
        rows = [row for row in result["rows"] if (result["model"], row["scenario"], row["case"]) not in seen]
        seen |= names
        if rows:
            kept.append({**result, "rows": rows})
    return kept[::-1]


def rows_of(result: Result) -> list[Row]:
    rows = [Row(**{key: NAN if value is None else value for key, value in row.items()}) for row in result["rows"]]
    for row in rows:
        for of in fields(Row):
            if not isinstance(getattr(row, of.name), str if of.type is str else int | float):
                raise TypeError(f"{of.name} is {getattr(row, of.name)!r}")
    return rows


def with_model(row: Row, result: Result) -> Row:
    """The row with the model in the name of its case, if --model named one: others have cases of the same names."""
    return replace(row, case=f"{result['model']}: {row.case}") if "--model" in result["command"] else row


def machine_of(results: list[Result]) -> Machine:
    """The machine with the highest loads of all results."""
    states = [{k: v for k, v in result["machine"].items() if k != "busy"} for result in results]
    worst = {k: max((s[k] for s in states if s[k] is not None), default=None) for k in ("load", "load_after", "others")}
    return Machine(**{**states[0], **worst})


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def replace_table(page: Path, results: list[Result]) -> str:
    """The page with another table between its comments: the headlines or every line, as the first comment says."""
    before = page.read_text() if page.is_file() else ""
    begin = BEGIN_SHORT if BEGIN_SHORT in before else BEGIN
    if before.count(begin) != 1 or before.count(END) != 1 or before.index(begin) > before.index(END):
        raise HandgradError(f"{page} has no place for the table: add two lines to it, {BEGIN} and {END}")
    text = render(results, short=begin == BEGIN_SHORT)
    return before[: before.index(begin)] + f"{begin}\n{text}{END}" + before[before.index(END) + len(END) :]


def render(results: list[Result], short: bool = False) -> str:
    """The table, and below it what it was measured on; `short`: the headlines, without details."""
    lines = ["| case | handgrad | compared with | ratio | command |", "|---|---|---|---|---|"]
    for scenario in SCENARIOS:
        for result in results:
            rows = [row for row in rows_of(result) if row.scenario == scenario]
            if short:
                rows = [without_details(row) for row in rows if is_headline(row, rows)]
            if not rows or scenario in NOT_IN_A_TABLE:
                continue
            model = f" --model {result['model']}" if "--model" in result["command"] else ""
            command = f"`handgrad bench {scenario}{model}`"
            for title, *cells in lines_of(scenario, rows):
                named = f"{result['model']}: {title}" if model and not title.startswith("the same") else title
                lines.append(f"| {' | '.join([named, *cells])} | {command} |")
                command = ""
    return "\n".join([*lines, "", provenance(results), ""])


def is_headline(row: Row, rows: list[Row]) -> bool:
    """Whether the README shows this row: of ours, only the first contender of a case and that in mixed precision."""
    first = next(x for x in rows if x.case == row.case)
    return (row.scenario, row.case) in HEADLINES and (row is first or row.is_mixed or not row.is_ours)


def without_details(row: Row) -> Row:
    """The row without what plan predicted and without shares of a bound."""
    return replace(row, mfu=NAN, of_bound=NAN, predicted_seconds=NAN, predicted_memory=0)


def provenance(results: list[Result]) -> str:
    """Machine, load, versions, commit and date in one sentence."""
    machine, versions = machine_of(results), results[0]["versions"]
    dates = sorted({result["date"] for result in results})
    commits = dict.fromkeys(
        (result["commit"][:10] or "unknown") + " with changes" * result["dirty"] for result in results
    )
    programs = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    others = "" if machine.others is None else f", while other processes used at most {machine.others:.2f} cores"
    return (
        f"Measured on {dates[0]}{f' to {dates[-1]}' if len(dates) > 1 else ''}: {machine.cpu}, {machine.cores} cores,"
        f" {machine.memory / 1e9:.0f} GB, {machine.threads} threads; load at most {machine.load:.2f} before each run"
        f"{others}; {programs}; commit {', '.join(commits)}."
    )


def lines_of(scenario: str, rows: list[Row]) -> Iterator[list[str]]:
    """The first four cells of each line of a scenario."""
    if scenario == "attention":
        yield from attention_lines(rows)
    elif scenario == "context":
        yield from context_lines(rows)
    elif scenario == "generate":
        yield from generate_lines(rows)
    elif scenario == "products":
        yield from product_lines(rows)
    else:
        for case in dict.fromkeys(row.case for row in rows):
            title = case if ": " in case else TITLES[scenario].format(case)  # "model: …" names another model
            yield from case_lines(title, [row for row in rows if row.case == case])


def case_lines(title: str, rows: list[Row]) -> Iterator[list[str]]:
    """A line for the case, and one for each further contender of ours: mixed precision beside the peers under autocast."""
    first = rows[0]
    if first.contender.startswith("…"):
        title += f" with {of_ours(first)}"
    others = [row for row in rows[1:] if not row.is_ours and row.contender != MATMULS]
    peers = [row for row in others if not row.is_rounded] or rows[1:2]
    yield [title, figures(first), ", ".join(map(beside, peers)), ratios(first, peers)]
    for row in rows[1:]:
        if row.is_mixed:
            rivals = [*(other for other in others if other.is_rounded), replace(first, memory=0)]
            names = [beside(other) if other.is_rounded else f"float32 {seconds(other.seconds)}" for other in rivals]
            yield ["the same, mixed precision", figures(row), ", ".join(names), ratios(row, rivals)]
        elif row.is_ours and row not in peers:
            yield [
                "the same, " + of_ours(row),
                figures(row),
                f"{of_ours(first)} {seconds(first.seconds)}",
                against(row, first),
            ]


def ratios(row: Row, peers: list[Row]) -> str:
    """How many times as fast as each peer, and the share of the memory of the first."""
    parts = [f"{peer.seconds / row.seconds:.2f}×" for peer in peers if peer.seconds > 0]
    if peers and peers[0].memory and row.memory:
        parts.append(f"{row.memory / peers[0].memory:.2f} of the memory")
    return ", ".join(parts)


def of_ours(row: Row) -> str:
    """A contender of ours in words: its options, if it has others than the first."""
    if row.contender.startswith("… "):
        return f"`{row.contender.removeprefix('… ')}`"
    return "by the loop of `handgrad train`" if row.contender == LOOP else row.contender.removeprefix("handgrad, ")


def against(row: Row, first: Row) -> str:
    more = row.seconds / first.seconds - 1
    text = f"{abs(more):.1%} {'more' if more >= 0 else 'less'} time".replace("%", " %")
    return text + (f", {row.memory / first.memory:.2f} of the memory" if row.memory and first.memory else "")


def figures(row: Row) -> str:
    """Time, speed against torch's products, memory, and what plan predicted."""
    parts = [seconds(row.seconds)]
    if row.mfu == row.mfu:
        parts.append(f"{row.mfu:.2f}× torch's products")
    if row.of_idle == row.of_idle:
        parts.append(f"{row.of_idle:.0%} of its speed on the idle machine".replace("%", " %"))
    if row.memory:
        parts.append(gigabytes(row.memory))
    planned = [seconds(row.predicted_seconds)] if row.predicted_seconds == row.predicted_seconds else []
    planned += [gigabytes(row.predicted_memory)] if row.memory and row.predicted_memory else []
    return ", ".join(parts) + (f" (plan: {', '.join(planned)})" if planned else "")


def beside(row: Row) -> str:
    if row.problem:
        return f"{row.contender}: {row.problem}".replace("|", "/")
    name = "without" if row.is_ours else row.contender
    return f"{name} {seconds(row.seconds)}" + (f", {gigabytes(row.memory)}" if row.memory else "")


def attention_lines(rows: list[Row]) -> Iterator[list[str]]:
    """A line for each direction and kind of heads, with all lengths."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.contender == "handgrad":
            groups.setdefault(row.case.rsplit(", ", 1)[0], []).append(row)
    for group, mine in groups.items():
        direction, heads = group.split(", ", 1)
        shapes = " / ".join(row.case.rsplit(", ", 1)[1] for row in mine)
        times = " / ".join(f"{1e3 * row.seconds:.1f}" for row in mine)
        ratios = " / ".join("–" if row.ratio != row.ratio else f"{row.ratio:.2f}" for row in mine)
        yield [f"attention alone, {direction}, {heads}, {shapes}", f"{times} ms", "torch's kernel", f"{ratios}×"]


def product_lines(rows: list[Row]) -> Iterator[list[str]]:
    """A line for each orientation and kind of operands in mixed precision, with all numbers of rows."""
    rate = {(row.case, row.contender): row.gflops for row in rows if row.gflops == row.gflops}
    mixed = dict.fromkeys(row.contender for row in rows if row.is_mixed)
    for what, name in itertools.product(PRODUCTS, mixed):
        cases = [case for case, contender in rate if contender == name and case.startswith(f"c_fc: {what}, ")]
        counts = " / ".join(case.rsplit(", ", 1)[1].removesuffix(" rows") for case in cases)
        operands = "bfloat16" if "bfloat16" in name else "float32"
        mine, low, wide = ([rate.get((case, x), NAN) for case in cases] for x in (name, TORCH_BFLOAT16, TORCH_FLOAT32))
        ours, *theirs = (" / ".join(f"{x:.0f}" for x in rates) for rates in (mine, low, wide))
        ratios = [" / ".join(f"{x / y:.2f}" for x, y in zip(mine, of, strict=True)) for of in (low, wide)]
        yield [
            f"product {what}, mixed precision, {operands} operands, {counts} rows",
            f"{ours} GFLOP/s",
            f"torch in bfloat16 {theirs[0]}, in float32 {theirs[1]}",
            f"{ratios[0]}×, {ratios[1]}×",
        ]


def context_lines(rows: list[Row]) -> Iterator[list[str]]:
    """A line for each contender, with all lengths."""
    for contender in dict.fromkeys(row.contender for row in rows):
        mine = [row for row in rows if row.contender == contender and row.seconds > 0]
        lengths = " / ".join(f"{row.tokens:,}" for row in mine)
        times = " / ".join(seconds(row.seconds) for row in mine)
        memory = " / ".join(f"{row.memory / 1e9:.2f}" for row in mine)
        name = "`handgrad finetune`" if contender == "handgrad finetune" else contender
        yield [f"{name} on one example of {lengths} tokens", f"{times}; {memory} GB", "", ""]


def generate_lines(rows: list[Row]) -> Iterator[list[str]]:
    """A line for each kind of work, of weights and size of batch, with all contexts."""
    groups: dict[
        str, dict[str, list[Row]]
    ] = {}  # by the name of the case with {} for the number that varies, by number
    for row in rows:
        group, _, varying = row.case.rpartition("×")
        if row.case.endswith(WITHOUT_CACHE):
            varying, _, rest = row.case.partition(" ")
            group = f"{{}} {rest}"
        elif group:
            group += "×{}"
        groups.setdefault(group or row.case, {}).setdefault(varying, []).append(row)
    for group, cases in groups.items():
        firsts = [of_case[0] for of_case in cases.values()]
        cells = " / ".join(f"{row.tokens / row.seconds:,.0f}" for row in firsts) + " tokens/s"
        if all(row.of_bound == row.of_bound for row in firsts):
            shares = " / ".join(f"{100 * row.of_bound:.0f}" for row in firsts)
            cells += f", {shares} % of the bandwidth bound"
        names = dict.fromkeys(row.contender for of_case in cases.values() for row in of_case[1:])
        ratios = {x: " / ".join(against_first(x, of_case) for of_case in cases.values()) for x in names if x != BOUND}
        yield [group.format(" / ".join(cases)), cells, ", ".join(ratios), ", ".join(f"{x}×" for x in ratios.values())]


def against_first(name: str, rows: list[Row]) -> str:
    """How many times as fast the first contender is as this one."""
    found = [row for row in rows if row.contender == name and row.seconds > 0]
    return f"{found[0].seconds / rows[0].seconds:.2f}" if found else "–"


def seconds(x: float) -> str:
    return "" if x != x else f"{x:.1f} s" if x >= 10 else f"{x:.2f} s" if x >= 1 else f"{1e3 * x:.3g} ms"


def gigabytes(x: float) -> str:
    return f"{x / 1e9:.2f} GB"
