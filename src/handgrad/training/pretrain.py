"""`handgrad train`: text in, a job for the loop out."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from .. import lora, optim
from ..errors import HandgradError, option
from ..formats.models import config_of, find_model, open_folder
from ..formats.run_folder import Checkpoint
from ..formatting import plural
from ..model.config import preset
from ..model.gpt import GPT
from ..text import batches, corpus, tokenizer
from ..text.batches import Windows
from ..text.downloads import default_corpus
from ..text.tokenizer import Tokenizer
from .config import Recipe, TrainOptions
from .distributed import Ranks
from .job import Display, Job, check_options, check_vocabulary, make_job, set_router_losses, sources_of


def prepare(options: TrainOptions, ranks: Ranks, display: Display, checkpoint: Checkpoint | None = None) -> Job:
    """Data, tokenizer, model and optimizer of a run, new or from a checkpoint."""
    options = check_options(options)
    options = replace(options, data=sources_of(options.data, ranks))
    files, source = _files(options)
    directory = checkpoint.folder if checkpoint is not None else _start_from(options.model, ranks, display)
    if directory is not None and lora.is_adapter(directory):
        raise HandgradError(f"{directory} is an adapter: merge it first (handgrad merge), or use handgrad finetune")
    if checkpoint is None and directory is not None and (options.shape or options.tokenizer):
        fixed = option(options.shape[0][0] if options.shape else "tokenizer")
        raise HandgradError(f"{fixed} cannot change an existing model ({directory}): leave it out")
    text_tokenizer = tokenizer.read(directory) if directory is not None else _tokenizer(options, files, ranks)
    changes = {"n_vocab": text_tokenizer.n_vocab, **dict(options.shape)}
    shape = config_of(directory) if directory is not None else preset(options.model, **changes)
    check_vocabulary(text_tokenizer, shape)
    total = sum(file.stat().st_size for file in files)
    progress = display.reading(total) if ranks.first else lambda n: None
    tokens = ranks.first_then_others(lambda: corpus.prepare(files, text_tokenizer, options.text_field, progress))
    if ranks.first:
        display.say(f"data: {source}, {plural(len(tokens), 'token')}, vocabulary of {text_tokenizer.n_vocab:,}")

    context = shape.n_context
    training, validation = batches.split(tokens, context, options.val_share, options.seed)
    dtype, precision = getattr(torch, options.dtype), options.precision
    if directory is not None:
        model = open_folder(directory, dtype, precision=precision)
    else:
        model = GPT(shape, seed=options.seed, dtype=dtype, precision=precision)
    set_router_losses(model, options)
    batch = max(1, round((options.batch_tokens or 12 * context) / context))
    options = replace(options, batch_tokens=batch * context)
    recipe = _decide(options, batch, training, model.config.d_model)
    return make_job(options, recipe, model, text_tokenizer, training, validation, batch, ranks, checkpoint)


def _start_from(model: str, ranks: Ranks, display: Display) -> Path | None:
    """The folder of the model to start from; None: a preset."""
    found = find_model(model)
    if found.note and ranks.first:
        display.say(found.note)
    return found.folder


def _files(options: TrainOptions) -> tuple[list[Path], str]:
    if not options.data:
        return default_corpus()
    files = corpus.find(options.data)
    if not any(file.stat().st_size for file in files):
        raise HandgradError(f"there is no text in {', '.join(options.data)}: the files are empty")
    return files, plural(len(files), "file")


def _tokenizer(options: TrainOptions, files: list[Path], ranks: Ranks) -> Tokenizer:
    """The one given; else GPT-2's for GPT-2's shapes, characters for the default corpus, bytes for other data."""
    kind = options.tokenizer or ("gpt2" if options.model.startswith("gpt2") else "bytes" if options.data else "chars")
    texts = (piece.text for piece in corpus.texts(files, options.text_field))
    return tokenizer.from_json(ranks.broadcast(lambda: tokenizer.make(kind, texts).to_json()))


def _decide(options: TrainOptions, batch: int, training: Windows, width: int) -> Recipe:
    steps = options.steps
    if options.epochs is not None:
        steps = math.ceil(options.epochs * training.per_epoch / batch)
    elif options.minutes is None and steps is None:
        steps = 2000
    lr = optim.pretraining_lr(width) if options.lr is None else options.lr
    warmup = options.warmup
    if warmup is None:
        warmup = 100 if steps is None else min(100, steps // 10)
    return Recipe(
        steps=steps,
        minutes=options.minutes,
        lr=lr,
        min_lr=lr / 10 if options.min_lr is None else options.min_lr,
        warmup=warmup,
        log_every=options.log_every or 10,
        eval_every=options.eval_every or 250,
        save_every=options.save_every or 250,
    )
