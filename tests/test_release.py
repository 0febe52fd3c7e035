"""The wheel and the source archive are complete, and the version is the same everywhere."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import handgrad as hg

ROOT = Path(__file__).parent.parent
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "build", "dist", "runs", "*.egg-info", "__pycache__", "node_modules"
)  # fmt: skip
BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_wheel(to); b.build_sdist(to)"


def test_wheel_and_source_archive_are_complete(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=NOT_COPIED)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, tmp_path], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,), (archive,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert wheel.name == f"handgrad-{hg.__version__}-py3-none-any.whl"
    expected = {str(p.relative_to(tree / "src")) for p in (tree / "src" / "handgrad").rglob("*") if p.is_file()}
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in inside if ".dist-info/" not in name} == expected, (
        "the wheel holds the package and nothing else"
    )
    assert {Path(name).suffix for name in expected} >= {".py", ".c", ".h", ".js", ".css", ".html", ".typed"}
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    top = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.removeprefix(f"{top}/") for name in opened.getnames()}
    needed = {str(p.relative_to(tree)) for part in ("src", "tests", "docs", "bench") for p in (tree / part).rglob("*")}
    assert {name for name in needed if not name.endswith(".egg-info") and ".egg-info/" not in name} <= names
    assert {"Makefile", "constraints.txt", "mkdocs.yml", "CHANGELOG.md", "CITATION.cff", "LICENSE"} <= names
    assert ".github/workflows/test.yml" in names, "a test reads it"


def test_one_version() -> None:
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1] == hg.__version__  # type: ignore[index]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == hg.__version__


def test_workflows_run_the_commands_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name, wanted in {"test.yml": {"test"}, "release.yml": {"release-check", "docs"}, "pages.yml": {"site"}}.items():
        used = set(re.findall(r"run: make ([\w-]+)", (ROOT / ".github" / "workflows" / name).read_text()))
        assert used == wanted <= targets
