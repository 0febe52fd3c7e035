"""Text in, a trained model out. `train` is the loop; everything else here gets it ready or watches it."""

import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from . import data, lora, optim, tokenizer, units
from .checkpoint import load, load_config, read_tensors
from .config import GPTConfig, TrainConfig, preset
from .data import Batches, Windows
from .distributed import Ranks
from .errors import HandgradError, NonFiniteError
from .generate import generate
from .gpt import GPT
from .material import default_corpus
from .models import find_model
from .optim import OptimizerInBackward
from .plan import Work, flop
from .run import Checkpoint, Run
from .timing import Peak
from .tokenizer import Tokenizer
from .trace_html import depth
from .units import plural

C = TypeVar("C", bound=TrainConfig)


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
    best: float = math.inf
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

    @property
    def ended(self) -> bool:
        return self.progress >= 1 or (self.config.patience is not None and self.stale >= self.config.patience)

    def flop(self, first: int, count: int) -> int:
        """Of the matrix products that these windows or examples take, counted from their real tokens and targets."""
        _, targets, lengths = self.training.batch(first, count)
        ranks = {name: adapter.down.shape[1] for name, adapter in lora.adapters_of(self.model).items()}
        work = Work.of_batch(targets, lengths, self.model.config.causal)
        return sum(flop(self.model.config, work, ranks, self.config.recompute))

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
    checkpoint: Path
    loss: float
    val_loss: float | None


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(job: Job, run: Run, ranks: Ranks, display: Display) -> Outcome:
    """Take steps until the end, or until somebody asks to stop; log, evaluate and save on the way."""
    c = job.config
    assert c.eval_every and c.save_every and c.log_every
    losses: list[float] = []
    tokens = products = 0
    began_at, since = job.step if job.resumed else -1, job.seconds
    loss, val_loss, stopping = math.nan, None, False
    with Stop() as stop:
        while True:
            ends = job.ended
            new = job.step != began_at  # a resumed run has evaluated and saved its first step already
            better = False
            if new and job.validation is not None and (ends or job.step % c.eval_every == 0):
                val_loss = evaluate(job, ranks)
                better = val_loss < job.best
                job.best = min(job.best, val_loss)
                job.stale = 0 if better else job.stale + 1
                ends = job.ended
                if ranks.first:
                    note(run, display, {"step": job.step, "val_loss": val_loss, "sample": sample(job)})
            if ends or stopping or (new and job.step > 0 and (better or job.step % c.save_every == 0)):
                saved = save(job, run, ranks, better)
                if ends or stopping:
                    return Outcome(job.step, ends, ends and job.progress < 1, saved, loss, val_loss)

            products += job.flop(*ranks.share(job.step * job.batch, job.batch)) if ranks.first else 0
            began = time.perf_counter()
            lr = job.learning_rate
            for group in job.optimizer.param_groups:
                group["lr"] = lr
            tokens += job.training.size(job.step * job.batch, job.batch)[0]
            loss, norm, norms = take_step(job, ranks)
            took = time.perf_counter() - began
            loss, asked, took = ranks.total(loss, stop.asked, took / ranks.size)
            stopping = asked > 0
            job.step += 1
            job.seconds += took
            losses.append(loss)

            if job.step % c.log_every == 0 and ranks.first:
                each = (job.seconds - since) / len(losses)
                record = {
                    "step": job.step, "loss": sum(losses) / len(losses), "lr": lr, "grad_norm": norm,
                    "tokens_per_second": tokens / (each * len(losses)),
                    "mfu": job.peak.share(products, each * len(losses)) if job.peak else None,
                    "seconds": job.seconds, "memory": peak_memory(), "grad_norms": norms(),
                }  # fmt: skip
                note(run, display, record)
                losses, tokens, products, since = [], 0, 0, job.seconds


def take_step(job: Job, ranks: Ranks) -> tuple[float, float | None, Callable[[], dict[str, float]]]:
    """This process's part of the loss, the gradient's norm before clipping, and a way to get it layer by layer."""
    first, count = ranks.share(job.step * job.batch, job.batch)
    tokens, targets, lengths = job.training.batch(first, count)
    n_targets = job.training.size(job.step * job.batch, job.batch)[1]
    seed = data.noise(job.config.seed, job.step, first) >> 33  # of dropout: the same again when the step is
    try:
        if isinstance(job.optimizer, OptimizerInBackward):
            loss = job.optimizer.step(tokens, targets, lengths, n_targets, seed)
            return loss, job.optimizer.norm if job.config.clip else None, dict
        job.optimizer.zero_grad()
        loss = job.model.loss_and_grads(
            tokens, targets, lengths,
            n_targets=n_targets, recompute=job.config.recompute, seed=seed, finished=ranks.sum_behind,
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
    return loss, norm, lambda: by_layer(job, dict(zip(grads, each.tolist(), strict=True)))


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


def save(job: Job, run: Run, ranks: Ranks, better: bool) -> Path:
    """By the first process alone; nothing in it says how many there are. Old checkpoints go, except the best."""
    folder = run.checkpoints
    if ranks.first:
        memory = optim.state_of(job.optimizer, job.names) | {"rng/torch": torch.get_rng_state()}
        best = job.best if math.isfinite(job.best) else None
        facts = {"seconds": job.seconds, "best": best, "stale": job.stale}
        folder = run.save(job.step, job.model, job.tokenizer, memory, facts)
        if better:
            run.mark_best(job.step, job.best)
        run.prune(job.config.keep)
    ranks.meet()
    return folder


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
            sys.stderr.write("\nfinishing this step, then saving; once more ends at once\n")


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
    if not ranks.first:
        ranks.meet()  # the first process prepares the tokens, the others find them prepared
    total = sum(file.stat().st_size for file in files)
    tokens = data.prepare(files, texts, config.text_field, display.reading(total) if ranks.first else lambda n: None)
    if ranks.first:
        ranks.meet()
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
        return OptimizerInBackward(model, make, config.clip or None, config.recompute, combine=ranks.sum_now)
    return make(model.parameters())


def sources_of(named: tuple[str, ...], ranks: Ranks) -> tuple[str, ...]:
    """Where the data is, so that it is found again from any folder; standard input is kept for that."""

    def absolute() -> str:
        return json.dumps([str(data.from_stdin() if s == "-" else Path(s).expanduser().absolute()) for s in named])

    return tuple(json.loads(ranks.agree(absolute)))


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
    return tokenizer.from_json(ranks.agree(lambda: tokenizer.make(kind, texts).to_json()))


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
    """Go on from a checkpoint: the optimizer's memory, the random numbers, and where the run stood."""
    memory = read_tensors(checkpoint.folder / "optimizer.safetensors")
    torch.set_rng_state(memory.pop("rng/torch"))
    optim.restore(job.optimizer, job.names, memory)
    job.resumed = True
    job.step = checkpoint.step
    job.seconds = checkpoint.facts["seconds"]
    job.best = math.inf if checkpoint.facts["best"] is None else checkpoint.facts["best"]
    job.stale = checkpoint.facts.get("stale", 0)


def settings_of(job: Job) -> dict[str, Any]:
    """What run.json says."""
    return {
        "command": job.config.command,
        "training": asdict(job.config),
        "model": asdict(job.model.config),
        "tokens": job.training.fingerprint,
        "validation": None if job.validation is None else job.validation.fingerprint,
    }


def config_from(settings: dict[str, Any], kind: type[C]) -> C:
    """The reverse, for a run that goes on."""
    began = settings.get("command", "train")
    if began != kind.command:
        raise HandgradError(f"this run was begun by handgrad {began}: go on with that")
    try:
        raw: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in settings["training"].items()}
        raw["shape"] = tuple((name, value) for name, value in raw["shape"])
        return kind(**raw)
    except (KeyError, TypeError, ValueError) as reason:
        raise HandgradError(f"run.json does not describe a run of this version: {reason}") from None
