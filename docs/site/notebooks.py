"""The notebooks as pages, and as .ipynb files. They are plain Python files in the percent format, which Jupyter (by
jupytext) and editors open:

# %% [markdown]        a cell of text, in comments
# %%                   a cell of code
"""

import ast
import json
import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "notebooks"
BRANCH = "notebooks"  # of the repository, where .github/workflows/pages.yml puts them: Colab opens files of GitHub only
MARK = re.compile(r"^# %%( \[markdown\])?.*\n", re.M)


class Cell(NamedTuple):
    is_text: bool
    text: str


def cells(file: Path) -> list[Cell]:
    """The cells of a notebook, without the markers."""
    _, *parts = MARK.split(file.read_text())
    found = []
    for kind, body in zip(parts[::2], parts[1::2], strict=True):
        text = re.sub(r"^# ?", "", body, flags=re.M) if kind else body
        if not kind:
            ast.parse(text)
        found.append(Cell(bool(kind), text.strip("\n")))
    return found


def page(file: Path) -> str:
    """A notebook as Markdown."""
    parts = [cell.text if cell.is_text else f"```python\n{cell.text}\n```" for cell in cells(file)]
    first, *rest = parts
    origin = (
        f"*This page is `docs/notebooks/{file.name}`. [Download it as a notebook]({file.stem}.ipynb), or open the file in"
        " Jupyter with jupytext or in an editor.*"
    )
    return "\n\n".join([first, *rest, origin]) + "\n"


def pages() -> dict[str, str]:
    return {f"notebooks/{file.stem}.md": page(file) for file in sorted(FOLDER.glob("*.py"))}


def ipynb(file: Path, repository: str) -> str:
    """A notebook as Jupyter and Colab store it. If the repository is known, its first cell installs handgrad from there."""
    install = [Cell(False, f"%pip install --quiet git+{repository}")] if repository else []
    stored = [
        {"cell_type": "markdown", "metadata": {}, "source": cell.text}
        if cell.is_text
        else {"cell_type": "code", "metadata": {}, "source": cell.text, "outputs": [], "execution_count": None}
        for cell in [*install, *cells(file)]
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return json.dumps(
        {"nbformat": 4, "nbformat_minor": 4, "metadata": {"kernelspec": kernel}, "cells": stored},
        ensure_ascii=False,
        indent=1,
    )


def colab_link(stem: str, repository: str) -> str:
    """A line with the link that opens a notebook in Colab, which reads from GitHub alone; "" without an address there."""
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)", repository)
    return (
        f"[Open in Colab](https://colab.research.google.com/github/{found[1]}/blob/{BRANCH}/{stem}.ipynb)"
        if found
        else ""
    )
