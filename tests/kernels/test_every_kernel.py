"""All kernels in a program without Python, under the sanitizers of one compiler; make kernels-check has the rest."""

from pathlib import Path

import pytest

from handgrad.kernels import compiler
from kernels.check import compare, is_clang, sanitized

words = compiler.command()
if words is None:
    pytest.skip("LEFT OUT: no C compiler, so there are no kernels to test", allow_module_level=True)


@pytest.mark.skipif(is_clang(words), reason="clang's sanitizers need libraries of their own: make kernels-check")
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Three threads under one sanitizer, any number under the other: the same results."""
    compare(sanitized(words, "thread", "float", tmp_path), sanitized(words, "address", "float", tmp_path), "float")
