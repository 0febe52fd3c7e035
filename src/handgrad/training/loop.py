"""The training loop: take steps, log, evaluate, sample and save."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import optim
from ..errors import NonFiniteError, option
from ..formatting import number
from ..inference.generate import generate
from ..machine import peak_memory
from ..model.names import part_of
from ..model.passes.example_gradients import ExampleNorms
from ..model.passes.router_losses import RouterLosses
from ..optim import OptimizerInBackward
from ..text.batches import Batches, hash64
from . import checkpoint, example_report
from .diagnose import diagnose
from .distributed import Ranks
from .interrupt import Stop
from .job import Display, Job
from .run import Run
from .threads import Threads

Norms = Callable[[], dict[str, float]]  # computes the gradient's norm per layer


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool  # False: stopped by a signal
    early: bool  # finished because the validation loss no longer decreased
    loss: float
    val_loss: float | None


class Interval:
    """Statistics since the last logged step."""

    def __init__(self, job: Job):
        self.tokens, self.seconds = job.tokens, job.seconds
        self.flop = 0  # of this process
        self.losses: list[float] = []
        self.routers: dict[str, list[float]] = {}  # losses of the routers

    def add(self, loss: float, lr: float, step: "Step") -> None:
        self.losses.append(loss)
        self.flop += step.flop
        self.lr, self.norm, self.norms = lr, step.norm, step.norms
        if step.routers is not None:
            for name, value in (("balance_loss", step.routers.balance), ("z_loss", step.routers.z)):
                self.routers.setdefault(name, []).append(value)

    def record(self, job: Job) -> dict[str, Any]:
        seconds = job.seconds - self.seconds
        return {
            "step": job.step, "loss": sum(self.losses) / len(self.losses), "lr": self.lr, "grad_norm": self.norm,
            "tokens_per_second": (job.tokens - self.tokens) / seconds,
            "mfu": job.peak.mfu(self.flop, seconds) if job.peak else None,
            "tokens": job.tokens, "seconds": job.seconds, "memory": peak_memory(), "grad_norms": self.norms(),
            "threads": torch.get_num_threads(), **{name: sum(x) / len(x) for name, x in self.routers.items()},
        }  # fmt: skip


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(job: Job, run: Run, ranks: Ranks, display: Display, threads: Threads | None = None) -> Outcome:
    """Take steps until the run ends or a signal stops it; log, evaluate, sample and save in between. `threads` may follow
    the machine's load."""
    recipe = job.recipe
    interval = Interval(job)
    resumed_at = job.step if job.resumed else -1
    loss, stopping = math.nan, False
    with Stop() as stop:
        while True:
            done = job.ended
            new = job.step != resumed_at  # a resumed run has already evaluated and saved this step
            better = False
            val_loss = None
            if new and job.validation is not None and (done or job.step % recipe.eval_every == 0):
                val_loss = evaluate(job, job.validation, ranks)
                better = job.note_validation(val_loss)
                done = job.ended
            if interval.losses and (done or stopping or job.step % recipe.log_every == 0):
                if ranks.first:
                    log(run, display, interval.record(job))
                interval = Interval(job)
            if val_loss is not None:
                ranks.run_on_first(partial(log_evaluation, job, run, display, val_loss))
            if done or stopping or (new and job.step > 0 and (better or job.step % recipe.save_every == 0)):
                save(job, run, ranks, val_loss)
                if done or stopping:
                    return Outcome(job.step, done, done and job.progress < 1, loss, val_loss)

            start = time.perf_counter()
            lr = job.learning_rate
            for group in job.optimizer.param_groups:
                group["lr"] = lr
            step = take_step(job, ranks)
            seconds = time.perf_counter() - start
            loss, asked, seconds = ranks.total(step.loss, stop.requested, seconds / ranks.size)
            stopping = asked > 0
            job.tokens += job.training.size(job.step * job.batch, job.batch)[0]
            job.step += 1
            job.seconds += seconds
            interval.add(loss, lr, step)
            if step.examples is not None:
                measured = ranks.total(*step.examples)
                if ranks.first:
                    run.log(example_report.record_of(job.step, measured))
            if threads is not None:
                threads.after_step()


class Step(NamedTuple):
    loss: float  # of this process
    norm: float | None  # of the gradient, before clipping
    norms: Norms
    flop: int  # of this process
    routers: RouterLosses | None = None  # of all processes
    examples: list[float] | None = None  # norms, then losses of the batch's examples; 0 for those of other processes


def take_step(job: Job, ranks: Ranks) -> Step:
    """Compute the gradient of the next batch and update the weights."""
    first, count = ranks.share(job.step * job.batch, job.batch)
    tokens, targets, lengths = job.training.batch(first, count)
    n_targets = job.training.size(job.step * job.batch, job.batch)[1]
    seed = hash64(job.options.seed, job.step, first) >> 33  # of dropout: a repeated step repeats it
    if job.rounding is not None:
        job.rounding.step = job.step
    examples = ExampleNorms(grads=True) if job.options.example_norms else None
    routers = router_losses(job, ranks, tokens, lengths, seed)

    def of_examples() -> list[float] | None:
        if examples is None:
            return None
        before = first - job.step * job.batch
        after = job.batch - before - count
        found = (examples.result().tolist(), examples.losses.tolist())
        return [x for here in found for x in (*[0.0] * before, *here, *[0.0] * after)]

    try:
        if isinstance(job.optimizer, OptimizerInBackward):
            loss = job.optimizer.step(tokens, targets, lengths, n_targets, seed, examples, routers)
            norm = job.optimizer.norm if job.options.clip else None
            return Step(loss, norm, dict, job.flop(tokens, targets, lengths), routers, of_examples())
        job.model.zero_grad()
        loss = job.model.loss_and_grads(
            tokens, targets, lengths,
            n_targets=n_targets, recompute=job.options.recompute, seed=seed, finished=ranks.all_reduce_async,
            examples=examples, routers=routers, share=job.options.share_prefixes,
        )  # fmt: skip
        ranks.wait()
        each = {p: optim.norm(p.grad) for p in job.model.parameters() if p.grad is not None}
        norm = optim.length(each.values())
        if not math.isfinite(norm):
            raise NonFiniteError("the gradient is not finite")
    except NonFiniteError as error:
        job.model.zero_grad()
        raise NonFiniteError(
            f"step {job.step + 1}: {error}; {diagnose(job.model, tokens, targets, lengths)}; try a smaller learning rate"
            f" than {number(job.recipe.lr)} ({option('lr')})"
        ) from None
    optim.step(job.optimizer, optim.clip_factor(norm, job.options.clip))
    flop = job.flop(tokens, targets, lengths)
    return Step(loss, norm, partial(by_layer, job, each), flop, routers, of_examples())


def router_losses(job: Job, ranks: Ranks, tokens: Tensor, lengths: list[int] | None, seed: int) -> RouterLosses | None:
    """The losses of the routers, if they are differentiated. Of several processes the rows of all are counted first."""
    if not job.model.config.router_losses:
        return None
    if ranks.size == 1:
        return RouterLosses(job.model.config)
    own = job.model.count_routers(tokens, lengths, seed=seed).sums
    return RouterLosses(job.model.config, own.new_tensor(ranks.total(*own.tolist())))


@torch.no_grad()
def evaluate(job: Job, validation: Batches, ranks: Ranks) -> float:
    """The mean loss over the first validation batches, the same ones every time."""
    count = min(validation.per_epoch, job.options.eval_batches * job.batch)
    edges = [count * r // ranks.size for r in range(ranks.size + 1)]
    total = targets = 0.0
    for first in range(edges[ranks.rank], edges[ranks.rank + 1], job.batch):
        part = (first, min(job.batch, edges[ranks.rank + 1] - first), False)
        here = validation.size(*part)[1]
        total += here * job.model.loss(*validation.batch(*part), share=job.options.share_prefixes)
        targets += here
    total, targets = ranks.total(total, targets)
    return total / targets


class Sample(NamedTuple):
    """Text that the model generates: all of it, and how it begins."""

    text: str = ""
    prompt: str = ""

    def marked(self) -> str:
        """With a mark where the model's own text begins."""
        return f"{self.prompt}▸{self.text[len(self.prompt) :]}"


def sample(job: Job) -> Sample:
    """A sample whose prompt is the beginning of the validation data."""
    if not job.options.sample_tokens or job.validation is None or job.model.unpacks:  # a token would unpack every block
        return Sample()
    prompt = job.validation.sample_prompt()
    count, seed = job.options.sample_tokens, job.options.seed
    new = generate(job.model, prompt, count, temperature=0.8, top_k=200, seed=seed, context_full="slide")
    generated = new[0].tolist()
    if job.tokenizer.end in generated:
        generated = generated[: generated.index(job.tokenizer.end)]
    ids = prompt[0].tolist()
    text = job.tokenizer.decode([*ids, *generated])
    begun = job.tokenizer.decode(ids).rstrip("\ufffd")  # a character may begin in the prompt and end after it
    return Sample(text, begun if text.startswith(begun) else "")


def save(job: Job, run: Run, ranks: Ranks, val_loss: float | None) -> None:
    """Write a checkpoint and prune older ones, in the first process only: files do not depend on the number of processes."""

    def write() -> None:
        optimizer_state = optim.state_of(job.optimizer, job.names) | {"rng/torch": torch.get_rng_state()}
        facts: dict[str, Any] = {"seconds": job.seconds, "tokens": job.tokens, "threads": job.threads}
        facts |= {"val_loss": val_loss, "stale": job.stale}
        bests = {"best": job.best, "initial": job.initial}
        facts |= {name: x if math.isfinite(x) else None for name, x in bests.items()}
        checkpoint.save(run, job.step, job.model, job.tokenizer, optimizer_state, facts)
        checkpoint.prune(run, job.options.keep)

    ranks.run_on_first(write)


def log(run: Run, display: Display, record: dict[str, Any]) -> None:
    run.log(record)
    display.show(record)


def log_evaluation(job: Job, run: Run, display: Display, val_loss: float) -> None:
    made = sample(job)
    log(run, display, {"step": job.step, "val_loss": val_loss, "sample": made.text, "prompt": made.prompt})


def by_layer(job: Job, norms: dict[nn.Parameter, float]) -> dict[str, float]:
    """Norms per parameter → norms per layer."""
    squares: dict[str, float] = {}
    for p, norm in norms.items():
        layer = part_of(job.names[p])
        squares[layer] = squares.get(layer, 0.0) + norm * norm
    return {layer: math.sqrt(square) for layer, square in squares.items()}
