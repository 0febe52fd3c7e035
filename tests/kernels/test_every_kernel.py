"""All kernels in a program without Python, under a sanitizer of one compiler; make kernels-check has the rest."""

import math
from pathlib import Path

import pytest

from handgrad.kernels import compiler
from kernels.check import is_clang, sanitized

words = compiler.command()
if words is None:
    pytest.skip("LEFT OUT: no C compiler, so there are no kernels to test", allow_module_level=True)


@pytest.mark.long
@pytest.mark.skipif(is_clang(words), reason="clang's sanitizers need libraries of their own: make kernels-check")
def test_a_sanitizer_finds_nothing(tmp_path: Path) -> None:
    """That of addresses and undefined behavior; make kernels-check has those of threads and of double."""
    found = sanitized(words, "address", "float", tmp_path)
    assert len(found) > 50 and all(math.isfinite(x) for _, numbers in found for x in numbers)
