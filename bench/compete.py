"""Compare contenders on a case: losses and gradients first, then time in turns, then peak memory."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from torch import Tensor

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.plan.estimate import make_plan
from handgrad.plan.timing import predict

from .cases import CASES, COMPILED, LEAST_MEMORY, LOOP, Case, Row, batch_of
from .measure import Timing, Watch, peak_during, resident, take_turns
from .peers import Contender, Eager, Hand, HandInBackward, Loop
from .process import ROOT, last_line
from .sizes import SIZES, Size

MATMULS = "matmuls only"


def compare(ours: Tensor, reference: Tensor, what: str) -> float:
    """The relative error; raises if it is larger than rounding."""
    error = ((ours.double() - reference.double()).norm() / reference.double().norm()).item()
    if not error < 1e-4:
        raise HandgradError(f"{what}: the gradients differ by {error:.1e}; nothing is timed")
    return error


def compete(scenario: str, case: Case, size: Size, watch: Watch) -> list[Row]:
    """Compare losses and gradients, time the contenders in turns, and measure each one's peak memory in its own process."""
    made = {name: make() for name, make in case.make.items()}
    names = list(made)
    errors = _gradient_errors(f"{scenario}, {case.name}", made)
    gradients: dict[str, Timing] = {name: Timing() for name in made}
    runs: dict[str, Callable[[], object]] = {}
    for name, contender in made.items():
        runs[name] = _timed_step(contender, gradients[name])
    if case.matmuls is not None:
        runs[MATMULS] = case.matmuls().gradients
    rounds = min(size.rounds, case.rounds)
    timings = take_turns(runs, rounds, watch, in_a_row=10 if case.tokens < 1000 and rounds > 20 else 1)
    del made, runs
    shown = [name for name in case.make if name not in (COMPILED, LOOP)] if scenario in size.peaks else []
    peaks = {name: _peak_in_own_process(scenario, case.name, name, size) for name in shown}

    rows = []
    for name, timing in timings.items():
        ratio = timings[names[1]].best / timing.best
        row = Row(scenario, case.name, name, case.tokens, timing.best, timing.median, ratio, note=case.note)
        row.gradient_error = errors.get(name, float("nan"))
        if name in gradients and name != LOOP:
            row.gradient_seconds = min(gradients[name].rounds[1:])
            if MATMULS in timings:
                row.mfu = timings[MATMULS].best / row.gradient_seconds
        if name in peaks:
            row.memory = peaks[name]
            row.memory_ratio = peaks[name] / peaks[names[1]]
        if case.plan and name in ("handgrad", LEAST_MEMORY):
            plan = make_plan(
                **case.plan, recompute="blocks" if name == LEAST_MEMORY else "none", update_inside=name == LEAST_MEMORY
            )
            row.predicted_seconds = predict(plan, size.measure_seconds)
            row.predicted_memory = plan.bytes_peak - plan.bytes_weights - plan.bytes_optimizer
        rows.append(row)
    return rows


def _gradient_errors(case: str, made: dict[str, Contender]) -> dict[str, float]:
    """The largest relative error of each contender's gradients against the second's. Raises if results differ."""
    losses = {name: contender.gradients() for name, contender in made.items()}
    reference_loss = list(losses.values())[1]
    reference = list(made.values())[1].named_gradients()
    errors: dict[str, float] = {}
    for name, contender in made.items():
        if not abs(losses[name] - reference_loss) <= 1e-4 * abs(reference_loss):
            raise HandgradError(f"{case}: losses differ: {losses}; nothing is timed")
        if isinstance(contender, HandInBackward | Loop):
            continue  # its gradients are freed or clipped; tests compare its parameters
        found = contender.named_gradients()
        if set(found) != set(reference):
            missing = ", ".join(sorted(set(found) ^ set(reference)))
            raise HandgradError(f"{case}, {name}: gradients without a counterpart: {missing}")
        errors[name] = max(compare(grad, reference[key], f"{case}, {name}, {key}") for key, grad in found.items())
    return errors


def _timed_step(contender: Contender, gradients: Timing) -> Callable[[], None]:
    def step() -> None:
        start = time.perf_counter()
        contender.gradients()
        gradients.rounds.append(time.perf_counter() - start)
        contender.update()

    return step


def _peak_in_own_process(scenario: str, case: str, contender: str, size: Size) -> int:
    code = f"from bench.compete import show_peak; show_peak({scenario!r}, {case!r}, {contender!r}, {size.name!r})"
    # Peers run with the default memory settings of torch and the C library, not with handgrad's (handgrad/machine.py).
    defaults = {} if contender in ("handgrad", LEAST_MEMORY) else {"MALLOC_PERTURB_": "0", "THP_MEM_ALLOC_ENABLE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | defaults,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise HandgradError(f"{contender} failed while its memory was measured: {last_line(done.stderr)}")
    bytes_above = int(json.loads(done.stdout.splitlines()[-1]))
    if bytes_above <= 0:
        raise HandgradError(f"{scenario}, {case}, {contender}: the step's memory is too small to measure")
    return bytes_above


def show_peak(scenario: str, case_name: str, contender: str, size: str) -> None:
    """Print the peak bytes of a step above weights and optimizer state. Runs in a separate process."""
    # no model exists yet: a case only describes its contenders
    case = next(case for case in CASES[scenario](SIZES[size]) if case.name == case_name)
    recipe = SIZES[size].recipe
    small = batch_of(recipe.n_vocab, 2, 8)
    for warm in (Hand(hg.GPT(recipe), *small), Eager(hg.GPT(recipe), *small)):  # load libraries and their workspaces
        warm.gradients()
        warm.update()
    baseline = resident()
    competitor = case.make[contender]()

    def step() -> None:
        competitor.gradients()
        competitor.update()

    step()  # creates the optimizer state
    print(json.dumps(peak_during(step) - baseline - competitor.lasting_bytes()))
