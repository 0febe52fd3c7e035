"""Quote the source beside formulas, and show the files that pages link to.

A page names the code of a formula in a comment below it, which other viewers of Markdown do not show:

    $$
    ∂b = Σ_tok Δ
    $$

    <!-- source: paper/linear.py grad_b, ops/linear.py grad_b -->

`paper/attention.py backward (25)` quotes only the lines of the function whose comments have the number 25 (25.a, 25.b).
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = "src/handgrad/"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DIRECTIVE = re.compile(
    r"(?:(?P<formula>^\$\$\n(?:(?!\$\$).)*\n\$\$)\n+)?^<!-- source: (?P<names>[^>]+?) -->", re.M | re.S
)
KINDS = {"paper": "The formula in code", "ops": "As computed", "model": "In the network", "kernels": "Compiled"}
FENCE = re.compile(r"(^ *```.*?^ *``` *$\n?)", re.M | re.S)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


class Quote(NamedTuple):
    path: str  # from the root of the repository
    line: int
    code: str


def quote(name: str) -> Quote:
    """The code that a name of a source comment means; raises if there is none."""
    parts = re.fullmatch(r"(\S+\.py) (\w+)(?: \((\d+)\))?", name.strip())
    if parts is None:
        raise ValueError(f"'{name}': expected 'paper/FILE.py FUNCTION', with ' (EQUATION)' if only its lines are meant")
    file, function, equation = parts.groups()
    path = PACKAGE + file
    text = (ROOT / path).read_text()
    node = _find(ast.parse(text), function)
    if node is None:
        raise ValueError(f"{file} has no function {function}")
    lines = text.splitlines()
    if equation is None:
        return Quote(path, node.lineno, "\n".join(lines[node.lineno - 1 : node.end_lineno]))
    numbered = re.compile(rf"#.*\({equation}(\.[a-z])?\)")
    chosen = [i for i in range(node.lineno, (node.end_lineno or node.lineno) + 1) if numbered.search(lines[i - 1])]
    if not chosen:
        raise ValueError(f"{file} {function}: no line has the comment ({equation})")
    return Quote(path, chosen[0], "\n".join(lines[i - 1].strip() for i in chosen))


def _find(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name), None)


def names_in(markdown: str) -> list[str]:
    """Everything that the source comments of a page name."""
    return [name.strip() for found in DIRECTIVE.finditer(markdown) for name in found["names"].split(",")]


def place_quotes(markdown: str, page: str) -> str:
    """Replace every source comment by the code, beside the formula above it."""

    def beside(found: re.Match[str]) -> str:
        quotes = [quote(name) for name in found["names"].split(",")]
        code = "\n\n".join(_caption(q, page) + f"\n\n```python\n{q.code}\n```" for q in quotes)
        if found["formula"] is None:
            return f'<div class="quoted" markdown>\n\n{code}\n\n</div>'
        formula = f'<div class="formula" markdown>\n\n{found["formula"]}\n\n</div>'
        return (
            f'<div class="beside" markdown>\n\n{formula}\n\n<div class="quoted" markdown>\n\n{code}\n\n</div>\n\n</div>'
        )

    return DIRECTIVE.sub(beside, markdown)


def _caption(q: Quote, page: str) -> str:
    short = q.path.removeprefix(PACKAGE)
    words = KINDS.get(short.split("/")[0], "In the code")
    return f'[{words}]({relative(source_page(q.path), page)}#line-{q.line} "{short}, line {q.line}")'


# ── links to files outside docs/ ────────────────────────────────────────────────────────────────────────────────────

PROJECT = {  # files of the repository that are pages of the site
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}


def source_page(path: str) -> str:
    """The page that shows a file of the repository."""
    return PROJECT.get(path, f"source/{path}.md")


def relative(target: str, page: str) -> str:
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


def outside_links(markdown: str, origin: str) -> set[str]:
    """The files outside docs/ that a page (at `origin` in the repository) links to."""
    found = set()
    for part in FENCE.split(markdown)[::2]:
        for match in LINK.finditer(part):
            if (path := _outside(match[2], origin)) is not None:
                found.add(path)
    return found


def redirect_links(markdown: str, origin: str, page: str) -> str:
    """Let links to files lead to the pages that show them, and links from outside into docs/ to its pages."""

    def redirect(match: re.Match[str]) -> str:
        if (path := _outside(match[2], origin)) is not None:
            return f"{match[1]}{relative(source_page(path), page)}{match[3] or ''}{match[4]}"
        inside = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[2]))
        if inside.startswith("docs/notebooks/") and inside.endswith(".py"):
            shown = inside.removeprefix("docs/").removesuffix(".py") + ".md"
            return f"{match[1]}{relative(shown, page)}{match[4]}"
        if inside.startswith("docs/") and not origin.startswith("docs/"):
            return f"{match[1]}{relative(inside.removeprefix('docs/'), page)}{match[3] or ''}{match[4]}"
        return match[0]

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(redirect, part) for part in parts[::2]]
    return "".join(parts)


def _outside(target: str, origin: str) -> str | None:
    if re.match(r"[a-z]+:", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    return None if path.startswith("docs/") or not (ROOT / path).exists() else path
