"""Run handgrad bench with the processes of finetune and context forked from this one, so that torch, transformers and peft
are imported only once. Their memory figures then mean nothing.

python tests/forked_bench.py finetune --model smollm2 --tiny
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import forked

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench import __main__, finetune, process


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


if __name__ == "__main__":
    import peft  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    forked.warm_up()
    process.run_alone = finetune.run_alone = run_forked
    __main__.main()
