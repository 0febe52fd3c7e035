"""Exercises, grades and progress as JSON, for the page and for `--json`."""

from dataclasses import asdict
from typing import Any

from ..tolerances import FINITE_DIFFERENCE_TOLERANCE
from .course import number
from .exercise import Exercise, Line
from .grading import LIMIT, Grade, Part


def exercise_json(exercise: Exercise) -> dict[str, Any]:
    """The texts of an exercise, without its task."""
    return {
        "name": exercise.name, "number": number(exercise), "title": exercise.title,
        "arguments": _lines(exercise.arguments), "returns": _lines(exercise.returns),
        "starter": exercise.starter(), "hints": list(exercise.hints), "solution": exercise.solution(),
        "page": f"docs/layers/{exercise.page}.md",
    }  # fmt: skip


def _lines(lines: tuple[Line, ...]) -> list[dict[str, str]]:
    return [{"name": x.name, "shape": x.shape, "meaning": x.meaning} for x in lines]


def grade_json(grade: Grade) -> dict[str, Any]:
    problem = None
    if grade.problem is not None:
        problem = {**asdict(grade.problem), "source": grade.source}
    return {
        "exercise": grade.exercise, "passed": grade.passed, "unfinished": grade.unfinished, "summary": grade.summary(),
        "problem": problem, "outputs": [_part(part, part is grade.first_wrong) for part in grade.parts],
        "cases": list(grade.cases), "printed": grade.printed, "notes": list(grade.notes),
    }  # fmt: skip


def _part(part: Part, start: bool) -> dict[str, Any]:
    found = part.diagnosis
    return {
        "name": part.name, "state": part.state, "start": start, "case": part.case,
        "error": part.error, "limit": LIMIT, "difference": part.difference,
        "difference_limit": FINITE_DIFFERENCE_TOLERANCE,
        "kind": found.kind if found else "", "sentence": part.said(exactly=True),
        "general": part.said(exactly=False),
        "place": None if part.place is None else list(part.place), "yours": part.yours, "right": part.right,
    }  # fmt: skip
