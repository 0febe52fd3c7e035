"""The table of arguments for ctypes and the header of the kernels say the same, and nothing else is exported."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from handgrad.kernels import calls, compiler, library, signatures

HEADER = Path(compiler.__file__).with_name("kernels.h").read_text()
LETTERS = {"size": "n", "double": "x"}


def prototypes() -> dict[str, tuple[str, str]]:
    """Arguments, as letters, and the type of the result by name; the macro of activations is expanded."""
    text = re.sub(r"\\\n", " ", HEADER)
    found = {}
    for result, name, arguments in re.findall(r"KERNEL (\w+) hg_([\w#]+)\(([^)]*)\);", text):
        letters = "".join("p" if "*" in x else LETTERS[x.split()[0]] for x in arguments.split(","))
        for g in calls.ACTIVATIONS if "##g" in name else ("",):
            found[name.replace("##g", g)] = letters, result
    return found


def test_the_table_is_the_header() -> None:
    expected = prototypes()
    assert {name: letters.replace(" ", "") for name, letters in signatures.ARGUMENTS.items()} == {
        name: letters for name, (letters, _) in expected.items()
    }
    assert set(signatures.WITH_STATUS) == {name for name, (_, result) in expected.items() if result == "int"}


@pytest.mark.skipif(not shutil.which("nm"), reason="lists the names of a library")
@pytest.mark.parametrize("real", ["float", compiler.MIXED])
def test_only_kernels_are_exported(real: str) -> None:
    path = library._path(real)
    if not path.exists():
        pytest.skip("LEFT OUT: no C compiler, so there are no kernels to test")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    sources = "".join(source.read_text() for source in compiler.sources(real))
    defined = {name for name in signatures.ARGUMENTS if f"hg_{re.sub('silu|gelu_tanh', '##g', name)}(" in sources}
    assert {name for name in names if not name.startswith("_")} == {f"hg_{name}" for name in defined}
    assert ("mixed_product" in defined) == (real == compiler.MIXED)
