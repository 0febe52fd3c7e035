"""The exercises' part of the server: the course, judging an answer, counting hints.

An answer is code. It runs in the sandbox's process, never here, only when the page asks, and the page must send the key that
only a page of this server can read.
"""

import secrets
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ..errors import HandgradError
from ..learn.as_json import exercise_json, grade_json
from ..learn.course import COURSE, find
from ..learn.grading import MAX_CODE, grade
from ..learn.progress import Entry, Progress
from .exercises import case_of, offered_at
from .session import Session

KEY_HEADER = "X-Handgrad-Key"
RANDOM_ONLY = "this model has no such layer, so the answer was judged on random numbers only"


class GradeRequest(BaseModel):
    id: str
    exercise: str
    code: str
    station: str = ""


class ShownRequest(BaseModel):
    exercise: str
    what: Literal["hint", "solution"]


def course_view(session: Session, progress: dict[str, Entry], key: str) -> dict[str, Any]:
    """All exercises with the stations that offer them. Without a key, as in the exported file, answers are not judged."""
    offered = {s.id: offered_at(s, session.model) for s in session.stations}
    exercises = [
        {
            **exercise_json(exercise),
            "stations": [id for id, names in offered.items() if exercise.name in names],
            "progress": asdict(progress.get(exercise.name, Entry())),
        }
        for exercise in COURSE.values()
    ]
    return {"key": key, "grading": bool(key), "max_code": MAX_CODE, "exercises": exercises}


def add_routes(
    app: FastAPI, session: Session, compute: Callable[..., Awaitable[Any]], answer: Callable[[Any], Any]
) -> None:
    """compute   runs a function on the thread that uses the model
    answer    makes a response of JSON"""
    key = secrets.token_urlsafe(24)
    progress = Progress()
    judging = threading.Lock()

    def check(request: Request) -> None:
        if not secrets.compare_digest(request.headers.get(KEY_HEADER, "").encode(), key.encode()):
            raise HTTPException(403, "the key of this page is missing or old: reload the page")

    @app.get("/api/learn")
    async def course() -> Any:
        return answer(course_view(session, await run_in_threadpool(progress.read), key))

    @app.post("/api/learn/grade")
    async def judge(body: GradeRequest, request: Request) -> Any:
        check(request)
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
    async def shown(body: ShownRequest, request: Request) -> Any:
        check(request)
        change = progress.hint_shown if body.what == "hint" else progress.solution_shown
        try:
            return answer(asdict(await run_in_threadpool(change, find(body.exercise))))
        except OSError as reason:
            raise HandgradError(f"progress was not saved: {reason}") from None
