"""Text in, a trained model out. `train` is the loop; everything else here gets it ready or watches it."""

import json
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from . import data, lora, optim, tokenizer, units
from .checkpoint import load, load_config, read_tensors
from .config import GPTConfig, TrainConfig, preset
from .data import Batches, Windows
from .distributed import Ranks
from .errors import HandgradError, NonFiniteError
from .generation import generate
from .gpt import GPT
from .material import default_corpus
from .models import find_model
from .optim import OptimizerInBackward
from .plan import Work, flop
from .run import OPTIMIZER, Checkpoint, Run
from .timing import Peak
from .tokenizer import Tokenizer
from .trace_html import depth
from .units import plural

C = TypeVar("C", bound=TrainConfig)
Norms = Callable[[], dict[str, float]]  # of the gradient, layer by layer


class Display(Protocol):
    """Whoever shows how it goes."""

    def say(self, text: str) -> None: ...
    def present(self, *what: Any) -> None: ...
    def reading(self, total: int) -> Callable[[int], None]: ...
    def begin(self, job: "Job") -> None: ...
    def show(self, record: dict[str, Any]) -> None: ...
    def end(self) -> None: ...


@dataclass
class Job:
    """A run that is ready to go."""

    config: TrainConfig  # resolved: nothing is None any more but two of steps, epochs and minutes
    model: GPT
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer | OptimizerInBackward
    training: Batches
    validation: Batches | None
    batch: int  # windows or examples of a step, over all processes
    step: int = 0
    seconds: float = 0.0  # spent in steps
    tokens: int = 0  # trained on so far
    initial: float = math.inf  # validation loss before the first step
    best: float = math.inf  # lowest validation loss of a trained step
    stale: int = 0  # evaluations since the best
    resumed: bool = False
    peak: Peak | None = None  # rate of matrix products on this machine

    @property
    def names(self) -> dict[nn.Parameter, str]:
        return {p: name for name, p in self.model.named_parameters()}

    @property
    def progress(self) -> float:
        """From 0 to 1."""
        if self.config.minutes is not None:
            return self.seconds / (60 * self.config.minutes)
        assert self.config.steps is not None
        return self.step / self.config.steps

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
        return self.progress >= 1 or (self.config.patience is not None and self.stale >= self.config.patience)

    @cached_property
    def adapter_ranks(self) -> dict[str, int]:
        return {name: adapter.down.shape[1] for name, adapter in lora.adapters_of(self.model).items()}

    def flop(self, targets: Tensor, lengths: list[int] | None) -> int:
        """Of the matrix products of a batch, counted from its real tokens and targets."""
        work = Work.of_batch(targets, lengths, self.model.config.causal)
        return sum(flop(self.model.config, work, self.adapter_ranks, self.config.recompute))

    @property
    def learning_rate(self) -> float:
        c = self.config
        assert c.lr is not None and c.min_lr is not None and c.warmup is not None
        return optim.learning_rate(self.progress, self.step, c.lr, c.min_lr, c.warmup, c.schedule)


@dataclass(frozen=True)
class Outcome:
    step: int
    finished: bool  # or stopped by a signal
    early: bool  # finished because the validation loss no longer fell
    loss: float
    val_loss: float | None


class Interval:
    """What happened since the last logged step."""

    def __init__(self, job: Job):
        self.tokens, self.seconds = job.tokens, job.seconds
        self.flop = 0  # of this process
        self.losses: list[float] = []

    def add(self, loss: float, lr: float, step: "Step") -> None:
        self.losses.append(loss)
        self.flop += step.flop
        self.lr, self.norm, self.norms = lr, step.norm, step.norms

    def record(self, job: Job) -> dict[str, Any]:
        seconds = job.seconds - self.seconds
        return {
            "step": job.step, "loss": sum(self.losses) / len(self.losses), "lr": self.lr, "grad_norm": self.norm,
            "tokens_per_second": (job.tokens - self.tokens) / seconds,
            "mfu": job.peak.share(self.flop, seconds) if job.peak else None,
            "tokens": job.tokens, "seconds": job.seconds, "memory": peak_memory(), "grad_norms": self.norms(),
        }  # fmt: skip


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(job: Job, run: Run, ranks: Ranks, display: Display) -> Outcome:
    """Take steps until the end, or until a signal asks to stop; log, evaluate and save on the way."""
    c = job.config
    assert c.eval_every and c.save_every and c.log_every
    interval = Interval(job)
    began_at = job.step if job.resumed else -1
    loss, stopping = math.nan, False
    with Stop() as stop:
        while True:
            ends = job.ended
            new = job.step != began_at  # a resumed run has evaluated and saved its first step already
            better = False
            val_loss = None
            if new and job.validation is not None and (ends or job.step % c.eval_every == 0):
                val_loss = evaluate(job, ranks)
                better = job.note_validation(val_loss)
                ends = job.ended
            if interval.losses and (ends or stopping or job.step % c.log_every == 0):
                if ranks.first:
                    note(run, display, interval.record(job))
                interval = Interval(job)
            if val_loss is not None and ranks.first:
                note(run, display, {"step": job.step, "val_loss": val_loss, "sample": sample(job)})
            if ends or stopping or (new and job.step > 0 and (better or job.step % c.save_every == 0)):
                save(job, run, ranks, val_loss)
                if ends or stopping:
                    return Outcome(job.step, ends, ends and job.progress < 1, loss, val_loss)

            began = time.perf_counter()
            lr = job.learning_rate
            for group in job.optimizer.param_groups:
                group["lr"] = lr
            step = take_step(job, ranks)
            took = time.perf_counter() - began
            loss, asked, took = ranks.total(step.loss, stop.asked, took / ranks.size)
            stopping = asked > 0
            job.tokens += job.training.size(job.step * job.batch, job.batch)[0]
            job.step += 1
            job.seconds += took
            interval.add(loss, lr, step)


class Step(NamedTuple):
    loss: float  # this process's part of it
    norm: float | None  # of the gradient, before clipping
    norms: Norms
    flop: int  # of this process


def take_step(job: Job, ranks: Ranks) -> Step:
    """Compute the gradient of the next batch and update the weights."""
    first, count = ranks.share(job.step * job.batch, job.batch)
    tokens, targets, lengths = job.training.batch(first, count)
    n_targets = job.training.size(job.step * job.batch, job.batch)[1]
    seed = data.noise(job.config.seed, job.step, first) >> 33  # of dropout: the same again when the step is
    try:
        if isinstance(job.optimizer, OptimizerInBackward):
            loss = job.optimizer.step(tokens, targets, lengths, n_targets, seed)
            return Step(loss, job.optimizer.norm if job.config.clip else None, dict, job.flop(targets, lengths))
        job.optimizer.zero_grad()
        loss = job.model.loss_and_grads(
            tokens, targets, lengths,
            n_targets=n_targets, recompute=job.config.recompute, seed=seed, finished=ranks.all_reduce_async,
        )  # fmt: skip
        ranks.wait()
        grads = {p: p.grad for p in job.model.parameters() if p.grad is not None}
        each = torch.stack([optim.norm(grad) for grad in grads.values()]).double()
        norm = each.norm().item()
        if not math.isfinite(norm):
            raise NonFiniteError("the gradient is not finite")
    except NonFiniteError as trouble:
        job.model.zero_grad()
        raise NonFiniteError(
            f"step {job.step + 1}: {trouble}; {diagnose(job.model, tokens, targets, lengths)}; try a smaller learning rate"
            f" than {units.number(job.config.lr or 0)} (--lr)"
        ) from None
    optim.step(job.optimizer, optim.clip_factor(norm, job.config.clip))
    norms = lambda: by_layer(job, dict(zip(grads, each.tolist(), strict=True)))  # noqa: E731
    return Step(loss, norm, norms, job.flop(targets, lengths))


def diagnose(model: GPT, tokens: Tensor, targets: Tensor, lengths: list[int] | None = None) -> str:
    """Which intermediate first went wrong, on the way down or, if that is sound, on the way up."""
    sizes = [tokens.shape[1]] * len(tokens) if lengths is None else lengths
    for ids, answers in zip(*(torch.split(x.reshape(-1), sizes) for x in (tokens, targets)), strict=True):
        bad: list[str] = []

        def look(name: str, value: Tensor, bad: list[str] = bad) -> None:
            if value.is_floating_point() and not torch.isfinite(value).all():
                bad.append(name)

        try:
            model.loss_and_grads(ids[None], answers[None], record=look)
        except NonFiniteError:
            pass
        finally:
            model.zero_grad()
        down = [name for name in bad if ".a_" in name or name.startswith("a_")]
        if down:
            return f"on the way down {down[0]} was the first to go wrong"
        if bad:
            return f"on the way up {max(bad, key=depth)} was the first to go wrong"
    return "no single sequence shows it alone"


@torch.no_grad()
def evaluate(job: Job, ranks: Ranks) -> float:
    """The mean loss over the first batches of the validation part, the same ones every time."""
    assert job.validation is not None
    several = min(job.validation.per_epoch, job.config.eval_batches * job.batch)
    edges = [several * r // ranks.size for r in range(ranks.size + 1)]
    total = targets = 0.0
    for first in range(edges[ranks.rank], edges[ranks.rank + 1], job.batch):
        part = (first, min(job.batch, edges[ranks.rank + 1] - first), False)
        here = job.validation.size(*part)[1]
        total += here * job.model.loss(*job.validation.batch(*part))
        targets += here
    total, targets = ranks.total(total, targets)
    return total / targets


def sample(job: Job) -> str:
    """What the model writes now, beginning as the validation part does."""
    if not job.config.sample_tokens or job.validation is None:
        return ""
    prompt = job.validation.opening()
    new = generate(job.model, prompt, job.config.sample_tokens, temperature=0.8, top_k=200, seed=job.config.seed)
    written = new[0].tolist()
    if job.tokenizer.end in written:
        written = written[: written.index(job.tokenizer.end)]
    return job.tokenizer.decode([*prompt[0].tolist(), *written])


def save(job: Job, run: Run, ranks: Ranks, val_loss: float | None) -> None:
    """Write a checkpoint and prune older ones, by the first process alone: the number of processes leaves no trace."""

    def write() -> None:
        optimizer_state = optim.state_of(job.optimizer, job.names) | {"rng/torch": torch.get_rng_state()}
        facts = {"seconds": job.seconds, "tokens": job.tokens, "val_loss": val_loss, "stale": job.stale}
        bests = {"best": job.best, "initial": job.initial}
        facts |= {name: x if math.isfinite(x) else None for name, x in bests.items()}
        run.save(job.step, job.model, job.tokenizer, optimizer_state, facts)
        run.prune(job.config.keep)

    ranks.run_on_first(write)


def note(run: Run, display: Display, record: dict[str, Any]) -> None:
    run.log(record)
    display.show(record)


def by_layer(job: Job, norms: dict[nn.Parameter, float]) -> dict[str, float]:
    """Norms of parameters → norms of layers."""
    squares: dict[str, float] = {}
    for p, norm in norms.items():
        parts = job.names[p].split(".")
        layer = (
            f"block {parts[2]}" if parts[1:2] == ["h"] else "final norm" if "ln_f" in parts else "embeddings and head"
        )
        squares[layer] = squares.get(layer, 0.0) + norm * norm
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def peak_memory() -> int:
    """Bytes of this process at its highest point so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Stop:
    """Ctrl-C and SIGTERM ask; the loop finishes its step, saves, and ends. Asking a second time ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread can be told of signals
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("\nSaving after this step. Press Ctrl-C again to quit immediately.\n")


# ── getting ready ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_job(config: TrainConfig, ranks: Ranks, display: Display, checkpoint: Checkpoint | None = None) -> Job:
    """Data, tokenizer, model and optimizer of a run, new or from a checkpoint; the configuration resolved."""
    optim.maker(config.optimizer, 1.0, 0.0, (0.9, 0.9))  # a wrong name is said before anything is read
    config = lean(config)
    config = replace(config, data=sources_of(config.data, ranks))
    files, corpus = _files(config)
    directory = checkpoint.folder if checkpoint is not None else named(config.model, ranks, display)
    if directory is not None and lora.is_adapter(directory):
        raise HandgradError(f"{directory} is an adapter: merge it first (handgrad merge), or use handgrad finetune")
    if checkpoint is None and directory is not None and (config.shape or config.tokenizer):
        fixed = f"--{config.shape[0][0].replace('_', '-')}" if config.shape else "--tokenizer"
        raise HandgradError(f"{fixed} cannot change a model that exists ({directory}): leave it out")
    texts = tokenizer.read(directory) if directory is not None else _tokenizer(config, files, ranks)
    total = sum(file.stat().st_size for file in files)
    progress = display.reading(total) if ranks.first else lambda n: None
    tokens = ranks.first_then_others(lambda: data.prepare(files, texts, config.text_field, progress))
    if ranks.first:
        display.say(f"data: {corpus}, {plural(len(tokens), 'token')} of {texts.n_vocab:,}")

    shape = load_config(directory) if directory is not None else _shape(config, texts)
    context = shape.n_context
    training, validation = data.split(tokens, context, config.val_share, config.seed)
    dtype = getattr(torch, config.dtype)
    model = load(directory, dtype=dtype) if directory is not None else GPT(shape, seed=config.seed, dtype=dtype)
    check_vocabulary(texts, model)
    batch = max(1, round((config.batch_tokens or 12 * context) / context))
    config = _resolve(config, batch, training, model.config.d_model)

    job = Job(config, model, texts, make_optimizer(model, config, ranks), training, validation, batch)
    if checkpoint is not None:
        restore(job, checkpoint)
    if ranks.first:
        job.peak = Peak(config.dtype)
    return job


def named(model: str, ranks: Ranks, display: Display) -> Path | None:
    """The folder of the model to start from; None: a preset."""
    found = find_model(model)
    if found.note and ranks.first:
        display.say(found.note)
    return found.folder


def lean(config: C) -> C:
    """An optimizer inside the backward pass saves memory only where blocks are computed again."""
    return replace(config, recompute="blocks") if config.update_inside else config


def check_vocabulary(texts: Tokenizer, model: GPT) -> None:
    if texts.n_vocab > model.config.n_vocab:
        raise HandgradError(
            f"the tokenizer has {texts.n_vocab:,} ids and the model {model.config.n_vocab:,}: they do not belong together"
        )


def make_optimizer(model: GPT, config: TrainConfig, ranks: Ranks) -> torch.optim.Optimizer | OptimizerInBackward:
    assert config.lr is not None
    make = optim.maker(config.optimizer, config.lr, config.weight_decay, (config.beta1, config.beta2))
    if config.update_inside:
        return OptimizerInBackward(model, make, config.clip or None, config.recompute, combine=ranks.all_reduce)
    return make(model.parameters())


def sources_of(named: tuple[str, ...], ranks: Ranks) -> tuple[str, ...]:
    """Where the data is, so that it is found again from any folder; standard input is kept for that."""

    def absolute() -> str:
        return json.dumps([str(data.from_stdin() if s == "-" else Path(s).expanduser().absolute()) for s in named])

    return tuple(json.loads(ranks.broadcast(absolute)))


def _files(config: TrainConfig) -> tuple[list[Path], str]:
    if not config.data:
        return default_corpus()
    files = data.find(config.data)
    if not any(file.stat().st_size for file in files):
        raise HandgradError(f"there is no text in {', '.join(config.data)}: the files are empty")
    return files, plural(len(files), "file")


def _tokenizer(config: TrainConfig, files: list[Path], ranks: Ranks) -> Tokenizer:
    """As asked; or GPT-2's for GPT-2's shapes, characters for the default corpus, bytes for all else."""
    kind = config.tokenizer or ("gpt2" if config.model.startswith("gpt2") else "bytes" if config.data else "chars")
    texts = (piece.text for piece in data.texts(files, config.text_field))
    return tokenizer.from_json(ranks.broadcast(lambda: tokenizer.make(kind, texts).to_json()))


def _shape(config: TrainConfig, texts: Tokenizer) -> GPTConfig:
    changes = dict(config.shape)
    return preset(config.model, **{"n_vocab": texts.n_vocab, **changes})


def _resolve(config: TrainConfig, batch: int, training: Windows, width: int) -> TrainConfig:
    steps = config.steps
    if config.epochs is not None:
        steps = math.ceil(config.epochs * training.per_epoch / batch)
    elif config.minutes is None and steps is None:
        steps = 2000
    lr = min(4e-3, 0.5 / width) if config.lr is None else config.lr
    warmup = config.warmup
    if warmup is None:
        warmup = 100 if steps is None else min(100, steps // 10)
    return replace(
        config,
        steps=steps,
        epochs=None,
        batch_tokens=batch * training.context,
        lr=lr,
        min_lr=lr / 10 if config.min_lr is None else config.min_lr,
        warmup=warmup,
        log_every=config.log_every or 10,
        eval_every=config.eval_every or 250,
        save_every=config.save_every or 250,
    )


def restore(job: Job, checkpoint: Checkpoint) -> None:
    """Continue from a checkpoint: the optimizer's state, the random numbers, and where the run stood."""
    state = read_tensors(checkpoint.folder / OPTIMIZER)
    facts = checkpoint.facts
    try:
        torch.set_rng_state(state.pop("rng/torch"))
        optim.restore(job.optimizer, job.names, state)
        job.resumed, job.step = True, checkpoint.step
        job.seconds, job.tokens, job.stale = float(facts["seconds"]), int(facts["tokens"]), int(facts["stale"])
        job.best, job.initial = (
            math.inf if facts[name] is None else float(facts[name]) for name in ("best", "initial")
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as reason:
        raise HandgradError(f"{checkpoint.folder} does not fit this run: {type(reason).__name__} {reason}") from None


def settings_of(job: Job) -> dict[str, Any]:
    """What run.json says of a run that is ready to go."""
    return {
        "training": asdict(job.config),
        "model": asdict(job.model.config),
        "tokens": job.training.fingerprint,
        "validation": None if job.validation is None else job.validation.fingerprint,
    }
