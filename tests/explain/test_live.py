"""The answers that the browser computes equal Python's, for every route: structure, sentences and numbers."""

import base64
import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from live_requests import Request, requests, sentences
from same_answers import differences
from tiny_session import TEXT, perturb

import handgrad as hg
from conftest import need_node
from handgrad.errors import HandgradError
from handgrad.explain_page.course import Judge, course_view
from handgrad.explain_page.export import bundle
from handgrad.explain_page.json_numbers import as_json
from handgrad.explain_page.live_data import live_data
from handgrad.explain_page.page_files import asset
from handgrad.explain_page.proofs.prover import CheckResults, Prover
from handgrad.explain_page.routes import ROUTES, Served
from handgrad.explain_page.session.session import Session
from handgrad.explain_page.views.overview import table
from handgrad.text import tokenizer

EXACT, SINGLE = 1e-9, 1e-5  # relative differences from Python in float64, which the browser computes in, and in float32
MAIN = (
    "overview", "flow", "station", "head", "heads", "lens", "effects", "follow", "compare", "patch-map", "patch", "slice",
    "value", "swaps",
)  # fmt: skip
KEYS = "each column of Δ_k sums to 0, so "  # why ∂b_k, which nothing computes here, is 0
CHARACTERS = tokenizer.make("chars", ["to be, or not?\nTO BE"])
SHAPES: dict[str, dict[str, Any]] = {
    "nano": {"n_blocks": 2, "scale": 0.1},
    "another form": {
        "n_blocks": 1, "n_heads": 2, "d_rho": 5, "d_head": 7, "causal": False, "tied": False, "logits_bias": True,
        "activation": "relu", "qkv_bias": False, "out_bias": False, "mlp_bias": False, "norm_bias": False, "scale": 0.4,
    },
}  # fmt: skip


def session_of(scale: float, **shape: Any) -> Session:
    small = {"n_vocab": CHARACTERS.n_vocab, "n_context": 20, "d_model": 24, "n_heads": 3, **shape}
    model = hg.GPT(hg.preset("nano", **small), seed=0)
    perturb(model, 0, scale)
    return Session(model, CHARACTERS, "small", "for a test", TEXT)


def answers_of_python(session: Session, asked: list[Request]) -> list[Any]:
    served, found = Served(session, Prover(session), Judge()), []
    for name, given in asked:
        named = {key: found[int(x[1:])]["id"] if str(x).startswith("@") else x for key, x in given.items()}
        if name == "learn":
            found.append(course_view(session, {}, grading=False))
            continue
        if name == "table":
            found.append(json.loads(json.dumps({**table(session), "torch": False})))
            continue
        route = ROUTES[name]
        complete = {p.name: p.default for p in route.parameters()} | named
        try:
            found.append(json.loads(json.dumps(as_json(route.answer(served, complete)))))
        except HandgradError as reason:
            found.append({"error": str(reason)})
    return found


def in_float64(session: Session) -> Session:
    return Session(copy.deepcopy(session.model).double(), CHARACTERS, "small", "for a test", TEXT)


class Asked(NamedTuple):
    """A model with its requests, and the answers that the browser's program gave."""

    session: Session
    requests: list[Request]
    answers: list[Any]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Asked]:
    node, program = need_node(), tmp_path_factory.mktemp("live") / "program.mjs"
    program.write_text(bundle("live/serve.js") + (Path(__file__).parent / "js" / "run_live.js").read_text())
    sessions = {name: session_of(**shape) for name, shape in SHAPES.items()}
    wanted = [requests(session, TEXT) for session in sessions.values()]
    first = len(sentences(TEXT))
    wanted[1] = [r for i, r in enumerate(wanted[1]) if i < first or r[1].get("id", "@0") == "@0"]
    wanted[0] += [("proof", {"id": "@0", "station": s.id}) for s in sessions["nano"].stations]
    models = [{"data": live_data(s), "requests": r} for s, r in zip(sessions.values(), wanted, strict=True)]
    given = json.dumps({"models": models})
    done = subprocess.run([node, str(program)], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = zip(sessions.values(), wanted, json.loads(done.stdout), strict=True)
    return {name: Asked(*one) for name, one in zip(sessions, found, strict=True)}


def compare(asked: Asked, session: Session, tolerance: float) -> list[str]:
    """Where the answers differ from those of Python."""
    theirs = answers_of_python(session, [x for x in asked.requests if x[0] != "proof"])
    return [
        f"{name} {given}: {x}"
        for (name, given), one, other in zip(asked.requests, asked.answers, theirs, strict=False)  # proofs come last
        for x in differences(one, other, tolerance)
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_every_answer_equals_that_of_python(asked: dict[str, Asked], name: str) -> None:
    mine = asked[name]
    assert compare(mine, in_float64(mine.session), EXACT) == []


def test_the_answers_equal_those_of_a_float32_model(asked: dict[str, Asked]) -> None:
    """Adam divides each gradient by its own size, so steps in float32 are compared only of gradient descent."""
    mine = asked["nano"]
    about = [{given.get("id", "@9"), given.get("other", "@0")} for _, given in mine.requests]
    chosen = [
        i for i, (name, _) in enumerate(mine.requests) if i < 6 or (name in MAIN and about[i] <= {"@0", "@4", "@5"})
    ]
    few = Asked(mine.session, [mine.requests[i] for i in chosen], [mine.answers[i] for i in chosen])
    wrong = [x for x in compare(few, mine.session, SINGLE) if "rounding" not in x]  # what is lost to it in each dtype
    assert len(chosen) > 60 and wrong == []


def test_the_checks_are_those_of_python_without_autograd(asked: dict[str, Asked]) -> None:
    mine = asked["nano"]
    session, results = in_float64(mine.session), CheckResults()
    prover, sentence = Prover(session), session.sentence(TEXT)
    for (name, given), proof in zip(mine.requests, mine.answers, strict=True):
        if name != "proof":
            continue
        prover.check_now(sentence, results, session.by_id[given["station"]])
        theirs = [c for c in results.checks[given["station"]] if c["kind"] in ("differences", "identity")]
        assert {c["what"].replace(KEYS, "") for c in proof["checks"]} == {c["what"] for c in theirs}
        assert {c["kind"] for c in proof["checks"]} <= {"differences", "identity"}
        assert proof["state"] == "done" and all(c["error"] <= c["limit"] and c["passed"] for c in proof["checks"])


def test_every_route_is_asked(asked: dict[str, Asked]) -> None:
    """But those that need the server or its oracles."""
    names = {name for name, _ in asked["nano"].requests}
    assert names == ROUTES.keys() - {"progress", "download", "learn/grade", "learn/shown", "proofs"}
    declared = re.findall(r'"([a-z-]+)"', asset("live.js").partition("new Set([")[2].partition("]")[0])
    assert {*declared} == names | {"proofs"}


def test_a_difference_is_found() -> None:
    one = {"value": 2.0, "caption": "‘a’ has ⟦2.0⟧.", "rows": [{"id": 3, "x": 1.0}, {"id": 4, "x": -5.0}]}
    assert differences(one, one, EXACT) == []
    wrong: list[Any] = [
        {**one, "value": 2.0001}, {**one, "caption": "‘b’ has ⟦2.0⟧."}, {**one, "caption": "‘a’ has ⟦2.1⟧."},
        {**one, "rows": one["rows"][:1]}, {**one, "rows": [{"id": 3, "x": 1.0}, {"id": 5, "x": -5.0}]},
        {**one, "more": None}, {**one, "value": None}, {**one, "value": True},
    ]  # fmt: skip
    assert all(differences(x, one, SINGLE) for x in wrong)
    picture = {"pool": [1, 1], "scale": 1.0, "q": base64.b64encode(bytes([127, 50])).decode()}
    for cells, count in (([127, 50], 0), ([127, 51], 0), ([127, 54], 1)):
        other = {**picture, "q": base64.b64encode(bytes(cells)).decode()}
        assert len(differences({"picture": other}, {"picture": picture}, EXACT)) == count
    ranked = [{"neuron": 1, "blame": -0.5}, {"neuron": 0, "blame": 0.5}]
    assert differences({"neurons": ranked}, {"neurons": ranked[::-1]}, EXACT) == []
    late = [{"neuron": 1, "blame": 0.1}, {"neuron": 0, "blame": 0.5}]
    assert differences({"neurons": late}, {"neurons": late[::-1]}, EXACT)
