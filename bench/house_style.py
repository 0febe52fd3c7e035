"""Real code as instructions: the functions of a package in one house style, each asked for by the first paragraph of its
docstring. The package is read, never run."""

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path

from handgrad.text.downloads import fetch

LONGEST = 1600  # characters of an answer
STYLE = "Args:"  # in the docstrings of functions that follow the style


def functions() -> list[dict[str, str]]:
    """The package's functions as records in Alpaca's format."""
    return list(records_of(fetch("algorithms")[0]))


def records_of(wheel: Path) -> Iterator[dict[str, str]]:
    """A record of the first public function of every module whose docstring has the style. The others are often variants of
    it, such as rotate_v2 of rotate_v1, which must not be trained on if the first is held out."""
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(name for name in archive.namelist() if name.endswith(".py")):
            source = archive.read(path).decode()
            functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
            for function in functions:
                text = ast.get_docstring(function) or ""
                if STYLE in text and not function.name.startswith("_"):
                    answer = f"```python\n{ast.get_source_segment(source, function)}\n```"
                    task = " ".join(text.partition("\n\n")[0].split())
                    if len(answer) <= LONGEST:
                        yield {
                            "instruction": f"Write the Python function {signature(function)}: {task}",
                            "output": answer,
                        }
                    break


def signature(function: ast.FunctionDef) -> str:
    """Its name and the names of its arguments."""
    return f"{function.name}({', '.join(argument.arg for argument in function.args.args)})"
