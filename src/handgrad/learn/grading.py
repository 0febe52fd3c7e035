"""Judge an answer: run it in the sandbox, compare it with autograd and finite differences, name what is wrong."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..auditing.diagnosis import Diagnosis, diagnose
from ..formatting import plural
from ..ledger.check import RandomInputs
from ..proof.oracles import differentiate, directional_error
from ..sandbox.tensor_client import Limits, Output, Problem, Run, run
from ..tolerances import FINITE_DIFFERENCE_TOLERANCE, NORM_FLOOR, TOLERANCE
from .course import file_text
from .exercise import FUNCTION, Case, Exercise

RANDOM_CASES = 2
LIMIT = TOLERANCE[torch.float64]
MAX_CODE = 20_000  # characters
GENERAL = {  # what is said of a fault before its term, factor or sum is named
    "missing term": "is not complete: one of its terms is missing or doubled, or has the wrong sign or factor",
    "known mistake": "is wrong in a way that is often seen here",
    "factor": "is right up to a constant factor",
    "missing sum": "lacks a sum",
}
SMALL = 20_000  # entries of a case; above, one finite difference checks all gradients together


@dataclass(frozen=True)
class Part:
    """One returned value, in the case in which it is worst."""

    name: str
    state: str  # right, wrong or unwritten
    case: str  # label of the case
    error: float | None  # ‖yours − autograd's‖ relative to its size
    difference: float | None  # disagreement with finite differences; None if they were not taken
    diagnosis: Diagnosis | None  # of a wrong one
    place: tuple[int, ...] | None = None  # of its largest error
    yours: float | None = None  # the entry there
    right: float | None = None

    def said(self, exactly: bool) -> str:
        """The diagnosis. What is said first leaves the term, the factor or the sum to be found."""
        if self.diagnosis is None:
            return ""
        return self.diagnosis.sentence if exactly else GENERAL.get(self.diagnosis.kind, self.diagnosis.sentence)


@dataclass(frozen=True)
class Grade:
    """What the grader found. Exactly one of `problem` and `parts` says something, unless nothing was written yet."""

    exercise: str
    parts: tuple[Part, ...] = ()
    problem: Problem | None = None
    source: str = ""  # the line of the problem
    cases: tuple[str, ...] = ()
    printed: str = ""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return bool(self.parts) and all(part.state == "right" for part in self.parts)

    @property
    def unfinished(self) -> bool:
        """Whether nothing is wrong, but something is not written yet."""
        states = {part.state for part in self.parts}
        return (self.problem is not None and self.problem.kind == "unwritten") or (
            "unwritten" in states and "wrong" not in states
        )

    @property
    def first_wrong(self) -> Part | None:
        """The wrong one to begin with: the values are returned in the order of the forward pass."""
        return next((part for part in reversed(self.parts) if part.state == "wrong"), None)

    def summary(self) -> str:
        if self.problem is not None:
            return "not judged"
        right = sum(part.state == "right" for part in self.parts)
        if self.passed:
            return "right"
        return f"{right} of {plural(len(self.parts), 'gradient')} right"


def grade(
    exercise: Exercise,
    code: str,
    sentence: Case | None = None,
    *,
    seed: int = 0,
    limits: Limits = Limits(),  # noqa: B008
) -> Grade:
    """Judge code that defines `backward`, on random numbers and, if given, on the tensors of a sentence."""
    rng = [RandomInputs(seed + i, exercise.name, {}) for i in range(RANDOM_CASES)]
    cases = [*([sentence] if sentence is not None else []), *(exercise.random(r) for r in rng)]
    labels = tuple(case.label for case in cases)
    if len(code) > MAX_CODE:
        text = f"the answer has {len(code):,} characters; the limit is {MAX_CODE:,}"
        return Grade(exercise.name, problem=Problem("syntax", text), cases=labels)
    if _lines(code) in (_lines(exercise.starter()), _lines(file_text(exercise))):
        return Grade(
            exercise.name, problem=Problem("unwritten", f"nothing is written yet: replace each ... in {FUNCTION}")
        )
    arguments = [line.name for line in exercise.arguments]
    made = run(
        code, FUNCTION, arguments, [case.arguments for case in cases], [case.names for case in cases],
        modules=exercise.importable(), hidden=exercise.hidden(), limits=limits,
    )  # fmt: skip
    if made.problem is not None:
        problem = _explained(made.problem, exercise)
        return Grade(exercise.name, (), problem, _line(code, problem.line), labels, made.printed)
    generator = torch.Generator().manual_seed(seed)
    judged = [list(_judge(case, outputs, generator)) for case, outputs in zip(cases, made.cases, strict=True)]
    return Grade(exercise.name, tuple(_merge(judged)), None, "", labels, made.printed, tuple(_notes(made)))


def _explained(problem: Problem, exercise: Exercise) -> Problem:
    """The problem in words for the reader."""
    texts: dict[str, Callable[[str], str]] = {
        "syntax": lambda m: f"this is not Python: {m}",
        "forbidden": lambda m: f"{m} differentiates for you; write the gradient by hand",
        "missing": lambda m: f"{m}: keep the line {exercise.signature()}",
        "unwritten": lambda m: "backward is not written yet",
        "exception": lambda m: f"it raised {m}",
    }
    in_words = texts.get(problem.kind)
    return problem if in_words is None else Problem(problem.kind, in_words(problem.message), problem.line)


def _lines(code: str) -> list[str]:
    return [line.rstrip() for line in code.strip().splitlines()]


def _line(code: str, number: int | None) -> str:
    lines = code.splitlines()
    return lines[number - 1].strip() if number is not None and 1 <= number <= len(lines) else ""


def _notes(made: Run) -> Iterator[str]:
    for name in made.changed:
        yield f"{FUNCTION} changes its argument {name} in place; another layer may still need it"
    if not made.kernel:
        yield "this system's kernel does not confine the answer's process, so judge only code that you have read"


def _judge(case: Case, outputs: Sequence[Output], generator: torch.Generator) -> Iterator[Part]:
    """Judge the values returned for one case."""
    expected = dict(zip(case.leaves, differentiate(case.f, *case.leaves.values(), upstream=case.upstream), strict=True))
    floor = NORM_FLOOR * max(float(x.norm()) for x in expected.values())
    together = sum(x.numel() for x in expected.values()) > SMALL
    shared = _difference(case, {o.name: o.value for o in outputs}, generator, floor) if together else None
    for output in outputs:
        right = expected[output.name]
        if output.value is None:
            yield Part(output.name, "unwritten", case.label, None, None, None)
            continue
        size = max(float(right.norm()), floor)
        found = diagnose(
            output.value, right, LIMIT * size,
            terms=case.terms.get(output.name), mistakes=case.mistakes.get(output.name), scales=case.scales,
            unsummed=case.unsummed.get(output.name),
        )  # fmt: skip
        error = float((output.value - right).norm()) / size if output.value.shape == right.shape else math.inf
        difference = shared
        if not together and output.value.shape == right.shape and math.isfinite(error):
            difference = _difference(case, {output.name: output.value}, generator, floor)
        passed = found.right and difference is not None and difference <= FINITE_DIFFERENCE_TOLERANCE
        if found.right and together and shared is None:
            passed = True  # the others are missing or wrong, so all together cannot be checked
        if not passed:
            found = _in_words(found, output, right, error)
        state = "right" if passed else "wrong"
        yield Part(
            output.name, state, case.label, error, difference, None if passed else found, *_worst(output.value, right)
        )


def _in_words(found: Diagnosis, output: Output, right: Tensor, error: float) -> Diagnosis:
    """The diagnosis for a reader who knows the shapes of the task."""
    if output.dtype != "float64" and error <= TOLERANCE.get(getattr(torch, output.dtype), 0.0):
        text = f"is right up to the digits of {output.dtype}: the arguments are float64, so compute in float64"
        return replace(found, kind="dtype", sentence=text)
    if right.ndim == 1:  # a parameter that every token uses
        return replace(found, sentence=found.sentence.replace("over axis 0", "over the tokens (axis 0)"))
    return found


def _difference(
    case: Case, answers: dict[str, Tensor | None], generator: torch.Generator, floor: float
) -> float | None:
    """Disagreement of these gradients with finite differences along one random direction; None if one is missing."""
    leaves = {name: case.leaves[name] for name in answers}
    if any(x is None or x.shape != leaves[name].shape or not torch.isfinite(x).all() for name, x in answers.items()):
        return None
    sizes = [x.numel() for x in leaves.values()]

    def f(flat: Tensor) -> float:
        moved = dict(zip(leaves, torch.split(flat, sizes), strict=True))
        inputs = [moved[name].view_as(x) if name in moved else x for name, x in case.leaves.items()]
        out = case.f(*inputs)
        return float((out if case.upstream is None else out * case.upstream).sum())

    at, claimed = (
        torch.cat([x.reshape(-1) for x in group if x is not None]) for group in (leaves.values(), answers.values())
    )
    with torch.no_grad():
        return directional_error(f, at, claimed, generator, floor)


def _worst(yours: Tensor, right: Tensor) -> tuple[Any, ...]:
    """Place, your entry and the right one where they differ most."""
    if yours.shape != right.shape or not yours.numel():
        return None, None, None
    gap = (yours - right).abs().nan_to_num(nan=math.inf)
    place = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    return place, yours[place].item(), right[place].item()


def _merge(judged: list[list[Part]]) -> Iterator[Part]:
    """For each returned value its worst case: a wrong one, else the largest error. Cases may have different values."""
    order = {"wrong": 2, "unwritten": 1, "right": 0}
    best: dict[str, Part] = {}
    for part in (part for parts in judged for part in parts):
        known = best.get(part.name)
        if known is None or (order[part.state], known.state == "right" and (part.error or 0) > (known.error or 0)) > (
            order[known.state], False,
        ):  # fmt: skip
            best[part.name] = part
    yield from best.values()
