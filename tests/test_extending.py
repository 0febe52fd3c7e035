"""docs/extending.md quotes the source as it is, and names files, tests and functions that exist."""

import re
from pathlib import Path

import pytest

from handgrad.model.config import ACTIVATIONS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "handgrad"
PAGE = ROOT / "docs" / "extending.md"
GAP = "…"  # on a separate line: lines left out
NAMES = {
    "difference_steps": "proof/checker.py",
    "named_symbols": "model/layers/norms.py",
    "LayerNorm": "model/layers/norms.py",
    "Saved": "ops/layernorm.py",
    "ACTIVATIONS": "model/config.py",
    "halves": "model/block.py",
    "Residual": "model/block.py",
    "PAPER_BLOCK": "model/steps.py",
    "signal": "model/steps.py",
    "Objective": "model/passes/objective.py",
    "ModelConfig": "model/config.py",
}


def quotes_in(text: str) -> list[tuple[str, list[str]]]:
    """(file, parts) of every ```py block: its first line is a comment with the file, gaps separate the parts."""
    found = []
    for block in re.findall(r"```py\n(.*?)```", text, re.S):
        first, *lines = block.splitlines()
        assert first.startswith("# "), f"a quote begins with its file, not with {first!r}"
        found.append((first[2:], "\n".join(lines).split(f"\n{GAP}\n")))
    return found


def check_quotes(text: str) -> None:
    """Every part consists of complete lines of its file, and the parts of a block are in the file's order."""
    for file, parts in quotes_in(text):
        source, position = "\n" + (ROOT / file).read_text(), 0
        for part in parts:
            position = source.find(f"\n{part}\n", position)
            assert position >= 0, f"{file} does not have, at this place,\n{part}"
            position += len(part)


def test_quoted_code_is_in_the_source() -> None:
    text = PAGE.read_text()
    assert len(quotes_in(text)) >= 6
    check_quotes(text)


@pytest.mark.parametrize(
    "wrong",
    [
        '# src/handgrad/model/config.py\nACTIVATIONS = ("relu",)',
        "# src/handgrad/ops/activation.py\n    positive = torch.clamp(x, min=0, out=value",  # not a complete line
        "# src/handgrad/ops/activation.py\npositive.square_()",  # another indentation
        '# src/handgrad/ops/activation.py\n    positive.square_()\n…\n    if name == "relu2":',  # another order
        "no file",
    ],
)
def test_a_wrong_quote_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check_quotes(f"```py\n{wrong}\n```")


def test_what_the_page_names_exists() -> None:
    text = PAGE.read_text()
    packages = [folder.name for folder in SOURCE.iterdir() if folder.is_dir()]
    named = re.findall(rf"`((?:src|tests|docs|{'|'.join(packages)})/[\w/.]*)`", text)
    missing = [path for path in named if not (ROOT / path).exists() and not (SOURCE / path).exists()]
    assert len(named) >= 30 and not missing, f"{PAGE.name} names files that do not exist: {', '.join(missing)}"
    for name, file in NAMES.items():
        assert f"`{name}`" in text, name
        assert re.search(rf"^( *def |class |){name}\b", (SOURCE / file).read_text(), re.M), name


def test_its_commands_select_tests() -> None:
    """Every addition has one; what -k selects is a name of a case, or in the file."""
    commands = re.findall(r"^pytest (.+)$", PAGE.read_text(), re.M)
    assert len(commands) >= 8
    for command in commands:
        files, _, pattern = command.partition(" -k ")
        for file in files.split():
            assert (ROOT / file).exists(), f"pytest {command}"
            assert pattern in (*ACTIVATIONS, "") or pattern in (ROOT / file).read_text(), f"{file} has no {pattern}"
