"""The page's JavaScript: its pure parts run by node, and rules that are checked by reading it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import need_node
from handgrad.explain_page.page_files import asset, imported, modules, served

SCRIPTS = [name for name in served() if name.endswith(".js")]


def test_the_pure_parts(tmp_path: Path) -> None:
    node = need_node()
    for name in SCRIPTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(asset(name), encoding="utf-8")
    (tmp_path / "package.json").write_text(json.dumps({"type": "module"}))
    tests = sorted((Path(__file__).parent / "js").glob("*.test.js"))
    for test in tests:
        shutil.copy(test, tmp_path)
    done = subprocess.run(
        [node, "--test", *(test.name for test in tests)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.findall(r"^# pass (\d+)|^ℹ pass (\d+)", done.stdout, re.M)[0][0] or 99) >= 15


@pytest.mark.parametrize("first", ["page.js", "live/serve.js"])
def test_every_module_comes_after_what_it_imports(first: str) -> None:
    order = modules(first)
    assert order[-1] == first
    for name in order:
        for path in re.findall(r'from "(\..*\.js)"', asset(name)):
            assert order.index(imported(name, path)) < order.index(name), f"{name} imports {path}"


def test_every_module_is_used() -> None:
    """By the page, or by the program that answers its requests in the browser."""
    assert {*modules(), *modules("live/serve.js")} == {*SCRIPTS}


@pytest.mark.parametrize("name", sorted(served()))
def test_a_person_can_read_every_file(name: str) -> None:
    lines = asset(name).splitlines()
    assert len(lines) <= 400 and max(map(len, lines)) <= 140, name
    if name.endswith(".js"):
        assert lines[0] == "// @ts-check" and lines[1].startswith("// "), f"{name} does not say what it is"
        assert re.findall(r"^export (?!(?:async )?(?:function|const|class) )", asset(name), re.M) == []  # for bundle()
