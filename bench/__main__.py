"""python -m bench [SCENARIO …] [--case TEXT] [--model MODEL] [--quick | --tiny] [--json FILE] [--plot FILE.svg]
python -m bench table FILE.json … [--into PAGE.md] [--json FILE] [--plot FILE.svg]"""

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from . import SCENARIOS, WITH_MIXED, WITH_MODEL

if TYPE_CHECKING:
    from .machine import Machine
    from .row import Row
    from .scenarios import Part
    from .sizes import Size

err = Console(stderr=True)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    from handgrad.errors import HandgradError
    from handgrad.machine import configure_runtime

    configure_runtime()  # as a command
    try:
        if "files" in options:
            from .table import run as write_table

            write_table(options)
            return
        sys.exit(run(options))
    except KeyboardInterrupt:  # before or after the measurements; run() keeps what they found
        err.print("Interrupted.", highlight=False)
        sys.exit(130)
    except (HandgradError, ImportError, OSError) as mistake:
        err.print(f"handgrad bench: {mistake}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(1)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the options, without importing torch."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["table"]:
        return parse_table(given[1:])
    width = min(80, shutil.get_terminal_size().columns)
    lines = (
        textwrap.fill(f"{name:<18}{text}", width, initial_indent="  ", subsequent_indent=20 * " ")
        for name, text in {
            **SCENARIOS,
            "table FILE …": "Write the README's table from JSON files; see table --help.",
        }.items()
    )
    parser = argparse.ArgumentParser(
        prog="handgrad bench",
        description="Speed and memory side by side with other libraries, in one run.",
        epilog="\n".join(["scenarios:", *lines]),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=20, width=width),
    )
    parser.add_argument("scenario", nargs="*", metavar="SCENARIO", help="scenario to measure (default: all)")
    parser.add_argument(
        "--case", metavar="TEXT", action="append", default=[],
        help="only cases whose name contains this text, as in --case 1x512; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODEL", default="",
        help=f"model of {', '.join(WITH_MODEL)}: smollm2, a .gguf file or a directory, on real instructions (default:"
        " GPT-2 124M, random weights, on pieces of text); with --tiny a tiny Llama",
    )  # fmt: skip
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", dest="size", action="store_const", const="quick", help="smaller sizes, 3 minutes")
    size.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny",
        help="tiny models, one round, seconds: only shows that every scenario runs",
    )  # fmt: skip
    parser.add_argument(
        "--json", metavar="FILE", help="JSON file for all figures, machine, load, versions and commit; - is stdout"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="SVG file for a plot of ratios, and of time and memory over tokens"
    )
    parser.set_defaults(size="full")
    options = parser.parse_args(given)
    for name in options.scenario:
        if name not in SCENARIOS:
            parser.error(f"unknown scenario {name!r}; choose from {', '.join(SCENARIOS)}")
        if options.model and name not in WITH_MODEL:
            parser.error(f"--model is an option of {', '.join(WITH_MODEL)}, not of {name}")
    return options


def parse_table(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="handgrad bench table",
        description="The documentation's tables of speed and memory, from results of handgrad bench.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="results of --json; scenarios may be in several")
    parser.add_argument(
        "--into", metavar="FILE", action="append", default=[],
        help="page to write the table into, between its two comments; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="file for all results in one")
    parser.add_argument("--plot", metavar="FILE", help="SVG file for a plot of all results")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Measure, print and write; return the exit status."""
    from handgrad.errors import HandgradError
    from handgrad.files.atomic import write_text
    from handgrad.model.precision import why_not_mixed

    from .machine import Machine, origin
    from .outputs import check_outputs
    from .picture import draw
    from .scenarios import as_json, completed
    from .show import Watch, summary
    from .sizes import SIZES
    from .supervise import measure

    check_outputs(json=None if options.json == "-" else options.json, plot=options.plot)
    size, machine = replace(SIZES[options.size], base=options.model), Machine.now()
    parts = chosen(options, size)
    out = Console(stderr=options.json == "-")  # stdout is reserved for JSON
    if not out.is_terminal:
        out.width = 140
    warn(machine)
    if (reason := why_not_mixed()) and {part.scenario for part in parts} & set(WITH_MIXED):
        text = f"no contenders in mixed precision or under autocast, this machine does not multiply bfloat16: {reason}"
        err.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)
    rows: list[Row] = []
    made, shown = origin(), set[str]()
    status, before = 0, (tempfile.tempdir, signal.signal(signal.SIGTERM, signal.default_int_handler))

    def as_text(state: Machine) -> str:
        return as_json(completed(rows), state, size, command_of(options), made) + "\n"

    with tempfile.TemporaryDirectory() as scratch, Watch(parts, err) as watch:
        tempfile.tempdir = scratch  # also of children that are killed and cannot clean up

        def show_scenario(name: str) -> None:
            watch.print(completed([row for row in rows if row.scenario == name]), size.name, machine, out)
            shown.add(name)

        try:
            for part, found in measure(parts, watch.tell, watch.tick):
                rows += found
                if options.json not in (None, "-"):  # now: a process that is killed later loses nothing
                    try:
                        write_text(Path(options.json), as_text(machine.after()))
                    except (HandgradError, OSError) as reason:  # the table is shown all the same
                        text = f"{options.json} is not written yet, and tried again after the next case: {reason}"
                        err.print(text, style="red", highlight=False, markup=False, soft_wrap=True)
                if part is last_of(part.scenario, parts):
                    show_scenario(part.scenario)
        except KeyboardInterrupt:
            status = 130
            for name in {row.scenario for row in rows} - shown:  # the finished cases of one that was interrupted
                show_scenario(name)
        finally:
            tempfile.tempdir = before[0]
            signal.signal(signal.SIGTERM, before[1])
    machine = machine.after()
    if options.json == "-":
        sys.stdout.write(as_text(machine))
    elif options.json and rows:  # without a measurement, an earlier file stays
        write_text(Path(options.json), as_text(machine))
    if options.plot and rows:
        write_text(Path(options.plot), draw(completed(rows), machine))
    out.print(f"whole run: {machine.state}", style="dim", highlight=False)
    warn(machine)
    if status:
        report_interrupt(len(rows), options)
    return int(summary(rows, err)) or status


def report_interrupt(count: int, options: argparse.Namespace) -> None:
    from handgrad.formatting import plural

    files = [name for name in (options.json, options.plot) if name not in (None, "-")]
    if count:
        text = f"{plural(count, 'measurement')} {'was' if count == 1 else 'were'} finished"
        text += f" and written to {' and '.join(files)}" if files else ""
    else:
        text = "Nothing was measured" + (f", and {' and '.join(files)} not written" if files else "")
    err.print(f"Interrupted. {text}.", highlight=False, markup=False, soft_wrap=True)


def chosen(options: argparse.Namespace, size: "Size") -> list["Part"]:
    """The parts that the options name."""
    from handgrad.errors import HandgradError
    from handgrad.formats import models

    from .scenarios import parts

    if size.base and size.name != "tiny":
        models.weights_folder(size.base)  # reports a wrong name before anything is measured
    names = list(dict.fromkeys(options.scenario)) or list(WITH_MODEL if options.model else SCENARIOS)
    every = [part for name in names for part in parts(name, size)]
    for text in options.case:
        if not any(matches(text, part) for part in every):
            raise HandgradError(f"no case contains {text!r}; there are: {'; '.join(part.case for part in every)}")
    return [part for part in every if not options.case or any(matches(text, part) for text in options.case)]


def matches(text: str, part: "Part") -> bool:
    """Whether the case's name contains the text; x stands for ×."""
    wanted, name = (y.lower().replace("x", "×") for y in (text, part.case))
    return wanted in name


def last_of(scenario: str, parts: list["Part"]) -> "Part":
    return [part for part in parts if part.scenario == scenario][-1]


def command_of(options: argparse.Namespace) -> str:
    """The command line without the names of its outputs, which the figures do not depend on."""
    words = ["handgrad", "bench", *options.scenario]
    for text in options.case:
        words += ["--case", text]
    words += ["--model", options.model] if options.model else []
    return shlex.join(words + ([f"--{options.size}"] if options.size != "full" else []))


def warn(machine: "Machine") -> None:
    """Print the machine's warning: before the figures, and again below them."""
    if machine.warning:
        err.print(machine.warning, style="bold white on red", highlight=False)


if __name__ == "__main__":
    main()
