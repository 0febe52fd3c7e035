"""The C compiler: kernels are compiled once and used again; what it says when it fails is reported, and torch computes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import handgrad as hg
from handgrad.kernels import calls, compiler, library

if compiler.command() is None:
    pytest.skip("LEFT OUT: no C compiler, so there are no kernels to test", allow_module_level=True)

COPYING = """#!/bin/sh
# compiles by copying what exists, with a line for each time; ends when as many as wanted have begun
test "$1" = --version && exec echo 1
while test "$1" != -o; do shift; done
echo compiled >> "$COMPILED.times"
for i in $(seq 600); do test $(wc -l < "$COMPILED.times") -ge "$TOGETHER" && break; sleep 0.1; done
cp "$COMPILED" "$2"
"""
FAILING = """#!/bin/sh
test "$1" = --version && exec echo 1
echo "In file included from a.c:1:"
echo "b.h:7:3: error: expected ';'" >&2
echo "a second line"
exit 3
"""
WITHOUT_OPENMP = """#!/bin/sh
test "$1" = --version && exec echo 1
for x; do test "$x" = -fopenmp && echo "ld: cannot find -lomp" && echo "cc: error: linker command failed" && exit 1; done
"""
CONFIG = hg.preset("nano", n_vocab=11, d_model=8, n_heads=2, n_blocks=1)
TRAIN = """
import torch, handgrad as hg
from handgrad.kernels import library
model = hg.GPT(hg.preset("nano", n_vocab=11, d_model=8, n_heads=2, n_blocks=1), seed=0)
tokens = torch.arange(10)[None] % 11
before = library.prepared(torch.float32)
said = []
library.prepare(torch.float32, said.append)
print(model.loss_and_grads(tokens, tokens), before, library.load(torch.float32) is not None, len(said))
"""


def loss() -> float:
    tokens = torch.arange(10)[None] % 11
    return hg.GPT(CONFIG, seed=0).loss_and_grads(tokens, tokens)


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """As in a new process with an empty cache; the variables to be set come through what is returned."""
    monkeypatch.setenv("HANDGRAD_CACHE", str(tmp_path))
    monkeypatch.setattr(calls, "_functions", {})
    monkeypatch.setattr(library, "_failures", {})
    cached = (compiler.version, library._path, library.load)
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()


@pytest.fixture(scope="module")
def existing() -> bytes:
    """What is in the usual cache."""
    return library._path("float").read_bytes()[: -library.DIGEST_BYTES]


@pytest.fixture
def copying(existing: bytes, tmp_path: Path, fresh: pytest.MonkeyPatch) -> Path:
    """A compiler that takes no time; returns where it counts."""
    compiled = tmp_path / "compiled"
    compiled.write_bytes(existing)
    fresh.setenv("CC", script(tmp_path / "compiler", COPYING))
    fresh.setenv("COMPILED", str(compiled))
    fresh.setenv("TOGETHER", "2")
    compiler.version.cache_clear()
    return tmp_path / "compiled.times"


def started(count: int) -> list[list[str]]:
    """What processes that start together print: the loss, whether nothing had to be compiled, whether kernels were used, and
    the number of messages."""
    runs = [
        subprocess.Popen([sys.executable, "-c", TRAIN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    found = []
    for run in runs:
        output, errors = run.communicate()
        assert run.returncode == 0 and not errors, errors
        found.append(output.split())
    return found


def test_compiled_once_by_processes_that_start_together_and_used_again(copying: Path, tmp_path: Path) -> None:
    """A damaged file is compiled again: the right loss, and nothing said."""
    first, second = started(2)
    (made,) = (tmp_path / "kernels").iterdir()
    assert first == second and first[1:] == ["False", "True", "1"]
    assert float(first[0]) == pytest.approx(loss(), rel=1e-6)
    times, whole = copying.read_text(), made.read_bytes()
    assert library.prepared(torch.float32) and library.load(torch.float32) is not None
    assert copying.read_text() == times and list((tmp_path / "kernels").iterdir()) == [made]
    made.write_bytes(whole[:100] + b"?" + whole[101:])
    said: list[str] = []
    for function in (library._path, library.load):
        function.cache_clear()
    assert not library.prepared(torch.float32)
    library.prepare(torch.float32, said.append)
    assert copying.read_text() == times + "compiled\n" and made.read_bytes() == whole and len(said) == 1


def failure(fresh: pytest.MonkeyPatch) -> str:
    """What is said of a compiler that fails, while torch computes the same."""
    said: list[str] = []
    library.prepare(torch.float32, said.append)
    assert library.load(torch.float32) is None and said[-1].startswith("no compiled kernels, torch computes instead")
    without = loss()
    fresh.undo()
    for function in (compiler.version, library._path, library.load):
        function.cache_clear()
    assert without == pytest.approx(loss(), rel=1e-5)
    return said[-1]


@pytest.mark.parametrize(
    ("text", "status", "first"),
    [(FAILING, 3, "b.h:7:3: error: expected ';'"), (WITHOUT_OPENMP, 1, "ld: cannot find -lomp")],
)
def test_what_the_compiler_says_is_reported(
    text: str, status: int, first: str, fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first line about an error, and a file with all of it."""
    fresh.setenv("CC", script(tmp_path / "my-cc", text))
    said = failure(fresh)
    assert f"my-cc failed (exit status {status}): {first}; everything it said is in " in said
    log = Path(said.rsplit(" ", 1)[1])
    assert first in log.read_text() and f"{tmp_path}/my-cc" in log.read_text().splitlines()[0]
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == [log.name]


def test_a_real_compiler_that_fails_is_reported(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("HANDGRAD_CFLAGS", "--no-such-option")
    assert "error: un" in failure(fresh)  # unrecognized, or unsupported


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CC": "false"}, "false failed (exit status 1)"),
        ({"CC": "/nonexistent/cc"}, "CC=/nonexistent/cc names no program"),
        ({"PATH": "/nonexistent", "CC": ""}, "there is no C compiler"),
    ],
)
def test_without_a_compiler_torch_computes_the_same(
    variables: dict[str, str], reason: str, fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in variables.items():
        fresh.setenv(name, value)
    assert library.prepared(torch.float32), "there is nothing to compile"
    assert reason in failure(fresh) and not list(tmp_path.rglob("*.so"))


def test_switched_off_nothing_is_compiled_or_said(tmp_path: Path) -> None:
    switched = (
        "import torch; from handgrad.kernels import library\n"
        "print(library.prepared(torch.float32)), library.prepare(torch.float32, print)"
    )
    environment = os.environ | {"HANDGRAD_KERNELS": "0", "HANDGRAD_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", switched], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n" and not list(tmp_path.iterdir())
