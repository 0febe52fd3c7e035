"""Every example in the README and the derivations runs, and prints what the page says it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run_as_printed(page: Path) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.S)
    names: dict[str, object] = {}
    for i, (language, code) in enumerate(blocks):
        if language != "python" or "..." in code:  # an outline, not an example
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{page.name} example {i}", "exec"), names)
        shown = blocks[i + 1] if i + 1 < len(blocks) else ("", "")
        if shown[0] in ("text", "") and page.name != "README.md":
            numbers = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
            found = [float(x) for x in numbers.findall(printed.getvalue())]
            expected = [float(x) for x in numbers.findall(shown[1])]
            assert len(found) == len(expected), f"{page.name} example {i}"
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-12), f"{page.name} example {i}"
