"""`handgrad bench`"""

import os
import sys
from pathlib import Path

import typer

from ..errors import HandgradError


def bench(context: typer.Context) -> None:
    """Measure speed and memory side by side with other libraries.

    Scenarios: train, memory, lora, sft, bridge, finetune, context, generate, attention, products, shared, precision,
    examples, explain; all unless named. --case 1x512 selects cases by their name. --model smollm2 measures finetune,
    context, generate and precision with a real model and real instructions, instead of GPT-2 with random weights.
    --quick takes 3 minutes and --tiny uses the smallest sizes, --json FILE writes every figure with machine, load,
    versions and commit, --plot FILE.svg draws the ratios and the growth with the tokens. table FILE.json … prints a
    table of results, or writes it into pages with --into. A contender that fails is reported and the rest goes on; the
    exit status is 1 if one of handgrad's failed.

    Needs a clone of the repository, which contains bench/, and the packages of the test extra. make llama-bench builds
    llama.cpp's benchmark, a peer of generate.

      handgrad bench --quick
      handgrad bench train memory --json figures.json
      handgrad bench lora --case 1x256
      handgrad bench finetune --model smollm2
      handgrad bench context --model smollm2 --plot context.svg
      handgrad bench generate --model smollm2 --case decode
      handgrad bench table figures.json --into README.md
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "bench" / "__main__.py").exists():
        raise HandgradError("the benchmarks are in the repository, not in the package: clone it and run `make bench`")
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "bench", *context.args]
    # in the place of this process: signals reach the measurement, which keeps what it has found
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})
