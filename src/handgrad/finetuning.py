"""Examples in, an adapter or a changed model out: a job for the loop of `train`."""

import math
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from . import chat, examples, lora, models, optim
from .config import FinetuneConfig
from .distributed import Ranks
from .errors import HandgradError
from .examples import Examples, Summary
from .examples_report import report
from .gpt import GPT
from .loop import Display, Job, check_vocabulary, lean, make_optimizer, restore, sources_of
from .run import Checkpoint
from .timing import Peak
from .tokenizer import Tokenizer
from .units import plural

LORA_LR, FULL_LR = 5e-4, 5e-5


def make_job(config: FinetuneConfig, ranks: Ranks, display: Display, checkpoint: Checkpoint | None = None) -> Job:
    """Examples, tokenizer, model, adapters and optimizer of a run, new or from a checkpoint; the configuration resolved."""
    optim.maker(config.optimizer, 1.0, 0.0, (0.9, 0.9))  # a wrong name is said before anything is read
    if not config.model:
        raise HandgradError("--model is missing: the directory of the model to fine-tune")
    if not config.data:
        raise HandgradError("--data is missing: a .jsonl file with prompt and completion, messages, or text")
    directory = checkpoint.folder if checkpoint is not None else models.weights_folder(config.model)
    config = _settled(config, directory if checkpoint is None else None, ranks)
    words = _tokenizer(directory, config)
    dtype = getattr(torch, config.dtype)
    model = models.open_folder(directory, dtype)
    check_vocabulary(words, model)
    if checkpoint is None:
        _choose_weights(model, config)

    training, validation, summary = _examples(config, words, model, directory, ranks, display)
    if ranks.first:
        display.present(*report(summary, training, words, min(100, shutil.get_terminal_size().columns)))
        held = 0 if validation is None else validation.per_epoch
        display.say(f"\n{plural(training.per_epoch, 'example')} to train on, {held:,} to validate on")
    batch = min(config.batch_examples, training.per_epoch)
    config = _resolve(config, batch, training, validation)
    job = Job(config, model, words, make_optimizer(model, config, ranks), training, validation, batch)
    if checkpoint is not None:
        restore(job, checkpoint)
    if ranks.first:
        job.peak = Peak(config.dtype)
    return job


def _settled(config: FinetuneConfig, folder: Path | None, ranks: Ranks) -> FinetuneConfig:
    """With everything that a resumed run has to find again, from any folder, at any time."""
    template = config.chat_template
    if template is not None:
        if not Path(template).is_file():
            raise HandgradError(f"there is no file {template} to take the chat template from")
        template = str(Path(template).expanduser().absolute())
    return replace(
        lean(config),
        model=str(folder.absolute()) if folder is not None else config.model,
        data=sources_of(config.data, ranks),
        val_data=sources_of(config.val_data, ranks),
        chat_template=template,
        clock=config.clock or ranks.broadcast(lambda: datetime.now().isoformat(timespec="seconds")),
    )


def _tokenizer(directory: Path, config: FinetuneConfig) -> Tokenizer:
    """The model's, with the chat template it is trained on."""
    words = models.tokenizer_of(directory)
    if config.chat_template is not None:
        words.beside["chat_template.jinja"] = Path(config.chat_template).read_text(encoding="utf-8")
    return words


def _examples(
    config: FinetuneConfig, words: Tokenizer, model: GPT, directory: Path, ranks: Ranks, display: Display
) -> tuple[Examples, Examples | None, Summary]:
    given = Path(config.chat_template) if config.chat_template is not None else None
    assert config.clock is not None
    template = None
    folder = models.tokenizer_folder(directory) or directory
    if given is not None or chat.there_is_one(folder):
        template = chat.find(folder, given, datetime.fromisoformat(config.clock))

    def read(sources: tuple[str, ...]) -> tuple[Examples, Summary]:
        files = examples.find(sources)
        total = sum(file.stat().st_size for file in files)
        return examples.read(
            files, words, model.config.n_context,
            template=template, loss_on=config.loss_on, too_long=config.too_long, seed=config.seed,  # type: ignore[arg-type]
            fields=config.field, skip_bad=config.skip_bad,
            progress=display.reading(total) if ranks.first else lambda count: None,
        )  # fmt: skip

    found, summary = read(config.data)
    if config.val_data:
        held = read(config.val_data)[0]
        summary.shared = examples.shared(found, held)
        return found, held, summary
    training, validation = examples.split(found, config.val_share, config.seed)
    if validation is None and config.val_share and ranks.first:
        display.say("all lines are equal, or have examples in common: none is kept for validation")
    return training, validation, summary


def _choose_weights(model: GPT, config: FinetuneConfig) -> None:
    """What trains: adapters, new or those that are there, or everything."""
    if model.adapter is not None:
        if config.full or config.adapter != FinetuneConfig().adapter:
            raise HandgradError(
                f"{config.model} is an adapter, and training goes on with it as it is: leave out --full and the adapter's"
                " options, or merge it first (handgrad merge)"
            )
    elif not config.full:
        lora.apply(model, config.adapter, config.seed)


def _worth_evaluating(training: Examples, validation: Examples | None, batch: int) -> int:
    """Steps between two evaluations so that they take at most about a quarter of the time: a forward pass is a third of a
    step."""
    if validation is None:
        return 1
    tokens = training.size(0, batch, False)[0]
    return math.ceil(4 / 3 * validation.size(0, validation.per_epoch, False)[0] / tokens)


def _resolve(config: FinetuneConfig, batch: int, training: Examples, validation: Examples | None) -> FinetuneConfig:
    steps = config.steps
    if steps is None and config.minutes is None:
        steps = math.ceil((config.epochs or 3) * training.per_epoch / batch)
    lr = (FULL_LR if config.full else LORA_LR) if config.lr is None else config.lr
    warmup = config.warmup
    if warmup is None:
        warmup = 20 if steps is None else min(20, steps // 10)
    often = max(1, steps // 10, _worth_evaluating(training, validation, batch)) if steps is not None else 50
    return replace(
        config,
        steps=steps,
        epochs=None,
        lr=lr,
        min_lr=0.0 if config.min_lr is None else config.min_lr,
        warmup=warmup,
        log_every=config.log_every or max(1, min(10, (steps or 100) // 10)),
        eval_every=config.eval_every or often,
        save_every=config.save_every or often,
    )
