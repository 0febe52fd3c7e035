"""The exercises on the page: the course, judging an answer, counting hints.

An answer is code. It runs in the sandbox's processes, never here, and only when a page asks that has the server's key.
"""

import threading
from dataclasses import asdict
from typing import Literal, cast

from ..errors import HandgradError
from ..learn.as_json import exercise_json, grade_json
from ..learn.course import COURSE, find
from ..learn.grading import MAX_CODE, grade
from ..learn.progress import EXACT_AFTER, Entry, Progress
from ..sandbox.tensor_client import confined_by_kernel
from .exercises import case_of, offered_at
from .json_types.course import Course, ExerciseProgress, Grade, TaskPart
from .presentation.plain_math import formulas
from .session.session import Session, TracedSentence

CONFINED = "The kernel lets its process do nothing but compute: no files, no network, no other programs."
LIMITED = (
    "Its process has no files and no network, but this system cannot keep a program in that is written to break out: run\
 only code that you have read."
)
RANDOM_ONLY = "this model has no such layer, so the answer was judged on random numbers only"


class BusyError(HandgradError):
    """Another request has to end first."""


class Judge:
    """Judges one answer at a time, and remembers what was solved."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.judging = threading.Lock()


def course(session: Session, judge: Judge) -> Course:
    return course_view(session, judge.progress.read(), grading=True)


def course_view(session: Session, progress: dict[str, Entry], grading: bool) -> Course:
    """All exercises with the stations that offer them. In the exported file, answers are not judged."""
    offered = {s.id: offered_at(s, session.model) for s in session.stations}
    exercises = [
        {
            **exercise_json(exercise),
            "task": [_part(text) for text in exercise.paragraphs()],
            "stations": [id for id, names in offered.items() if exercise.name in names],
            "progress": asdict(progress.get(exercise.name, Entry())),
        }
        for exercise in COURSE.values()
    ]
    confinement = CONFINED if confined_by_kernel() else LIMITED
    made = {
        "grading": grading,
        "max_code": MAX_CODE,
        "confinement": confinement,
        "exact_after": EXACT_AFTER,
        "exercises": exercises,
    }
    return cast(Course, made)


def _part(text: str) -> TaskPart:
    """A paragraph of a task; formulas, which are indented, as MathML."""
    return {"text": "", "math": formulas(text)} if text.startswith(" ") else {"text": text, "math": []}


def grade_answer(
    session: Session, judge: Judge, sentence: TracedSentence, exercise: str, code: str, station: str = ""
) -> Grade:
    """Judge an answer on the tensors of the sentence at a station, or on random numbers if the model has no such layer."""
    chosen = find(exercise)
    if not judge.judging.acquire(blocking=False):
        raise BusyError("another answer is being judged: wait for it")
    try:
        case = case_of(session, sentence, chosen, session.by_id.get(station))
        made = grade(chosen, code, case)
    finally:
        judge.judging.release()
    notes = []
    try:
        entry = judge.progress.judged(chosen, code, made)
    except (HandgradError, OSError) as reason:  # the judgment is worth more than its record
        entry = Entry()
        notes = [f"progress was not saved: {reason}"]
    found = grade_json(made)
    found["notes"] += notes
    return cast(Grade, {**found, "note_on_case": "" if case is not None else RANDOM_ONLY, "progress": asdict(entry)})


def shown(judge: Judge, exercise: str, what: Literal["hint", "solution"]) -> ExerciseProgress:
    """Count a hint or a solution that was shown."""
    change = judge.progress.hint_shown if what == "hint" else judge.progress.solution_shown
    try:
        return cast(ExerciseProgress, asdict(change(find(exercise))))
    except OSError as reason:
        raise HandgradError(f"progress was not saved: {reason}") from None
