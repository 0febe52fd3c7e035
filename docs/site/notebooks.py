"""The notebooks as pages. They are plain Python files in the percent format, which Jupyter (by jupytext) and editors open:

# %% [markdown]        a cell of text, in comments
# %%                   a cell of code
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "notebooks"
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
    origin = f"*This page is `docs/notebooks/{file.name}`: open it in Jupyter with jupytext, or in an editor.*"
    return "\n\n".join([first, *rest, origin]) + "\n"


def pages() -> dict[str, str]:
    return {f"notebooks/{file.stem}.md": page(file) for file in sorted(FOLDER.glob("*.py"))}
