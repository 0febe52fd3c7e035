"""The pages that are generated at every build: the reference, the checks, the benchmarks, source files."""

import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import typer
from bench import SCENARIOS, table
from bench.row import Row
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from typer.testing import CliRunner

import handgrad
import notebooks
import quotes
from handgrad.cli.app import app
from handgrad.ledger import CHECKS
from handgrad.ledger.check import SECTIONS

# The packages of public names → headings of the Python reference, in this order.
GROUPS = {
    "api": "Training",
    "model": "Models and gradients",
    "nn": "Layers for PyTorch models",
    "lora": "Adapters (`hg.lora`)",
    "inference": "Generation",
    "formats": "Models on disk",
    "per_example": "Single examples",
    "explain_page": "The explain page",
    "proof": "Checks of our gradients",
    "auditing": "Checks of other gradients",
    "machine": "Settings of the process",
    "plan": "Number of threads",
    "errors": "Errors",
}


def generate() -> dict[str, str]:
    """Every generated page by its name."""
    return {
        "reference/python.md": python_reference(),
        "reference/paper.md": formulas("paper", "Formulas as printed", "On 2-D matrices, one head at a time."),
        "reference/ops.md": formulas("ops", "Formulas as computed", "Batched, as training uses them."),
        "reference/commands.md": commands(),
        "reference/checks.md": checks(),
        "reference/benchmarks.md": benchmarks(),
        **notebooks.pages(),
    }


# ── the reference ───────────────────────────────────────────────────────────────────────────────────────────────────


def public_names() -> Iterator[tuple[str, str]]:
    """Each public name as users write it, and the path of its definition."""
    for name in handgrad.__all__:
        thing = getattr(handgrad, name)
        if isinstance(thing, ModuleType):
            for inner in thing.__all__:
                found = getattr(thing, inner)
                if not isinstance(found, ModuleType):
                    yield f"hg.{name}.{inner}", f"{getattr(found, '__module__', thing.__name__)}.{inner}"
        else:
            yield f"hg.{name}", f"{thing.__module__}.{name}"


def python_reference() -> str:
    by_package: dict[str, list[tuple[str, str]]] = {}
    for name, path in public_names():
        by_package.setdefault(path.split(".")[1], []).append((name, path))
    lines = ["# Python", "", "`import handgrad as hg` gives these names. The text is that of the docstrings."]
    if unknown := set(by_package) - set(GROUPS):
        raise ValueError(f"GROUPS in docs/site/pages.py has no heading for the names of {unknown}")
    for package, heading in GROUPS.items():
        lines += ["", f"## {heading}"]
        for name, path in by_package[package]:
            lines += ["", f"::: {path}", "    options:", f"      heading: {name}", f"      toc_label: {name}"]
    return "\n".join(lines) + "\n"


def formulas(package: str, title: str, intro: str) -> str:
    lines = [f"# {title}", "", f"The functions of `handgrad.{package}`. {intro}"]
    for file in sorted((quotes.ROOT / quotes.PACKAGE / package).glob("[a-z]*.py")):
        module = import_module(f"handgrad.{package}.{file.stem}")
        names = [
            name
            for name, found in inspect.getmembers(module, inspect.isfunction)
            if found.__module__ == module.__name__ and not name.startswith("_")
        ]
        if names:
            lines += [
                "",
                f"## {file.stem}",
                "",
                f"[The source](../../{quotes.PACKAGE}{package}/{file.name})",
            ]
            lines += ["", "```text", inspect.getdoc(module) or "", "```"]
        for name in names:
            lines += ["", f"::: {module.__name__}.{name}", "    options:", f"      heading: {file.stem}.{name}"]
    return "\n".join(lines) + "\n"


def commands() -> str:
    """What --help prints, for every command."""
    lines = ["# Commands", "", "What every command prints with `--help`."]
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100", "NO_COLOR": "1"}).stdout
        lines += ["", f"## {name.capitalize()}", "", "```text", shown.rstrip(), "```"]
    return "\n".join(lines) + "\n"


# ── results ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def checks() -> str:
    """A table of every check of the ledger, by section of the paper."""
    lines = ["# Every check", "", f"`handgrad verify` runs these {len(CHECKS)} checks on new random values."]
    lines += ["`handgrad verify --only ID` runs one. How to read the ids: [checking](../layers/README.md#checking)."]
    for number, title in SECTIONS.items():
        chosen = [check for check in CHECKS.values() if check.section == number]
        lines += [
            "",
            f"## {title}",
            "",
            "| id | equation | statement | compared with | limit |",
            "|---|---|---|---|---|",
        ]
        for check in chosen:
            statement = " ".join(check.statement.split()).replace("|", "\\|")
            limit = "equal" if check.tolerance == 0 else f"{check.tolerance:.0e}"
            lines.append(f"| `{check.id}` | {check.equation} | {statement} | {check.oracle} | {limit} |")
    return "\n".join(lines) + "\n"


def benchmarks() -> str:
    """Every published measurement of handgrad bench, with its command."""
    results = json.loads((quotes.ROOT / "docs" / "bench" / "results.json").read_text())["results"]
    lines = [
        "# Every measurement",
        "",
        "The rows behind the [benchmarks](../benchmarks.md). Seconds are those of the best",
    ]
    lines += ["round; the ratio is the reference's time ÷ this one's. Run a command to measure it on your machine."]
    measured = [(result["command"], table.rows_of(result)) for result in results]
    for scenario, description in SCENARIOS.items():
        title, _, more = re.sub(r"\.$", "", description).partition(": ")
        parts = [(command, [row for row in rows if row.scenario == scenario]) for command, rows in measured]
        if any(rows for _, rows in parts):
            lines += ["", f"## {title}", "", f"{more[0].upper()}{more[1:]}." if more else ""]
        for command, rows in parts:
            if rows:
                lines += ["", "```sh", command, "```", ""]
                lines += ["| case | contender | seconds | median | memory | ratio |", "|---|---|---|---|---|---|"]
                lines += [result_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def result_line(row: Row) -> str:
    """A measurement as a line of a table."""
    memory = f"{row.memory / 1e9:.2f} GB" if row.memory else ""
    figures = [row.problem or _figure(row.seconds), _figure(row.median), memory, _figure(row.ratio, ".2f", "×")]
    return f"| {' | '.join([row.case, row.contender, *figures])} |"


def _figure(x: float, form: str = ".3g", unit: str = "") -> str:
    """A figure, or nothing if it was not measured."""
    return "" if x != x else f"{x:{form}}{unit}"


# ── source files ────────────────────────────────────────────────────────────────────────────────────────────────────


def show_source(path: str) -> str:
    """A page with a file of the repository, its lines numbered, or with the names in a folder."""
    file = quotes.ROOT / path
    title = f"# {path.removeprefix(quotes.PACKAGE)}\n\n"
    if file.is_dir():
        return title + "\n".join(f"- `{inner.name}`" for inner in sorted(file.glob("[!_.]*"))) + "\n"
    lexer = get_lexer_for_filename(file.name) if file.suffix else TextLexer()
    shown = highlight(
        file.read_text(), lexer, HtmlFormatter(cssclass="highlight source", linespans="line", wrapcode=True)
    )
    return title + shown
