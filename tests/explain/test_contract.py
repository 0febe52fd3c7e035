"""What the server sends is what json_types declares. What the page reads is declared, too: page_fixtures.py records every
field that the JavaScript reads in any test of the page."""

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints, is_typeddict
from urllib.parse import urlencode

import pytest
from contract import options, problems, undeclared
from test_server import call
from tiny_session import LLAMA, TEXT, make_session

from handgrad.explain_page.export import answers
from handgrad.explain_page.json_types import common, course, model, patching, questions, station
from handgrad.explain_page.page_files import asset, served
from handgrad.explain_page.routes import ROUTES, Route
from handgrad.explain_page.server import Server
from handgrad.learn.course import COURSE

TYPES = [
    x
    for module in (common, course, model, patching, questions, station)
    for x in vars(module).values()
    if is_typeddict(x)
]


def requests(stations: list[dict[str, Any]], id: str, other: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A request of every route, and of every kind of answer that it has."""
    for name in ("table", "progress", "learn"):
        yield name, {}
    for name in ("overview", "flow", "heads", "effects", "attribution", "proofs"):
        yield name, {"id": id}
    for s in (x["id"] for x in stations):
        yield "station", {"id": id, "station": s}
        yield "proof", {"id": id, "station": s}
    yield "lens", {"id": id, "station": "a_1"}
    yield "compare", {"id": id, "other": other}
    yield "compare", {"id": id, "other": other, "station": "blocks.0.a_5"}
    yield "patch-map", {"id": id, "other": other}
    yield "patch-map", {"id": id, "other": other, "of": "a_5"}
    yield "patch", {"id": id, "other": other, "block": 1, "of": "a_3", "head": 1, "position": 2}
    yield "head", {"id": id, "block": 0, "head": 0}
    yield "neurons", {"id": id, "block": 0, "position": 2}
    yield "swaps", {"id": id, "position": 3}
    yield "token", {"text": "x"}
    yield "download", {}
    for error in (0, 1):
        yield "what-if", {"id": id, "kind": "skip", "block": 0, "edge": "5", "error": error}
    for name in ("blocks.0.a_3", "a_0", "blocks.0.delta_5"):
        yield "follow", {"id": id, "name": name, "row": 0, "column": 0}
    for name in ("slice", "value"):
        yield name, {"id": id, "name": "a_11", "rows": "0:2", "columns": "0:3"}
    yield "matrix", {"id": id, "name": "a_11", "rows": "0,1"}
    yield "sentence", {"text": TEXT, "objective": {"kind": "difference", "position": 3, "against": "x"}}
    yield "predict", {"text": TEXT}
    yield "step", {"id": id, "lr": 0.01}
    yield "learn/shown", {"exercise": "loss", "what": "hint"}
    for code in (COURSE["loss"].solution(), "import os", "def delta(a): return a"):
        yield "learn/grade", {"id": id, "exercise": "loss", "code": code}


@pytest.mark.parametrize("shape", [{}, {**LLAMA, "lora": 2}], ids=["gpt2", "llama with adapters"])
@pytest.mark.some_cases(3)
def test_every_answer_is_what_is_declared(
    shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDGRAD_DATA", str(tmp_path))
    session = make_session(**shape)
    session.download = lambda: None
    asked, wrong, made = set(), [], Server(session)
    with made:
        stations = call(made, "GET", "/api/table")[1]["stations"]
        id, other = (call(made, "POST", "/api/sentence", {"text": text})[1]["id"] for text in (TEXT, "to be or"))
        for name, given in requests(stations, id, other):
            route = ROUTES[name]
            path = f"/api/{name}" + ("" if route.post else f"?{urlencode(given)}")
            status, found, _ = call(made, "POST" if route.post else "GET", path, given if route.post else None)
            assert status == 200, (path, found)
            wrong += problems(found, route.types["return"], path)
            asked.add(name)
    assert wrong == [] and asked == set(ROUTES)


def test_an_exported_file_has_answers_of_the_routes() -> None:
    session = make_session(n_blocks=1)
    for key, found in answers(session, session.sentence(TEXT)).items():
        if key not in ("steps", "command"):
            name = key.partition("?")[0]
            assert problems(json.loads(json.dumps(found)), ROUTES[name].types["return"], key) == []


def test_a_difference_from_the_declaration_is_found() -> None:
    right = {"id": 3, "word": "x"}
    assert problems(right, common.Word, "word") == []
    for wrong in ({"id": 3}, {**right, "more": 1}, {**right, "id": "3"}, {**right, "id": None}, [right], None):
        assert len(problems(wrong, common.Word, "word")) == 1
    assert problems([1, None], list[float], "x") and not problems(None, common.Word | None, "x")
    assert not undeclared("station", ["maps", "[]", "picture", "q"]) and not undeclared("proofs", ["a_1", "state"])
    assert undeclared("station", ["maps", "[]", "pictures"]) and undeclared("proofs", ["a_1", "checks"])


def test_every_declared_field_is_read_by_the_page() -> None:
    words = set(re.findall(r"\w+", " ".join(asset(name) for name in served() if name.endswith(".js"))))
    unread = {f"{kind.__name__}.{field}" for kind in TYPES for field in get_type_hints(kind) if field not in words}
    assert unread == {"GradeOutput.difference_limit"}, "sent and never read"  # of `handgrad learn --json`


@pytest.mark.parametrize("route", ROUTES.values(), ids=list(ROUTES))
def test_a_route_declares_its_answer_and_its_parameters(route: Route) -> None:
    declared = [
        kind for answer in options(route.types["return"]) for kind in (answer, *get_args(answer)) if kind in TYPES
    ]
    assert declared, "the return type of the function is not one of json_types"
    assert all(p.annotation is not inspect.Parameter.empty for p in route.parameters())
