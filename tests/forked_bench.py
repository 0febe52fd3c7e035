"""The processes of handgrad bench, forked from this one, so that torch, transformers and peft are imported only once. Their
memory figures then mean nothing."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import peft  # noqa: F401
from transformers import AutoModelForCausalLM  # noqa: F401

import forked


def run_forked(
    name: str, code: str, arguments: Sequence[object] = (), environment: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """bench.process.run_alone without a new interpreter."""
    with tempfile.TemporaryDirectory() as scratch:
        shown = Path(scratch) / "stdout"

        def task() -> None:
            sys.argv = [name, *map(str, arguments)]
            with shown.open("w") as file, contextlib.redirect_stdout(file):
                exec(code, {"__name__": "__main__"})

        status = os.waitpid(forked.start(task, dict(environment or {})), 0)[1]
        assert status == 0, f"{name}: exit code {os.waitstatus_to_exitcode(status)}"
        return shown.read_text(), 10**9
