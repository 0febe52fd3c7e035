"""The exercises of the page: the course, judging on this sentence's tensors, and who may ask for it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_server import JSON, call, sentence
from tiny_session import LLAMA, TEXT, make_session

from handgrad.explain_page.exercises import case_of, offered_at
from handgrad.explain_page.export import export
from handgrad.explain_page.server import Server
from handgrad.learn.course import COURSE
from handgrad.learn.grading import grade


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANDGRAD_DATA", str(tmp_path_factory.mktemp("data")))
        made = Server(make_session(n_blocks=1))
    with made:
        yield made


def course(server: Server) -> dict[str, Any]:
    status, found, _ = call(server, "GET", "/api/learn")
    assert status == 200
    return found


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    return call(server, "POST", f"/api/learn/{path}", body)[:2]


def test_the_course_with_its_stations(server: Server) -> None:
    found = course(server)
    assert [e["name"] for e in found["exercises"]] == list(COURSE) and found["grading"]
    stations = {e["name"]: e["stations"] for e in found["exercises"]}
    assert stations["layernorm"] == ["blocks.0.a_2", "blocks.0.a_6", "a_11"] and stations["rmsnorm"] == []
    assert stations["softmax"] == ["blocks.0.a_3"] and stations["loss"] == ["loss"] and "a_12" in stations["linear"]


def test_an_answer_is_judged_on_this_sentence_and_remembered(server: Server) -> None:
    id = sentence(server)["id"]
    wrong = (
        "def backward(delta, a_bar, sigma, w):\n    return delta * w / sigma[:, None], (a_bar * delta).sum(0), delta\n"
    )
    status, found = post(server, "grade", {"id": id, "exercise": "layernorm", "code": wrong, "station": "blocks.0.a_6"})
    assert status == 200 and not found["passed"] and found["summary"] == "1 of 3 gradients right"
    assert (
        found["cases"][0] == "this sentence, block 1, a₆" and len(found["cases"]) == 3 and found["note_on_case"] == ""
    )
    by_name = {out["name"]: out for out in found["outputs"]}
    assert by_name["grad_b"]["kind"] == "missing sum" and by_name["grad_b"]["start"]
    assert by_name["delta_prev"]["place"] and by_name["grad_w"]["state"] == "right"
    solution = COURSE["layernorm"].solution()
    status, found = post(server, "grade", {"id": id, "exercise": "layernorm", "code": solution})
    assert status == 200 and found["passed"] and found["progress"]["attempts"] == 2 and found["progress"]["solved"]
    stored = {e["name"]: e["progress"] for e in course(server)["exercises"]}["layernorm"]
    assert stored["code"] == solution and stored["solved"] == found["progress"]["solved"]
    status, shown = post(server, "shown", {"exercise": "layernorm", "what": "hint"})
    assert status == 200 and shown["hints"] == 1


def test_code_runs_only_for_our_own_page(server: Server) -> None:
    id = sentence(server)["id"]
    body = {"id": id, "exercise": "softmax", "code": "def backward(delta_rho, rho): return rho"}
    elsewhere = {**JSON, "Origin": "http://evil.example"}
    assert call(server, "POST", "/api/learn/grade", body, elsewhere)[0] == 403
    assert post(server, "grade", {**body, "exercise": "nothing"})[0] == 400
    assert post(server, "grade", {**body, "id": "unknown"})[0] == 410
    assert post(server, "grade", {**body, "code": "x" * 70_000})[0] == 413
    status, found = post(server, "grade", {**body, "code": "import os"})
    assert status == 200 and found["problem"]["kind"] == "refused"


@pytest.mark.parametrize("shape", [{}, LLAMA, {"lora": 2}], ids=["gpt2", "llama", "lora"])
@pytest.mark.some_cases(3)
def test_solutions_are_right_on_every_station(shape: dict[str, Any]) -> None:
    session = make_session(**{"n_blocks": 1, **shape})
    traced = session.sentence(TEXT)
    judged = []
    for station in session.stations:
        for name in offered_at(station, session.model):
            case = case_of(session, traced, COURSE[name], station)
            if case is None:
                continue
            made = grade(COURSE[name], COURSE[name].solution(), case)
            assert made.passed and made.cases[0].startswith("this sentence"), (station.id, name, made)
            judged.append(name)
    expected = {"softmax", "loss", "linear", "embedding", "attention"}
    family = {"rmsnorm", "gated", "rotary"} if shape == LLAMA else {"layernorm", "activation", "block"}
    assert set(judged) == expected | family | ({"lora"} if "lora" in shape else set())


def test_an_exercise_without_a_layer_is_judged_on_random_numbers(server: Server) -> None:
    body = {"id": sentence(server)["id"], "exercise": "rmsnorm", "code": COURSE["rmsnorm"].solution()}
    status, found = post(server, "grade", body)
    assert status == 200 and found["passed"] and "random numbers only" in found["note_on_case"]


def test_the_exported_file_has_the_exercises_as_text(tmp_path: Path) -> None:
    page = export(make_session(n_blocks=1), TEXT)
    data = page.partition('id="embedded-answers">')[2].partition("</script>")[0]
    learn = json.loads(data)["learn"]
    assert not learn["grading"] and "key" not in learn and len(learn["exercises"]) == 12
    assert "def backward(" in learn["exercises"][0]["solution"]


def test_a_large_vocabulary_does_not_enlarge_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a file that would be too large has smaller pictures."""
    monkeypatch.setattr("handgrad.explain_page.session.session.LARGE", 0)
    small, large = (len(export(make_session(n_blocks=1, n_vocab=n), TEXT)) for n in (256, 49152))
    assert abs(large - small) < 100_000 and large < 2_000_000
    session = make_session(n_blocks=1, d_model=192)
    whole = len(export(session, TEXT).encode())
    monkeypatch.setattr("handgrad.explain_page.export.MAX_BYTES", whole - 1)
    assert len(export(session, TEXT).encode()) < whole - 10_000
