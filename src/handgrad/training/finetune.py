"""`handgrad finetune`: a model and examples in, a job for the loop out."""

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from .. import lora
from ..checks import MIXED
from ..errors import HandgradError, option
from ..files.reading import read_text
from ..formats import models
from ..formats.run_folder import Checkpoint
from ..formatting import plural
from ..lora import gguf_export, peft
from ..lora.experts import share_factors
from ..model.gpt import GPT
from ..model.precision import why_not_mixed
from ..model.storage.rounded import round_frozen
from ..optim import FINETUNE_LR, LORA_LR
from ..text import examples, validation_split
from ..text import format as text_format
from ..text.examples import Examples, Summary
from ..text.format import TextFormat
from ..text.tokenizer import Tokenizer
from .config import FinetuneOptions, Recipe
from .distributed import Ranks
from .job import Display, Job, check_options, check_vocabulary, make_job, set_router_losses, sources_of


def prepare(options: FinetuneOptions, ranks: Ranks, display: Display, checkpoint: Checkpoint | None = None) -> Job:
    """Examples, tokenizer, model, adapters and optimizer of a run, new or from a checkpoint."""
    options = check_options(options)
    if not options.model:
        raise HandgradError(f"{option('model')} is missing: the directory of the model to fine-tune")
    if not options.data:
        raise HandgradError(f"{option('data')} is missing: a .jsonl file with prompt and completion, messages, or text")
    directory = checkpoint.folder if checkpoint is not None else models.weights_folder(options.model)
    options, clock = _pin_sources(options, directory if checkpoint is None else None, ranks)
    tokenizer = _tokenizer(directory, options)
    how = text_format.choose(
        tokenizer,
        options.format,
        file=None if options.chat_template is None else Path(options.chat_template),
        now=clock,
    )
    model = models.open_folder(
        directory, getattr(torch, options.dtype), packed=options.packed, base_dtype=options.base_dtype,
        precision=options.precision, rounded=_nothing_but_adapters(options, directory),
    )  # fmt: skip
    check_vocabulary(tokenizer, model.config)
    set_router_losses(model, options)
    if checkpoint is None:
        _choose_weights(model, options)
        if share_factors(model.config, lora.adapters_of(model)) and ranks.first:
            display.say(
                "PEFT wrote this adapter with one factor A for gate and up of each expert. Here each trains its own, so"
                " training goes on differently than with PEFT."
            )
    peft.check(model)
    if model.operand is not None and model.adapter is not None:
        round_frozen(model)

    if any(adapter.dropout for adapter in lora.adapters_of(model).values()):
        options = replace(options, share_prefixes=False)  # a shared row would have one mask for all its examples

    if options.gguf:
        gguf_export.check(model)
    if model.unpacks and options.sample_tokens and ranks.first:
        display.say("The weights are packed: no samples while training, because each token would unpack every block.")
    training, validation, summary = _examples(options, how, tokenizer, model, ranks, display)
    options = replace(options, format=summary.format)
    text_format.record(tokenizer, summary.format)
    if ranks.first:
        for line in _disagreements(options.model, how, summary):
            display.say(line)
        display.examples(summary, training, tokenizer)
        held = 0 if validation is None else validation.per_epoch
        display.say(f"\n{plural(training.per_epoch, 'example')} to train on, {held:,} to validate on")
    batch = min(options.batch_examples, training.per_epoch)
    recipe = _decide(options, batch, training, validation)
    return make_job(options, recipe, model, tokenizer, training, validation, batch, ranks, checkpoint)


def _pin_sources(options: FinetuneOptions, folder: Path | None, ranks: Ranks) -> tuple[FinetuneOptions, datetime]:
    """Make every path absolute and fix the time, so that a resumed run finds the same from any folder.
    Returns the time that chat templates see as well."""
    template = options.chat_template
    if template is not None:
        if not Path(template).is_file():
            raise HandgradError(f"{option('chat_template')}: no file {template}")
        template = str(Path(template).expanduser().absolute())
    clock = options.clock or ranks.broadcast(lambda: datetime.now().isoformat(timespec="seconds"))
    pinned = replace(
        options,
        model=str(folder.absolute()) if folder is not None else options.model,
        data=sources_of(options.data, ranks),
        val_data=sources_of(options.val_data, ranks),
        chat_template=template,
        clock=clock,
    )
    return pinned, datetime.fromisoformat(clock)


def _tokenizer(directory: Path, options: FinetuneOptions) -> Tokenizer:
    """The model's tokenizer, with the chat template used for training."""
    tokenizer = models.tokenizer_of(directory)
    if options.chat_template is not None:
        tokenizer.extra_files["chat_template.jinja"] = read_text(options.chat_template)
    return tokenizer


def _disagreements(model: str, how: TextFormat, summary: Summary) -> Iterator[str]:
    """Where data, model and command disagree about the format."""
    if found := how.disagreement(model, "this run"):
        yield f"warning: {found}"
    if how.name != summary.format:
        yield (
            f"warning: the data has texts alone, which are learned as they are, and {model} has a chat template: the result"
            f" is recorded as {option('format', summary.format)}. To tune answers, write prompt and completion, or"
            " messages"
        )


def _examples(
    options: FinetuneOptions,
    how: TextFormat,
    tokenizer: Tokenizer,
    model: GPT,
    ranks: Ranks,
    display: Display,
) -> tuple[Examples, Examples | None, Summary]:
    def read(sources: tuple[str, ...]) -> tuple[Examples, Summary]:
        files = examples.find(sources)
        total = sum(file.stat().st_size for file in files)
        return examples.read(
            files, tokenizer, model.config.n_context,
            template=how.template, loss_on=options.loss_on, too_long=options.too_long, seed=options.seed,  # type: ignore[arg-type]
            fields=options.field, skip_bad=options.skip_bad,
            progress=display.reading(total) if ranks.first else lambda count: None,
        )  # fmt: skip

    found, summary = read(options.data)
    if options.val_data:
        held = read(options.val_data)[0]
        summary.shared = validation_split.count_shared(found, held)
        return found, held, summary
    training, validation = validation_split.split(found, options.val_share, options.seed)
    if validation is None and options.val_share and ranks.first:
        display.say("all lines are equal or share examples: none is held out for validation")
    return training, validation, summary


def _choose_weights(model: GPT, options: FinetuneOptions) -> None:
    """Inject adapters, continue with existing ones, or leave all weights trainable."""
    if model.adapter is not None:
        if options.adapter != FinetuneOptions().adapter:
            raise HandgradError(
                f"{options.model} is an adapter, and training continues with it unchanged: leave out"
                f" {option('full', True)} and the"
                " adapter's options, or merge it first (handgrad merge)"
            )
    elif options.adapter is not None:
        lora.apply(model, options.adapter, options.seed)


def _nothing_but_adapters(options: FinetuneOptions, directory: Path) -> bool:
    """Whether matrices can be read in bfloat16, for mixed precision, instead of being rounded after some were chosen to
    train."""
    known = not lora.is_adapter(directory) or options.adapter != FinetuneOptions().adapter  # else of unknown contents
    frozen = options.adapter is not None and not options.adapter.modules_to_save
    return options.precision == MIXED and why_not_mixed() is None and frozen and known


def _steps_per_evaluation(training: Examples, validation: Examples | None, batch: int) -> int:
    """Steps between two evaluations such that they take at most about a quarter of the time (a forward pass is a third of
    a step)."""
    if validation is None:
        return 1
    tokens = training.size(0, batch, False)[0]
    return math.ceil(4 / 3 * validation.size(0, validation.per_epoch, False)[0] / tokens)


def _decide(options: FinetuneOptions, batch: int, training: Examples, validation: Examples | None) -> Recipe:
    steps = options.steps
    if steps is None and options.minutes is None:
        steps = math.ceil((options.epochs or 3) * training.per_epoch / batch)
    lr = (FINETUNE_LR if options.adapter is None else LORA_LR) if options.lr is None else options.lr
    warmup = options.warmup
    if warmup is None:
        warmup = 20 if steps is None else min(20, steps // 10)
    interval = max(5, steps // 10, _steps_per_evaluation(training, validation, batch)) if steps is not None else 50
    return Recipe(
        steps=steps,
        minutes=options.minutes,
        lr=lr,
        min_lr=0.0 if options.min_lr is None else options.min_lr,
        warmup=warmup,
        log_every=options.log_every or max(1, min(10, (steps or 100) // 10)),
        eval_every=options.eval_every or interval,
        save_every=options.save_every or interval,
    )
