"""The exercises' part of the server: the course, judging an answer, counting hints.

An answer is code. It runs in the sandbox's processes, never here, and only when a page asks that has the server's key.
"""

import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ..errors import HandgradError
from ..learn.as_json import exercise_json, grade_json
from ..learn.course import COURSE, find
from ..learn.grading import MAX_CODE, grade
from ..learn.progress import Entry, Progress
from ..sandbox.tensor_client import confined_by_kernel
from .exercises import case_of, offered_at
from .session import Session

CONFINED = "The kernel lets its process do nothing but compute: no files, no network, no other programs."
LIMITED = (
    "Its process has no files and no network, but this system cannot keep a program in that is written to break out: run\
 only code that you have read."
)
RANDOM_ONLY = "this model has no such layer, so the answer was judged on random numbers only"


class GradeRequest(BaseModel):
    id: str
    exercise: str
    code: str
    station: str = ""


class ShownRequest(BaseModel):
    exercise: str
    what: Literal["hint", "solution"]


def course_view(session: Session, progress: dict[str, Entry], grading: bool) -> dict[str, Any]:
    """All exercises with the stations that offer them. In the exported file, answers are not judged."""
    offered = {s.id: offered_at(s, session.model) for s in session.stations}
    exercises = [
        {
            **exercise_json(exercise),
            "stations": [id for id, names in offered.items() if exercise.name in names],
            "progress": asdict(progress.get(exercise.name, Entry())),
        }
        for exercise in COURSE.values()
    ]
    confinement = CONFINED if confined_by_kernel() else LIMITED
    return {"grading": grading, "max_code": MAX_CODE, "confinement": confinement, "exercises": exercises}


def add_routes(
    app: FastAPI, session: Session, compute: Callable[..., Awaitable[Any]], answer: Callable[[Any], Any]
) -> None:
    """compute   runs a function on the thread that uses the model
    answer    makes a response of JSON"""
    progress = Progress()
    judging = threading.Lock()

    @app.get("/api/learn")
    async def course() -> Any:
        return answer(course_view(session, await run_in_threadpool(progress.read), grading=True))

    @app.post("/api/learn/grade")
    async def judge(body: GradeRequest) -> Any:
        exercise = find(body.exercise)
        station = session.by_id.get(body.station)
        if not judging.acquire(blocking=False):
            raise HTTPException(429, "another answer is being judged: wait for it")
        try:
            case = await compute(lambda: case_of(session, session.find(body.id), exercise, station))
            made = await run_in_threadpool(grade, exercise, body.code, case)
        finally:
            judging.release()
        found = {**grade_json(made), "note_on_case": "" if case is not None else RANDOM_ONLY}
        try:
            entry = await run_in_threadpool(progress.judged, exercise, body.code, made)
        except (HandgradError, OSError) as reason:  # the judgement is worth more than its record
            entry = Entry()
            found["notes"].append(f"progress was not saved: {reason}")
        return answer({**found, "progress": asdict(entry)})

    @app.post("/api/learn/shown")
    async def shown(body: ShownRequest) -> Any:
        change = progress.hint_shown if body.what == "hint" else progress.solution_shown
        try:
            return answer(asdict(await run_in_threadpool(change, find(body.exercise))))
        except OSError as reason:
            raise HandgradError(f"progress was not saved: {reason}") from None
