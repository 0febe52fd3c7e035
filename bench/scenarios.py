"""What is measured. Each scenario returns rows that say everything: contender, seconds, ratio, memory, prediction."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
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
from handgrad.plan.estimate import make_plan
from handgrad.plan.timing import predict

from . import SCENARIOS
from . import explain as page
from . import finetune as finetuning
from .measure import Machine, Timing, peak_during, resident, take_turns
from .peers import RANK, BareProducts, Contender, Eager, Hand, HandInBackward, Loop, Peft, with_adapters
from .sizes import SIZES, Size

LEAN = "handgrad, lean"  # blocks recomputed, the optimizer inside the backward pass
LOOP = "handgrad train"  # the step as the real loop takes it
COMPILED = "torch.compile"
ROOT = Path(__file__).parent.parent
Watch = Callable[[Iterable[int]], Iterable[int]]
LIBRARY_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class Row:
    scenario: str
    case: str
    contender: str
    tokens: int
    seconds: float = float("nan")  # best round
    median: float = float("nan")
    ratio: float = float("nan")  # the reference contender's best divided by this one's: larger is faster
    gradient_error: float = float("nan")  # the largest relative error of a gradient, the reference's being the truth
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


def uneven_examples(n_vocab: int, examples: int, longest: int) -> tuple[Tensor, Tensor, list[int]]:
    """Prompt-masked examples with the lengths of real instructions: mostly short, a few long; about an eighth prompt."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp(4.9 + 0.85 * torch.randn(examples, generator=generator))
    lengths = [int(x) for x in (spread * longest / 900).clamp(max(12, 20 * longest / 900), longest)]
    n = sum(lengths)
    tokens = torch.randint(n_vocab, (n,), generator=generator)
    targets = torch.randint(n_vocab, (n,), generator=generator)
    start = 0
    for length in lengths:
        targets[start : start + max(10, length // 8)] = -100
        start += length
    return tokens, targets, lengths


def can_compile() -> bool:
    """torch.compile needs a C++ compiler and Python's headers."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(os.environ.get("CXX", "g++")) is not None and headers.exists()


# ── scenarios ───────────────────────────────────────────────────────────────────────────────────────────────────────


def train(size: Size) -> list[Case]:
    (b, t), make = size.recipe_batch, partial(hg.GPT, size.recipe)
    recipe = _training(f"nano recipe, {b}×{t}", size.recipe, make, (b, t), 25, size.compile_recipe, True)
    return [_train_gpt2(shape, size) for shape in size.train] + [recipe]


def _train_gpt2(shape: tuple[int, int], size: Size) -> Case:
    b, t = shape
    rounds = 3 if b * t > 2048 or size.name == "quick" else 6
    return _training(
        f"{size.label}, {b}×{t}", size.model, partial(hg.GPT, size.model, seed=0), shape, rounds,
        compiled=shape in size.compiled, loop=shape == size.loop,
    )  # fmt: skip


def _training(
    name: str,
    config: hg.GPTConfig,
    model: Callable[[], hg.GPT],
    shape: tuple[int, int],
    rounds: int,
    compiled: bool,
    loop: bool,
) -> Case:
    b, t = shape
    tokens, targets = batch_of(config.n_vocab, b, t)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(model(), tokens, targets),
        "eager autograd": lambda: Eager(model(), tokens, targets),
    }
    if compiled and can_compile():
        make[COMPILED] = lambda: Eager(model(), tokens, targets, compiled=True)
    if loop:
        make[LOOP] = lambda: Loop(model(), tokens, targets)
    note = "torch.compile is left out: there is no C++ compiler, or Python.h is missing"
    return Case(
        name, b * t, make, rounds, lambda: BareProducts(model(), tokens),
        {"config": config, "batch": b, "tokens": t}, note if compiled and not can_compile() else "",
    )  # fmt: skip


def lora(size: Size) -> list[Case]:
    b, t = size.step
    model = partial(hg.GPT, size.model, seed=0)
    tokens, targets = batch_of(size.model.n_vocab, b, t)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(with_adapters(model()), tokens, targets),
        "transformers + peft": lambda: Peft(with_adapters(model()), tokens, targets),
    }
    plan = {"config": size.model, "batch": b, "tokens": t, "rank": RANK, "targets": "all-linear"}
    return [Case(f"LoRA r={RANK}, {b}×{t}", b * t, make, 3, plan=plan)]


def sft(size: Size) -> list[Case]:
    model = partial(hg.GPT, size.model, seed=0)
    ids, answers, lengths = uneven_examples(size.model.n_vocab, size.examples, size.longest)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(with_adapters(model()), ids, answers, lengths),
        "transformers + peft": lambda: Peft(with_adapters(model()), ids, answers, lengths),
    }
    note = f"{len(lengths)} examples, {len(ids):,} tokens, {int((answers != -100).sum()):,} targets"
    return [Case(f"LoRA r={RANK}, uneven examples", len(ids), make, 1, note=note)]


def memory(size: Size) -> list[Case]:
    b, t = size.step
    model = partial(hg.GPT, size.model, seed=0)
    tokens, targets = batch_of(size.model.n_vocab, b, t)
    make: dict[str, Callable[[], Contender]] = {
        "handgrad": lambda: Hand(model(), tokens, targets),
        "eager autograd": lambda: Eager(model(), tokens, targets),
        LEAN: lambda: HandInBackward(model(), tokens, targets),
    }
    plan = {"config": size.model, "batch": b, "tokens": t}
    return [Case(f"{size.label}, {b}×{t}", b * t, make, 2, plan=plan)]


def attention_backward(size: Size, watch: Watch) -> list[Row]:
    rows = []
    heads = (size.model.n_heads, size.model.query_width)
    for n in size.attention:
        generator = torch.Generator().manual_seed(0)
        qkv = torch.randn(n, 3, *heads, generator=generator)
        q, k, v = qkv.unbind(1)
        delta = torch.randn(n, *heads, generator=generator)
        spans = attention.spans_of((n,))
        _, saved = attention.forward(q, k, v, spans, True)
        grads = torch.empty(n, 3, *heads)
        theirs = [x.transpose(0, 1)[None] for x in (delta, q, k, v, saved.a)]
        lse = saved.lse.t()[None].contiguous()

        ours = partial(attention.backward, delta, saved, spans, True, grads.unbind(1))
        library = partial(LIBRARY_KERNEL, *theirs, lse, 0.0, True)
        ours()
        error = max(
            compare(mine, other[0].transpose(0, 1), f"attention at {n} tokens")
            for mine, other in zip(grads.unbind(1), library(), strict=True)
        )
        runs = {"handgrad": ours, "library kernel": library}
        timings = take_turns(runs, min(size.rounds, 40 if n <= 1024 else 12), watch)
        for name, timing in timings.items():
            ratio = timings["library kernel"].best / timing.best
            rows.append(Row("attention", f"{n} tokens", name, n, timing.best, timing.median, ratio))
            rows[-1].gradient_error = error if name == "handgrad" else 0.0
            rows[-1].note = f"{heads[0]} heads of {heads[1]}"
    return rows


def products(size: Size, watch: Watch) -> list[Row]:
    rows = []
    n, d, v = size.product_tokens, size.model.d_model, size.model.n_vocab
    for name, f_in, f_out in (
        ("c_attn", d, 3 * d),
        ("c_proj", d, d),
        ("c_fc", d, 4 * d),
        ("mlp.c_proj", 4 * d, d),
        ("head", d, v),
    ):
        if name not in size.products:
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
            error = compare(as_is, turned.t(), f"{name}, {what}")
            timings = take_turns(runs, min(size.rounds, 8), watch)
            for how, timing in timings.items():
                ratio = timings["turned around"].best / timing.best
                rows.append(Row("products", f"{name}: {what}", how, tokens, timing.best, timing.median, ratio))
                rows[-1].gradient_error = error if how == "as written" else 0.0
    return rows


def finetune(size: Size, watch: Watch) -> list[Row]:
    count, steps = size.finetune
    hand, peft, tokens = finetuning.side_by_side(size)
    name = f"{count} examples a step, LoRA r={RANK}"
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


def explain(size: Size, watch: Watch) -> list[Row]:
    rows = []
    tokens, found = page.measure(*size.explain)
    for what, seconds, peak in found:
        row = Row("explain", what, "handgrad explain", tokens, seconds, seconds, memory=peak)
        row.note = f"{size.explain[0]}, random weights, {tokens} tokens; memory of the whole process"
        rows.append(row)
    return rows


CASES: dict[str, Callable[[Size], list[Case]]] = {"train": train, "memory": memory, "lora": lora, "sft": sft}
ALONE: dict[str, Callable[[Size, Watch], list[Row]]] = {
    "finetune": finetune,
    "attention": attention_backward,
    "products": products,
    "explain": explain,
}
assert set(SCENARIOS) == {*CASES, *ALONE}


def run(scenario: str, size: Size, watch: Watch) -> list[Row]:
    if scenario in ALONE:
        return ALONE[scenario](size, watch)
    return [row for case in CASES[scenario](size) for row in compete(scenario, case, size, watch)]


# ── competing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def compare(ours: Tensor, truth: Tensor, what: str) -> float:
    """The relative error, which must be that of rounding."""
    error = ((ours.double() - truth.double()).norm() / truth.double().norm()).item()
    if not error < 1e-4:
        raise HandgradError(f"{what}: the gradients differ by {error:.1e}; nothing is timed")
    return error


def compete(scenario: str, case: Case, size: Size, watch: Watch) -> list[Row]:
    """Compare losses and gradients, take turns, and measure each contender's peak memory in a separate process."""
    made = {name: make() for name, make in case.make.items()}
    names = list(made)
    losses = {name: contender.gradients() for name, contender in made.items()}
    truth = made[names[1]].named_gradients()
    errors: dict[str, float] = {}
    for name, contender in made.items():
        if not abs(losses[name] - losses[names[1]]) <= 1e-4 * abs(losses[names[1]]):
            raise HandgradError(f"{scenario}, {case.name}: losses differ: {losses}; nothing is timed")
        if isinstance(contender, HandInBackward | Loop):
            continue  # its gradients are freed or clipped by now; tests hold its parameters equal
        found = contender.named_gradients()
        if set(found) != set(truth):
            missing = ", ".join(sorted(set(found) ^ set(truth)))
            raise HandgradError(f"{scenario}, {case.name}, {name}: gradients without a counterpart: {missing}")
        errors[name] = max(
            compare(grad, truth[key], f"{scenario}, {case.name}, {name}, {key}") for key, grad in found.items()
        )

    inside: dict[str, Timing] = {name: Timing() for name in made}
    runs: dict[str, Callable[[], object]] = {}
    for name, contender in made.items():
        runs[name] = _whole_step(contender, inside[name])
    if case.bound is not None:
        runs["bare products"] = case.bound().gradients
    rounds = min(size.rounds, case.rounds)
    timings = take_turns(runs, rounds, watch, in_a_row=10 if case.tokens < 1000 and rounds > 20 else 1)
    del made, runs
    shown = [name for name in case.make if name not in (COMPILED, LOOP)] if scenario in size.peaks else []
    peaks = {name: _peak_in_a_process(scenario, case.name, name, size) for name in shown}

    rows = []
    for name, timing in timings.items():
        ratio = timings[names[1]].best / timing.best
        row = Row(scenario, case.name, name, case.tokens, timing.best, timing.median, ratio, note=case.note)
        row.gradient_error = errors.get(name, float("nan"))
        if name in inside and name != LOOP:
            row.gradient_seconds = min(inside[name].rounds[1:])
            if "bare products" in timings:
                row.of_bound = timings["bare products"].best / row.gradient_seconds
        if name in peaks:
            row.memory = peaks[name]
            row.memory_ratio = peaks[name] / peaks[names[1]]
        if case.plan and name in ("handgrad", LEAN):
            plan = make_plan(**case.plan, recompute="blocks" if name == LEAN else "none", update_inside=name == LEAN)
            row.predicted_seconds = predict(plan, size.measure_seconds)
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


def _peak_in_a_process(scenario: str, case: str, contender: str, size: Size) -> int:
    code = f"from bench.scenarios import show_peak; show_peak({scenario!r}, {case!r}, {contender!r}, {size.name!r})"
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
        raise HandgradError(f"{contender} could not show its memory: {finetuning.last_line(done.stderr)}")
    bytes_above = int(json.loads(done.stdout.splitlines()[-1]))
    if bytes_above <= 0:
        raise HandgradError(
            f"{scenario}, {case}, {contender}: no memory of the step can be seen; the case is too small"
        )
    return bytes_above


def show_peak(scenario: str, case_name: str, contender: str, size: str) -> None:
    """Run in a separate process: the bytes of a step at its peak, above weights and optimizer state."""
    # A case only describes its contenders: no model exists yet.
    case = next(case for case in CASES[scenario](SIZES[size]) if case.name == case_name)
    recipe = SIZES[size].recipe
    small = batch_of(recipe.n_vocab, 2, 8)
    for warm in (Hand(hg.GPT(recipe), *small), Eager(hg.GPT(recipe), *small)):  # the libraries load what they need once
        warm.gradients()
        warm.update()
    nothing = resident()
    competitor = case.make[contender]()

    def step() -> None:
        competitor.gradients()
        competitor.update()

    step()  # the optimizer's state exists from now on
    print(json.dumps(peak_during(step) - nothing - competitor.lasting_bytes()))


def as_json(rows: list[Row], machine: Machine, size: Size) -> str:
    figures = [{k: (None if v != v else v) for k, v in asdict(row).items()} for row in rows]
    return json.dumps(
        {"size": size.name, "machine": asdict(machine) | {"busy": machine.busy}, "rows": figures}, indent=1
    )
