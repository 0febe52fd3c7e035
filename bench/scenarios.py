"""What is measured. Each scenario returns rows that say everything: contender, seconds, ratio, memory, prediction."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.ops import attention
from handgrad.plan import make_plan
from handgrad.timing import predict

from . import finetune as finetuning
from .measure import Timing, peak_during, resident, take_turns
from .peers import BareProducts, Contender, Eager, Hand, HandInBackward, Loop, Peft, with_adapters

LEAN = "handgrad, lean"  # blocks computed again, the optimizer inside the backward pass
LOOP = "handgrad train"  # the step as the real loop takes it
ROOT = Path(__file__).parent.parent
Watch = Callable[[Iterable[int]], Iterable[int]]
LIBRARY_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
NANO = hg.preset("nano", n_vocab=65)  # nanoGPT's small recipe for the CPU: characters of Shakespeare


@dataclass
class Row:
    scenario: str
    case: str
    contender: str
    tokens: int
    seconds: float = float("nan")  # best round
    median: float = float("nan")
    ratio: float = float("nan")  # the reference contender's best divided by this one's: larger is faster
    gradient_seconds: float = float("nan")  # without the optimizer
    of_bound: float = float("nan")  # the bare products' time divided by that
    memory: int = 0  # bytes at the peak, above weights and optimizer state
    memory_ratio: float = float("nan")  # this one's memory divided by the reference's
    predicted_seconds: float = float("nan")
    predicted_memory: int = 0
    note: str = ""


@dataclass
class Case:
    """One model and batch, and who competes on it."""

    name: str
    tokens: int
    make: dict[str, Callable[[], Contender]]  # the first is ours, the second the reference
    rounds: int
    bound: Callable[[], BareProducts] | None = None
    plan: dict[str, object] = field(default_factory=dict)
    note: str = ""


# ── material ────────────────────────────────────────────────────────────────────────────────────────────────────────


def batch_of(n_vocab: int, b: int, t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(n_vocab, (2, b, t), generator=generator)
    return tokens, targets


def uneven_examples(n_vocab: int, examples: int) -> tuple[Tensor, Tensor, list[int]]:
    """Prompt-masked examples with the lengths of real instructions: mostly short, a few long; about an eighth prompt."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp(4.9 + 0.85 * torch.randn(examples, generator=generator))
    lengths = [int(x) for x in spread.clamp(20, 900)]
    n = sum(lengths)
    tokens = torch.randint(n_vocab, (n,), generator=generator)
    targets = torch.randint(n_vocab, (n,), generator=generator)
    start = 0
    for length in lengths:
        targets[start : start + max(10, length // 8)] = -100
        start += length
    return tokens, targets, lengths


def gpt2() -> hg.GPT:
    return hg.GPT(hg.preset("gpt2"), seed=0)


# ── the scenarios ───────────────────────────────────────────────────────────────────────────────────────────────────


def train(quick: bool) -> list[Case]:
    """A whole training step: loss, all gradients, AdamW."""
    sizes = [(1, 128), (1, 512)] if quick else [(4, 64), (1, 512), (1, 1024), (4, 1024)]
    return [_train_gpt2(b, t, rounds=3 if b * t > 2048 or quick else 6, quick=quick) for b, t in sizes] + [_nano(quick)]


def _train_gpt2(b: int, t: int, rounds: int, quick: bool) -> Case:
    tokens, targets = batch_of(50257, b, t)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(gpt2(), tokens, targets),
        "eager autograd": lambda: Eager(gpt2(), tokens, targets),
    }
    if (b, t) in ((1, 512), (1, 1024)) and not quick:  # compiling takes a minute for each shape
        make["torch.compile"] = lambda: Eager(gpt2(), tokens, targets, compiled=True)
    if (b, t) == (1, 512):
        make[LOOP] = lambda: Loop(gpt2(), tokens, targets)
    plan = {"config": hg.preset("gpt2"), "batch": b, "tokens": t}
    return Case(f"GPT-2 124M, {b}×{t}", b * t, make, rounds, lambda: BareProducts(gpt2(), tokens), plan)


def _nano(quick: bool) -> Case:
    tokens, targets = batch_of(65, 12, 64)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(hg.GPT(NANO), tokens, targets),
        "eager autograd": lambda: Eager(hg.GPT(NANO), tokens, targets),
    }
    if not quick:
        make["torch.compile"] = lambda: Eager(hg.GPT(NANO), tokens, targets, compiled=True)
    make[LOOP] = lambda: Loop(hg.GPT(NANO), tokens, targets)
    plan = {"config": NANO, "batch": 12, "tokens": 64}
    return Case("nano recipe, 12×64", 768, make, 25, lambda: BareProducts(hg.GPT(NANO), tokens), plan)


def lora(quick: bool) -> list[Case]:
    """Adapters of rank 16 beside every matrix of every block of GPT-2 124M."""
    b, t = (1, 256) if quick else (4, 1024)
    tokens, targets = batch_of(50257, b, t)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(with_adapters(gpt2()), tokens, targets),
        "transformers + peft": lambda: Peft(with_adapters(gpt2()), tokens, targets),
    }
    plan = {"config": hg.preset("gpt2"), "batch": b, "tokens": t, "rank": 16, "targets": "all-linear"}
    return [Case(f"LoRA r=16, {b}×{t}", b * t, make, 3, plan=plan)]


def sft(quick: bool) -> list[Case]:
    """The same on uneven, prompt-masked examples: packed by us, padded by the peer."""
    ids, answers, lengths = uneven_examples(50257, 2 if quick else 24)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(with_adapters(gpt2()), ids, answers, lengths),
        "transformers + peft": lambda: Peft(with_adapters(gpt2()), ids, answers, lengths),
    }
    note = f"{len(lengths)} examples, {len(ids):,} tokens, {int((answers != -100).sum()):,} targets"
    return [Case("LoRA r=16, uneven examples", len(ids), make, 1, note=note)]


def memory(quick: bool) -> list[Case]:
    """Peak memory above weights and optimizer state, of a whole step."""
    b, t = (1, 256) if quick else (4, 1024)
    tokens, targets = batch_of(50257, b, t)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(gpt2(), tokens, targets),
        "eager autograd": lambda: Eager(gpt2(), tokens, targets),
        LEAN: lambda: HandInBackward(gpt2(), tokens, targets),
    }
    plan = {"config": hg.preset("gpt2"), "batch": b, "tokens": t}
    return [Case(f"GPT-2 124M, {b}×{t}", b * t, make, 2, plan=plan)]


def attention_backward(quick: bool, watch: Watch) -> list[Row]:
    """The backward pass of attention alone, 12 heads of 64, against the library's own kernel."""
    rows = []
    for n in (128, 512, 1024) if quick else (128, 256, 512, 1024, 2048, 4096):
        generator = torch.Generator().manual_seed(0)
        qkv = torch.randn(n, 3, 12, 64, generator=generator)
        q, k, v = qkv.unbind(1)
        delta = torch.randn(n, 12, 64, generator=generator)
        spans = attention.spans_of((n,))
        _, saved = attention.forward(q, k, v, spans, True)
        grads = torch.empty(n, 3, 12, 64)
        theirs = [x.transpose(0, 1)[None] for x in (delta, q, k, v, saved.a)]
        lse = saved.lse.t()[None].contiguous()

        ours = partial(attention.backward, delta, saved, spans, True, grads.unbind(1))
        library = partial(LIBRARY_KERNEL, *theirs, lse, 0.0, True)
        ours()
        for mine, other in zip(grads.unbind(1), library(), strict=True):
            check(mine, other[0].transpose(0, 1), f"attention at {n} tokens")
        timings = take_turns({"handgrad": ours, "library kernel": library}, 40 if n <= 1024 else 12, watch)
        for name, timing in timings.items():
            ratio = timings["library kernel"].best / timing.best
            rows.append(Row("attention", f"{n} tokens", name, n, timing.best, timing.median, ratio))
    return rows


def products(quick: bool, watch: Watch) -> list[Row]:
    """Every product of a GPT-2 layer, 1024 tokens, as ops/linear.py writes it and turned around: (bᵗ aᵗ)ᵗ."""
    rows = []
    n, d, v = 1024, 768, 50257
    for name, f_in, f_out in (
        ("c_attn", d, 3 * d),
        ("c_proj", d, d),
        ("c_fc", d, 4 * d),
        ("mlp.c_proj", 4 * d, d),
        ("head", d, v),
    ):
        if quick and name not in ("c_fc", "head"):
            continue
        tokens = n // 2 if name == "head" else n
        a, delta = torch.randn(tokens, f_in), torch.randn(tokens, f_out)
        w = torch.randn(v, d).t() if name == "head" else torch.randn(f_in, f_out)
        for what, x, y in (("a w", a, w), ("Δ wᵗ", delta, w.t()), ("aᵗ Δ", a.t(), delta)):
            if name == "head" and what == "aᵗ Δ":
                x, y = delta.t(), a  # the head's gradient lies as the embedding does
            as_is, turned = torch.empty(x.shape[0], y.shape[1]), torch.empty(y.shape[1], x.shape[0])
            runs = {
                "as written": partial(torch.mm, x, y, out=as_is),
                "turned around": partial(torch.mm, y.t(), x.t(), out=turned),
            }
            for run in runs.values():
                run()
            check(as_is, turned.t(), f"{name}, {what}")
            timings = take_turns(runs, 8, watch)
            for how, timing in timings.items():
                ratio = timings["turned around"].best / timing.best
                rows.append(Row("products", f"{name}: {what}", how, tokens, timing.best, timing.median, ratio))
    return rows


def finetune(quick: bool, watch: Watch) -> list[Row]:
    """The real command on uneven, prompt-masked lines of JSON: whole processes, memory included."""
    count, steps = (6, 2) if quick else (24, 3)
    hand, peft, tokens = finetuning.side_by_side(count, steps)
    name = f"{count} examples a step, LoRA r={finetuning.RANK}"
    rows = []
    for contender, found in (("handgrad finetune", hand), ("transformers + peft", peft)):
        best, middle = min(found["seconds"]), sorted(found["seconds"])[len(found["seconds"]) // 2]
        rows.append(
            Row(
                "finetune", name, contender, tokens, best, middle, min(peft["seconds"]) / best,
                memory=found["memory"], memory_ratio=found["memory"] / peft["memory"],
                note=f"{tokens:,} tokens a step without padding; {steps} steps; losses equal; memory of the whole process",
            )
        )  # fmt: skip
    return rows


CASES: dict[str, Callable[[bool], list[Case]]] = {
    "train": train,
    "memory": memory,
    "lora": lora,
    "sft": sft,
}
ALONE: dict[str, Callable[[bool, Watch], list[Row]]] = {
    "finetune": finetune,
    "attention": attention_backward,
    "products": products,
}
SCENARIOS = {name: (scenario.__doc__ or "").strip() for name, scenario in (CASES | ALONE).items()}


def run(scenario: str, quick: bool, watch: Watch) -> list[Row]:
    if scenario in ALONE:
        return ALONE[scenario](quick, watch)
    return [row for case in CASES[scenario](quick) for row in compete(scenario, case, quick, watch)]


# ── competing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def check(ours: Tensor, truth: Tensor, what: str) -> None:
    error = ((ours.double() - truth.double()).norm() / truth.double().norm()).item()
    if not error < 1e-4:
        raise HandgradError(f"{what}: the gradients differ by {error:.1e}; nothing is timed")


def compete(scenario: str, case: Case, quick: bool, watch: Watch) -> list[Row]:
    """Compare the gradients, take turns, and let each show its peak memory in a process of its own."""
    made = {name: make() for name, make in case.make.items()}
    names = list(made)
    losses = {name: contender.gradients() for name, contender in made.items()}
    truth = made[names[1]].named_gradients()
    for name, contender in made.items():
        if isinstance(contender, HandInBackward | Loop):
            continue  # its gradients are gone or clipped when it is done; tests hold its parameters equal
        if abs(losses[name] - losses[names[1]]) > 1e-4 * abs(losses[names[1]]):
            raise HandgradError(f"{scenario}, {case.name}: losses differ: {losses}")
        for key, grad in contender.named_gradients().items():
            check(grad, truth[key], f"{scenario}, {case.name}, {name}, {key}")

    inside: dict[str, Timing] = {name: Timing() for name in made}
    runs: dict[str, Callable[[], object]] = {}
    for name, contender in made.items():
        runs[name] = _whole_step(contender, inside[name])
    if case.bound is not None:
        runs["bare products"] = case.bound().gradients
    timings = take_turns(runs, case.rounds, watch, in_a_row=10 if case.tokens < 1000 and case.rounds > 20 else 1)
    del made, runs
    shown = [name for name in case.make if name not in ("torch.compile", LOOP)]
    if quick and scenario == "train":
        shown = []  # a process for each takes longer than all else
    peaks = {name: _peak_in_a_process(scenario, case.name, name, quick) for name in shown}

    rows = []
    for name, timing in timings.items():
        ratio = timings[names[1]].best / timing.best
        row = Row(scenario, case.name, name, case.tokens, timing.best, timing.median, ratio, note=case.note)
        if name in inside and name != LOOP:
            row.gradient_seconds = min(inside[name].rounds[1:])
            if "bare products" in timings:
                row.of_bound = timings["bare products"].best / row.gradient_seconds
        if name in peaks:
            row.memory = peaks[name]
            row.memory_ratio = peaks[name] / peaks[names[1]]
        if case.plan and name in ("handgrad", LEAN):
            plan = make_plan(**case.plan, recompute="blocks" if name == LEAN else "none", update_inside=name == LEAN)
            row.predicted_seconds = predict(plan)
            row.predicted_memory = plan.bytes_peak - plan.bytes_weights - plan.bytes_optimizer
        rows.append(row)
    return rows


def _whole_step(contender: Contender, inside: Timing) -> Callable[[], None]:
    def step() -> None:
        start = time.perf_counter()
        contender.gradients()
        inside.rounds.append(time.perf_counter() - start)
        contender.update()

    return step


def _peak_in_a_process(scenario: str, case: str, contender: str, quick: bool) -> int:
    code = f"from bench.scenarios import show_peak; show_peak({scenario!r}, {case!r}, {contender!r}, {quick})"
    # A peer gets memory as torch and the C library come, without handgrad's settings for them (handgrad/machine.py).
    as_it_comes = {} if contender in ("handgrad", LEAN) else {"MALLOC_PERTURB_": "0", "THP_MEM_ALLOC_ENABLE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | as_it_comes,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise HandgradError(f"{contender} could not show its memory: {done.stderr.strip().splitlines()[-1:]}")
    return int(json.loads(done.stdout.splitlines()[-1]))


def show_peak(scenario: str, case_name: str, contender: str, quick: bool) -> None:
    """Run in a process of its own: the bytes of a step at its peak, above weights and optimizer state."""
    case = next(case for case in CASES[scenario](quick) if case.name == case_name)  # described: no model exists yet
    small = batch_of(65, 2, 8)
    for warm in (Hand(hg.GPT(NANO), *small), Eager(hg.GPT(NANO), *small)):  # the libraries load what they need once
        warm.gradients()
        warm.update()
    nothing = resident()
    competitor = case.make[contender]()

    def step() -> None:
        competitor.gradients()
        competitor.update()

    step()  # the optimizer's state exists from now on
    print(json.dumps(peak_during(step) - nothing - competitor.lasting_bytes()))


def as_json(rows: list[Row]) -> str:
    return json.dumps([{k: (None if v != v else v) for k, v in asdict(row).items()} for row in rows], indent=1)
