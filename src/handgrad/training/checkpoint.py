"""Write, rename and prune the checkpoints of a run. `formats/run_folder.py` reads them.

A checkpoint is written under a temporary name, flushed to disk, then renamed. Damaged checkpoints are never deleted.
"""

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import HandgradError, option
from ..files import manifest
from ..files.atomic import remove_folder, write_folder
from ..files.manifest import DamagedError
from ..formats.huggingface import write_model
from ..formats.run_folder import OPTIMIZER, PREFIX, RunFolder
from ..lora import peft
from ..model.gpt import GPT
from ..text.tokenizer import Tokenizer


def save(
    run: RunFolder,
    step: int,
    model: GPT,
    tokenizer: Tokenizer,
    optimizer_state: dict[str, Tensor],
    facts: dict[str, Any],
) -> Path:
    """Write the checkpoint of a step, with `facts` in its manifest. If the step has a usable one already, keep that; a
    damaged one is renamed first."""
    folder = run.checkpoints / f"{PREFIX}{step:08d}"
    if folder.exists():
        try:
            return run.checkpoint(folder).folder
        except DamagedError:
            set_aside(folder)
    settings = run.settings()

    def fill(partial: Path) -> None:
        write_result(model, tokenizer, partial)
        save_file(optimizer_state, partial / OPTIMIZER)
        manifest.write(partial, step=step, **facts, settings=settings)

    try:
        write_folder(folder, fill)
    except (OSError, SafetensorError) as reason:
        raise HandgradError(
            f"step {step} could not be saved: {reason}. Earlier checkpoints are intact: free disk space, then"
            f" {option('resume', True)}"
        ) from None
    return folder


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that its step can be saved again."""
    names = (folder.with_name(f"damaged-{folder.name}{f'-{i}' if i else ''}") for i in range(1 << 30))
    new = next(path for path in names if not path.exists())
    os.rename(folder, new)
    return new


def prune(run: RunFolder, keep: int) -> None:
    """Delete all usable checkpoints but the newest `keep` and the best."""
    found = list(run.usable())
    best = run.best().folder if found else None
    for old in found[keep:]:
        if old.folder != best:
            remove_folder(old.folder)


def write_result(model: GPT, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model, or only its adapter if it has one, and the tokenizer, as other tools read them."""
    if model.adapter is not None:
        peft.write(model, folder)
    else:
        write_model(model, folder)
        end = {} if tokenizer.end is None else {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
        generation = {"do_sample": True, "max_length": model.config.n_context, **end}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.write(folder)
