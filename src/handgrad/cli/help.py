"""Help pages: plain text, wrapped at the width of the terminal without breaking words."""

import inspect
import re
import shutil
import textwrap
from typing import Any

from typer import style
from typer.core import TyperCommand, TyperGroup

MAX_WIDTH = 100
NBSP = "\u00a0"  # keeps a short default on one line
NAME_WIDTH = 24  # columns for the names of options
TYPE_NAMES = {"int": "N", "integer": "N", "float": "X", "path": "PATH", "str": "TEXT", "text": "TEXT"}


class Command(TyperCommand):
    """A command whose --help is made by `render`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(render(self, ctx))


class Group(TyperGroup):
    """A group of commands whose --help is made by `render`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(render(self, ctx))


def render(command: Any, ctx: Any) -> str:
    """The help page: usage, description, arguments and options by panel, commands."""
    width = max(40, min(MAX_WIDTH, shutil.get_terminal_size().columns))
    arguments = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in command.params if _is_argument(p)]
    usage = " ".join(
        [ctx.command_path, "[OPTIONS]", *arguments, *(["COMMAND"] if isinstance(command, TyperGroup) else [])]
    )
    parts = [textwrap.fill(usage, width, initial_indent="Usage: ", subsequent_indent=" " * 9, break_on_hyphens=False)]
    parts += [paragraph(part, width) for part in inspect.cleandoc(command.help or "").split("\n\n")]
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if not getattr(param, "hidden", False):
            title = getattr(param, "rich_help_panel", None) or ("Arguments" if _is_argument(param) else "Options")
            sections.setdefault(title, []).append((option_names(param), description(param)))
    if "Options" in sections:  # general options come last
        sections["Options"] = sections.pop("Options")
    for name in command.list_commands(ctx) if isinstance(command, TyperGroup) else ():
        first = inspect.cleandoc(command.commands[name].help or "").partition("\n\n")[0]
        sections.setdefault("Commands", []).append((name, first))
    parts += [f"{style(title + ':', bold=True)}\n{two_columns(rows, width)}" for title, rows in sections.items()]
    return "\n\n".join(parts) + "\n"


def paragraph(text: str, width: int) -> str:
    """A wrapped paragraph; example commands keep their lines."""
    if not text.lstrip().startswith("handgrad "):
        return _fill(" ".join(text.split()), width)
    lines = []
    for line in text.splitlines():
        command, _, comment = line.strip().partition("  # ")
        if len(line.strip()) + 2 <= width:
            lines.append(f"  {line.strip()}")
        else:
            lines += [_fill(comment, width, "  # ")] if comment else []
            lines.append(_fill(command, width, "  ", "      "))
    return "\n".join(lines)


def option_names(param: Any) -> str:
    """The names of an option with its value: --steps N, --tied/--untied, -h, --help"""
    if _is_argument(param):
        return str(param.name).upper()
    flags = ", ".join(sorted(param.opts, key=len)) + "".join(f"/{flag}" for flag in param.secondary_opts)
    return flags if param.is_flag else f"{flags} {param.metavar or _type_name(param)}"


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _type_name(param: Any) -> str:
    """The placeholder of an option's value. Versions of typer keep the type in different attributes."""
    known = getattr(param, "type", None)
    name = known.name if known is not None else getattr(param.type_descriptor.annotation, "__name__", "")
    return TYPE_NAMES.get(name.lower().partition(" ")[0], "TEXT")


def description(param: Any) -> str:
    """The help text of an option, with its default unless the text states one."""
    text = str(getattr(param, "help", None) or "")
    default = param.default
    if param.required:
        return f"{text} [required]"
    if "[default:" in text or not isinstance(default, str | int | float) or default == "" or default is False:
        return text
    if default is True:
        default = param.opts[0]
    return f"{text} [default: {default}]"


def two_columns(rows: list[tuple[str, str]], width: int) -> str:
    """Names on the left, texts on the right. The text starts on the next line after a long name or on a narrow terminal."""
    column = min(NAME_WIDTH, max(len(name) for name, _ in rows)) + 4
    if width < 72:
        column = 6
    lines = []
    for name, text in rows:
        text = re.sub(r"\[default: [^]]{1,16}]", lambda m: m[0].replace(" ", NBSP), " ".join(text.split()))
        body = textwrap.wrap(text, width - column, break_long_words=False, break_on_hyphens=False)
        body = [line.replace(NBSP, " ") for line in body]
        if len(name) + 4 <= column and body:
            lines.append(f"  {name:<{column - 2}}{body.pop(0)}")
        else:
            lines.append(f"  {name}")
        lines += [" " * column + line for line in body]
    return "\n".join(lines)


def _fill(text: str, width: int, first: str = "", rest: str | None = None) -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=first if rest is None else rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
