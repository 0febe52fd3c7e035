"""`handgrad bench`"""

import os
import subprocess
import sys
from pathlib import Path

import typer

from ..errors import HandgradError


def bench(context: typer.Context) -> None:
    """Measure speed and memory side by side with other libraries.

    Scenarios: train, memory, lora, sft, finetune, context, attention, products, explain; all unless named. --model smollm2
    measures finetune and context with a real model on real instructions, instead of GPT-2 with random weights. --quick uses
    smaller sizes and --tiny the smallest, --json FILE writes every figure, --plot FILE.svg draws the ratios.

    Needs a clone of the repository, which contains bench/, and the packages of the test extra.

      handgrad bench --quick
      handgrad bench train memory --json figures.json
      handgrad bench finetune --model smollm2
      handgrad bench context --model smollm2 --plot context.svg
    """
    root = Path(__file__).resolve().parents[3]
    if not (root / "bench" / "__main__.py").exists():
        raise HandgradError("the benchmarks are in the repository, not in the package: clone it and run `make bench`")
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "bench", *context.args]
    sys.exit(subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode)
