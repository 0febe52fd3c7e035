"""Answers about checks and exercises: proof, proofs, learn, learn/grade, learn/shown."""

from typing import Literal, TypedDict


class Check(TypedDict):
    what: str
    kind: str
    error: float
    limit: float
    passed: bool


class ProofSummary(TypedDict):
    passed: bool | None
    state: Literal["measuring", "done", "autograd", "failed"]


class Proof(ProofSummary):
    problem: str
    checks: list[Check]


class ExerciseProgress(TypedDict):
    attempts: int
    solved: str
    hints: int
    solution: bool
    code: str
    answer: str  # SHA-256 of the newest right one


class ExerciseLine(TypedDict):
    name: str
    shape: str
    meaning: str


class TaskPart(TypedDict):
    """A paragraph of a task, or lines of formulas."""

    text: str
    math: list[list[str]]  # MathML


class Exercise(TypedDict):
    name: str
    number: int
    title: str
    task: list[TaskPart]
    arguments: list[ExerciseLine]
    returns: list[ExerciseLine]
    starter: str
    hints: list[str]
    solution: str
    page: str
    stations: list[str]
    progress: ExerciseProgress


class Course(TypedDict):
    grading: bool
    max_code: int
    confinement: str
    exact_after: int  # hints
    exercises: list[Exercise]


class GradeProblem(TypedDict):
    """Why an answer gave no result."""

    kind: str
    message: str
    line: int | None
    source: str


class GradeOutput(TypedDict):
    """One returned value of an answer."""

    name: str
    state: str
    start: bool
    case: str
    error: float | None
    limit: float
    difference: float | None
    difference_limit: float
    kind: str
    sentence: str
    general: str
    place: list[int] | None
    yours: float | None
    right: float | None


class Grade(TypedDict):
    exercise: str
    passed: bool
    unfinished: bool
    summary: str
    problem: GradeProblem | None
    outputs: list[GradeOutput]
    cases: list[str]
    printed: str
    notes: list[str]
    note_on_case: str
    progress: ExerciseProgress
