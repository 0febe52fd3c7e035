"""A job: everything the loop needs, ready to run. `pretrain` and `finetune` prepare one."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .. import lora, optim
from ..errors import HandgradError, option
from ..files.tensors import read_tensors
from ..formats.run_folder import OPTIMIZER, Checkpoint
from ..model.config import ModelConfig
from ..model.gpt import GPT
from ..model.passes.batch import Piece
from ..model.passes.options import PassOptions
from ..ops.loss import NO_TARGET
from ..optim import OptimizerInBackward, StochasticRounding
from ..plan.flop import Work, flop
from ..plan.shared_prefixes import Sharing, sharing_of
from ..plan.timing import Peak
from ..text import corpus
from ..text.batches import Batches
from ..text.examples import Examples, Summary
from ..text.tokenizer import Tokenizer
from .config import Recipe, TrainOptions
from .distributed import Ranks

C = TypeVar("C", bound=TrainOptions)
MEASURED = 1000  # examples that are measured, of a large set


class Display(Protocol):
    """Shows the progress of a run."""

    def say(self, text: str) -> None: ...
    def examples(self, summary: Summary, examples: Examples, tokenizer: Tokenizer) -> None: ...
    def reading(self, total: int) -> Callable[[int], None]: ...
    def begin(self, job: "Job") -> None: ...
    def show(self, record: dict[str, Any]) -> None: ...
    def end(self) -> None: ...


@dataclass
class Job:
    """A run that is ready to start."""

    options: TrainOptions  # with the recipe filled in, as run.json records them
    recipe: Recipe
    model: GPT
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer | OptimizerInBackward
    training: Batches
    validation: Batches | None
    batch: int  # windows or examples per step, over all processes
    step: int = 0
    seconds: float = 0.0  # spent in steps
    tokens: int = 0  # trained on so far
    initial: float = math.inf  # validation loss before the first step
    best: float = math.inf  # lowest validation loss of a trained step
    stale: int = 0  # evaluations since the best
    resumed: bool = False
    threads: list[tuple[int, int]] = field(default_factory=list)  # (step, number of threads from then on)
    rounding: StochasticRounding | None = None  # of bfloat16 weights
    peak: Peak | None = None  # rate of matrix products on this machine
    names: dict[nn.Parameter, str] = field(init=False, repr=False)
    _flop: dict[torch.Size, int] = field(
        default_factory=dict, repr=False
    )  # of batches without ignored targets, by shape

    def __post_init__(self) -> None:
        self.names = {p: name for name, p in self.model.named_parameters()}

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        if self.recipe.steps is None:
            return self.seconds / (60 * (self.recipe.minutes or math.inf))
        return self.step / self.recipe.steps

    def note_validation(self, val_loss: float) -> bool:
        """Whether this is the lowest validation loss of a trained step so far."""
        if self.step == 0:
            self.initial = val_loss
            return False
        better = val_loss < self.best
        self.best = min(self.best, val_loss)
        self.stale = 0 if better else self.stale + 1
        return better

    @property
    def ended(self) -> bool:
        patience = self.options.patience
        return self.progress >= 1 or (patience is not None and self.stale >= patience)

    @cached_property
    def adapter_ranks(self) -> dict[str, int]:
        return {name: adapter.down.shape[1] for name, adapter in lora.adapters_of(self.model).items()}

    def flop(self, tokens: Tensor, targets: Tensor, lengths: list[int] | None) -> int:
        """FLOP of a batch's matrix products, counted from its real tokens and targets."""
        if self.options.share_prefixes:
            pieces = self.pieces(tokens, targets, lengths)
            if any(piece.parents for piece in pieces):
                work = Work.of_pieces(pieces, self.model.config)
                return sum(flop(self.model.config, work, self.adapter_ranks, self.options.recompute))
        even = lengths is None and bool((targets != NO_TARGET).all())
        if even and targets.shape in self._flop:
            return self._flop[targets.shape]
        work = Work.of_batch(targets, lengths, self.model.config)
        found = sum(flop(self.model.config, work, self.adapter_ranks, self.options.recompute))
        if even:
            self._flop[targets.shape] = found  # pre-training asks for the same at every step
        return found

    def pieces(self, tokens: Tensor, targets: Tensor, lengths: list[int] | None) -> list[Piece]:
        """The pieces of a batch, in which common prefixes are computed once if they are shared."""
        options = PassOptions(share=self.options.share_prefixes and not self.options.example_norms)
        return self.model.prepare(self.model.pack(tokens, lengths), targets, options=options).pieces

    @cached_property
    def sharing(self) -> Sharing | None:
        """What the first steps compute once; None if their examples have hardly anything in common, or share nothing."""
        if not self.options.share_prefixes:
            return None
        count = min(MEASURED, self.training.per_epoch)
        batches = [self.training.batch(i, self.batch) for i in range(0, max(1, count - self.batch + 1), self.batch)]
        tokens = sum(x[0].numel() for x in batches)
        pieces = [self.pieces(*x) for x in batches]
        return sharing_of(pieces, tokens, self.model.config, self.adapter_ranks, self.options.recompute)

    @property
    def learning_rate(self) -> float:
        r = self.recipe
        return optim.learning_rate(self.progress, self.step, r.lr, r.min_lr, r.warmup, self.options.schedule)


def make_job(
    options: TrainOptions,
    recipe: Recipe,
    model: GPT,
    tokenizer: Tokenizer,
    training: Batches,
    validation: Batches | None,
    batch: int,
    ranks: Ranks,
    checkpoint: Checkpoint | None,
) -> Job:
    """The job of a run, new or restored from a checkpoint."""
    options = replace(options, **{**asdict(recipe), "epochs": None})
    optim.align(p for p in model.parameters() if p.requires_grad)
    rounding = StochasticRounding(options.seed, model.parameters()) if model.dtype == torch.bfloat16 else None
    optimizer = _make_optimizer(model, options, recipe, ranks, rounding)
    job = Job(options, recipe, model, tokenizer, optimizer, training, validation, batch, rounding=rounding)
    if checkpoint is not None:
        _restore(job, checkpoint)
    if ranks.first:
        job.peak = Peak(model.precision)
    return job


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise if the tokenizer has ids that the model lacks, before data is read."""
    if tokenizer.n_vocab > config.n_vocab:
        raise HandgradError(
            f"the tokenizer has {tokenizer.n_vocab:,} ids and the model {config.n_vocab:,}: they do not belong together"
        )


def set_router_losses(model: GPT, options: TrainOptions) -> None:
    """Set the coefficients that were given; raises if the model has no such router, or if examples are measured as well."""
    given = {name: x for name in ("balance_loss", "z_loss") if (x := getattr(options, name)) is not None}
    model.config = replace(model.config, **given)
    if options.example_norms and model.config.router_losses:
        raise HandgradError(
            f"{option('example_norms', True)} measures every example, and the losses of the routers are of a batch: give"
            f" {option('balance_loss', 0.0)} and {option('z_loss', 0.0)}, or leave it out"
        )


def check_options(options: C) -> C:
    """Raise for an unknown optimizer before anything is read. `update_inside` saves memory only if blocks are recomputed, so
    it implies recompute="blocks"."""
    optim.maker(options.optimizer, 1.0, 0.0, (0.9, 0.9), matrices={})
    return replace(options, recompute="blocks") if options.update_inside else options


def sources_of(given: tuple[str, ...], ranks: Ranks) -> tuple[str, ...]:
    """Absolute paths of the data; standard input is saved to a file, so that a resumed run can read it again."""

    def absolute() -> str:
        return json.dumps([str(corpus.from_stdin() if s == "-" else Path(s).expanduser().absolute()) for s in given])

    return tuple(json.loads(ranks.broadcast(absolute)))


def _restore(job: Job, checkpoint: Checkpoint) -> None:
    """Restore the optimizer's state, torch's random numbers and the progress of the run."""
    state = read_tensors(checkpoint.folder / OPTIMIZER)
    facts = checkpoint.facts
    try:
        torch.set_rng_state(state.pop("rng/torch"))
        optim.restore(job.optimizer, job.names, state)
        job.resumed, job.step = True, checkpoint.step
        job.seconds, job.tokens, job.stale = float(facts["seconds"]), int(facts["tokens"]), int(facts["stale"])
        job.threads = [(int(step), int(number)) for step, number in facts["threads"]]
        job.best, job.initial = (
            math.inf if facts[name] is None else float(facts[name]) for name in ("best", "initial")
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as reason:
        raise HandgradError(f"{checkpoint.folder} does not fit this run: {type(reason).__name__} {reason}") from None


def _make_optimizer(
    model: GPT, options: TrainOptions, recipe: Recipe, ranks: Ranks, rounding: StochasticRounding | None
) -> torch.optim.Optimizer | OptimizerInBackward:
    matrices, betas = optim.matrices(model), (options.beta1, options.beta2)
    if options.optimizer.lower() == "muon" and not any(p.requires_grad for p in matrices):
        raise HandgradError("Muon updates matrices of the blocks, and none of them trains here: choose AdamW")
    make = optim.maker(options.optimizer, recipe.lr, options.weight_decay, betas, rounding, matrices)
    if options.update_inside:
        return OptimizerInBackward(
            model, make, options.clip, options.recompute, combine=ranks.all_reduce, share=options.share_prefixes
        )
    return make(model.parameters())


def settings_of(job: Job) -> dict[str, Any]:
    """What run.json records of a run that is ready to start."""
    return {
        "training": job.options.flat(),
        "model": asdict(job.model.config),
        "tokens": job.training.fingerprint,
        "validation": None if job.validation is None else job.validation.fingerprint,
        "shared_tokens": 0.0 if job.sharing is None else job.sharing.saved,
    }
