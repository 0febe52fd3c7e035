"""Audit a model directory: transformers and PEFT open it and compute, we judge."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import HandgradError, option
from ...formats.huggingface import load_config
from ...formats.models import base_of, locate, tokenizer_of
from ...formatting import public_path
from ...gguf.file import is_gguf
from ...lora.peft import TENSORS, is_adapter
from ...model.config import ModelConfig
from ...model.dtype import STORED_DTYPES, as_dtype
from ...ops.loss import NO_TARGET
from ...text import examples
from ...text.format import choose
from ..findings import Audit
from .run import audit

ATTENTIONS = ("sdpa", "eager")
GROUPED = 8  # torch.nn.functional.grouped_mm needs widths that are multiples of 16 bytes, in bfloat16 of 8 numbers


def audit_folder(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    data: tuple[str, ...] = (),
    dtype: torch.dtype | str | None = None,
    attention: str | None = None,
    sequences: int = 3,
    tokens: int = 48,
    setup: bool = True,
    seed: int = 0,
) -> Audit:
    """Open a model directory, or an adapter's, with transformers and PEFT, and audit it on examples or random tokens.

    attention   of transformers, sdpa or eager (default: sdpa where the model has it)"""
    if attention not in (None, *ATTENTIONS):
        raise HandgradError(f"{option('attention')} must be {' or '.join(ATTENTIONS)}, not {attention!r}")
    given = None if dtype is None else as_dtype(dtype, STORED_DTYPES)
    base, adapter_folder = _folders(locate(path), adapter)
    config = load_config(base, output_router_logits=False)  # the audit knows the balance loss
    if data:
        batch = _from_data(adapter_folder or base, config, data, sequences, tokens)
    else:
        batch = _random(config, sequences, tokens, seed)
    with _silent():
        model = _open(base, adapter_folder, given, attention, config)
        report = audit(model, batch, setup=setup, seed=seed)
    report.title = f"{public_path(path)}: {report.title}"
    return report


def _folders(folder: Path, adapter: str | Path | None) -> tuple[Path, Path | None]:
    """The directory of the base model and that of the adapter."""
    if adapter is None and is_adapter(folder):
        folder, adapter = base_of(folder), folder
    if is_gguf(folder):
        raise HandgradError(f"{folder} is a GGUF file: transformers trains directories; handgrad convert writes one")
    if adapter is None:
        return folder, None
    found = locate(adapter)
    if not (found / TENSORS).is_file():
        raise HandgradError(f"{found} has no {TENSORS}: it is not an adapter in a safe format")
    return folder, found


def _open(
    base: Path, adapter: Path | None, dtype: torch.dtype | None, attention: str | None, config: ModelConfig
) -> Any:
    transformers = _imported("transformers")
    # only safetensors: other files of weights can run code
    options: dict[str, Any] = {"use_safetensors": True, "local_files_only": True}
    if attention is not None:
        options["attn_implementation"] = attention
    if config.n_experts is not None and (config.d_model % GROUPED or config.expert_width % GROUPED):
        options["experts_implementation"] = "eager"
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype or "auto", **options)
    except ValueError as reason:
        if attention is None or "attention implementation" not in str(reason):
            raise
        raise HandgradError(
            f"transformers has no {attention} attention for {base}: leave out {option('attention')}, or give eager"
        ) from None
    if adapter is None:
        return model
    return _imported("peft").PeftModel.from_pretrained(model, str(adapter), is_trainable=True)


def _imported(library: str) -> Any:
    try:
        return import_module(library)
    except ImportError:
        raise HandgradError(
            f"the audit of a directory runs it with {library}, which is not installed: pip install {library}"
        ) from None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without the libraries' own messages and progress bars."""
    before = logging.root.manager.disable
    utils = _imported("transformers").utils.logging
    bars = utils.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    utils.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about versions and orientations of weights; the audit judges the result
            yield
    finally:
        logging.disable(before)
        if bars:
            utils.enable_progress_bar()


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _random(config: ModelConfig, sequences: int, tokens: int, seed: int) -> dict[str, Tensor]:
    """Random tokens: sequences of different lengths, padded on the right, with a fifth of the labels masked."""
    generator = torch.Generator().manual_seed(seed)
    n = min(tokens, config.n_context)
    ids = torch.randint(config.n_vocab, (sequences, n), generator=generator)
    mask = torch.ones_like(ids)
    for i in range(sequences):
        mask[i, max(2, n - i * n // (2 * sequences)) :] = 0
    labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=generator) < 0.2), NO_TARGET)
    labels[0, 1] = ids[0, 1]  # at least one target
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _from_data(
    folder: Path, config: ModelConfig, data: tuple[str, ...], sequences: int, tokens: int
) -> dict[str, Tensor]:
    """The first examples of fine-tuning files, padded on the right."""
    n = min(tokens, config.n_context)
    tokenizer = tokenizer_of(folder)
    found, _ = examples.read(examples.find(data), tokenizer, n, template=choose(tokenizer).template, too_long="cut")
    count = min(sequences, found.per_epoch)
    chosen = [found.example(i) for i in range(count)]
    width = max(len(ids) for ids, _ in chosen)
    batch = {name: torch.full((count, width), fill) for name, fill in
             (("input_ids", 0), ("attention_mask", 0), ("labels", NO_TARGET))}  # fmt: skip
    for i, (ids, is_target) in enumerate(chosen):
        row = torch.from_numpy(ids.astype("int64"))
        batch["input_ids"][i, : len(row)] = row
        batch["attention_mask"][i, : len(row)] = 1
        batch["labels"][i, : len(row)] = torch.where(torch.from_numpy(is_target.copy()), row, NO_TARGET)
    return batch
