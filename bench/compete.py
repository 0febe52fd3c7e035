"""Compare contenders on a case: losses and gradients first, then time in turns, then peak memory."""

import json
import math
import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.plan.estimate import make_plan
from handgrad.plan.timing import predict

from .attempts import Attempts, WrongError, fill_in, problem
from .cases import CASES, COMPILED, LEAST_MEMORY, LOOP, MATMULS, Case, batch_of
from .measure import Timing, peak_during, resident, take_turns, timed_rows
from .peers import Contender, Eager, Hand, HandInBackward, Loop, step
from .process import run_alone
from .row import AUTOCAST, NAN, Row, is_rounded
from .sizes import SIZES, Size

# What rounding to bfloat16 explains: of the loss, relative; of all gradients together, relative error and cosine. Autocast
# also rounds results, and hands them on rounded.
ROUNDED_LOSS = 1e-2
LIMITS = {False: (0.06, 0.999), True: (0.12, 0.995)}  # by whether it is a peer under autocast


def compare(ours: Tensor, reference: Tensor, what: str, tolerance: float = 1e-4) -> float:
    """The relative error; raises if it is larger than rounding."""
    error = relative(ours, reference)
    if not error < tolerance:
        raise WrongError(f"{what}: the results differ by {error:.1e}; not timed")
    return error


def compare_together(found: dict[str, Tensor], expected: dict[str, Tensor], autocast: bool) -> tuple[float, float]:
    """Relative error and cosine of all gradients together; raises if rounding to bfloat16 does not explain them."""
    apart = ours = theirs = dot = 0.0
    for key, grad in found.items():
        x, y = grad.double(), expected[key].double()
        apart, dot = apart + float((x - y).square().sum()), dot + float((x * y).sum())
        ours, theirs = ours + float(x.square().sum()), theirs + float(y.square().sum())
    error, cosine = math.sqrt(apart / theirs), dot / math.sqrt(ours * theirs)
    most, least = LIMITS[autocast]
    if not (error <= most and cosine >= least):
        text = f"relative error {error:.1e} of all gradients, cosine {cosine:.5f}"
        raise WrongError(f"{text}: more than rounding, {most} and {least}; not timed")
    return error, cosine


def relative(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def compete(scenario: str, case: Case, size: Size, attempts: Attempts) -> list[Row]:
    """Compare losses and gradients, time the contenders in turns, and measure each one's peak memory in its own process. A
    contender that fails has no figures."""
    made = attempts.collect(case.make)
    errors = _gradient_errors(case, made, attempts)
    gradients: dict[str, Timing] = {name: Timing() for name in made}
    runs: dict[str, Callable[[], object]] = {
        name: _timed_step(made[name], gradients[name]) for name in attempts.competing(made)
    }
    if case.matmuls is not None and (matmuls := attempts(MATMULS, case.matmuls)) is not None:
        runs[MATMULS] = matmuls.gradients
    timings = take_turns(runs, min(size.rounds, case.rounds), attempts, case.in_a_row)
    del made, runs
    timed_only = (COMPILED, COMPILED + AUTOCAST, LOOP)
    shown = [name for name in case.make if name not in timed_only] if scenario in size.peaks else []
    peaks, unmeasured = _peaks(scenario, case.name, attempts.competing(shown), size, attempts)

    reference = list(case.make)[1]
    names = [*case.make, *([MATMULS] if case.matmuls is not None else [])]
    rows = timed_rows(scenario, case.name, case.tokens, names, timings, reference, attempts)
    for row in rows:
        name, row.note = row.contender, case.note
        row.problem = row.problem or unmeasured.get(name, "")
        row.gradient_error, row.cosine = errors.get(name, (NAN, NAN))
        if name in timings and name in gradients and name != LOOP:
            row.gradient_seconds = min(gradients[name].rounds[1:])
            if MATMULS in timings and not row.is_rounded:
                row.mfu = timings[MATMULS].best / row.gradient_seconds
        if name in peaks:
            row.memory = peaks[name]
            row.memory_ratio = peaks[name] / peaks[reference] if reference in peaks else NAN
        if case.plan and name in ("handgrad", LEAST_MEMORY):
            fill_in(row, partial(_predict, row, case, size))
    return rows


def _predict(row: Row, case: Case, size: Size) -> None:
    """Fill in what handgrad plan says of this step."""
    least = row.contender == LEAST_MEMORY
    plan = make_plan(**case.plan, recompute="blocks" if least else "none", update_inside=least)
    row.predicted_seconds = predict(plan, size.measure_seconds)
    row.predicted_memory = plan.bytes_peak - plan.bytes_weights - plan.bytes_optimizer


def _gradient_errors(case: Case, made: dict[str, Contender], attempts: Attempts) -> dict[str, tuple[float, float]]:
    """The largest relative error of each contender's gradients against the second's, and NaN; of those that round to
    bfloat16 the relative error and the cosine of all gradients together against the first's. One whose results differ
    leaves. Without the second, nothing is compared."""
    first, reference = list(case.make)[:2]
    losses = {name: attempts(name, contender.gradients) for name, contender in made.items()}
    if reference not in attempts.competing(made):
        return {}
    expected, expected_loss = made[reference].named_gradients(), losses[reference]
    limits = dict.fromkeys(expected, case.tolerance)
    if case.exact is not None:  # both round: compare with exact gradients, and allow twice the error of the reference
        rounded, exact = expected, case.exact()
        exact.gradients()
        expected = exact.named_gradients()
        limits = {key: max(case.tolerance, 2 * relative(grad, expected[key])) for key, grad in rounded.items()}

    def error_of(name: str) -> tuple[float, float] | None:
        loss, contender = losses[name], made[name]
        assert loss is not None and expected_loss is not None
        tolerance = ROUNDED_LOSS if is_rounded(name) else case.tolerance
        if not abs(loss - expected_loss) <= tolerance * abs(expected_loss):
            raise WrongError(f"its loss is {loss}, that of {reference} {expected_loss}; not timed")
        if isinstance(contender, HandInBackward | Loop):
            return None  # its gradients are freed or clipped; tests compare its parameters
        found = contender.named_gradients()
        if set(found) != set(expected):
            missing = ", ".join(sorted(set(found) ^ set(expected)))
            raise WrongError(f"gradients without a counterpart: {missing}")
        if is_rounded(name):
            exactly = made[first].named_gradients() if first in attempts.competing(made) else expected
            return compare_together(found, exactly, name.endswith(AUTOCAST))
        return max(compare(grad, expected[key], key, limits[key]) for key, grad in found.items()), NAN

    return attempts.collect({name: partial(error_of, name) for name in attempts.competing(made)})


def _timed_step(contender: Contender, gradients: Timing) -> Callable[[], None]:
    def timed() -> None:
        start = time.perf_counter()
        contender.gradients()
        gradients.rounds.append(time.perf_counter() - start)
        contender.update()

    return timed


# ── peak memory ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _peaks(
    scenario: str, case: str, names: list[str], size: Size, attempts: Attempts
) -> tuple[dict[str, int], dict[str, str]]:
    """Peak memory of each contender, or the problem that prevented its measurement. Its time stays valid."""
    peaks, unmeasured = {}, {}
    for name in names:
        attempts.tell(name, 1.0)
        try:
            peaks[name] = _peak_in_own_process(scenario, case, name, size)
        except (HandgradError, OSError, ValueError) as reason:
            unmeasured[name] = problem(reason)
    return peaks, unmeasured


def _peak_in_own_process(scenario: str, case: str, contender: str, size: Size) -> int:
    code = f"from bench.compete import show_peak; show_peak({scenario!r}, {case!r}, {contender!r}, {size.name!r})"
    # Peers run with the default memory settings of torch and the C library, not with those of handgrad's commands.
    if contender.startswith("handgrad"):
        code, defaults = f"import handgrad; handgrad.configure_runtime(); {code}", {}
    else:
        defaults = {"THP_MEM_ALLOC_ENABLE": "0"}
    shown, _ = run_alone("measuring memory", code, environment=defaults)
    bytes_above = int(json.loads(shown.splitlines()[-1]))
    if bytes_above <= 0:
        raise HandgradError("the step's memory is too small to measure")
    return bytes_above


def show_peak(scenario: str, case_name: str, contender: str, size: str) -> None:
    """Print the peak bytes of a step above weights and optimizer state. Runs in a separate process."""
    # no model exists yet: a case only describes its contenders
    case = next(case for case in CASES[scenario](SIZES[size]) if case.name == case_name)
    recipe = SIZES[size].recipe
    small = batch_of(recipe.n_vocab, 2, 8)
    for low in (False, True) if is_rounded(contender) else (False,):  # load libraries and their workspaces
        step(Hand(hg.GPT(recipe), *small, mixed=low))
        step(Eager(hg.GPT(recipe), *small, autocast=low))
    case.before()
    baseline = resident()
    competitor = case.make[contender]()
    step(competitor)  # creates the optimizer state
    print(json.dumps(peak_during(partial(step, competitor)) - baseline - competitor.lasting_bytes()))
