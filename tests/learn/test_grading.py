"""The grader: accepts what is right however it is written, names what is wrong, and survives every answer."""

import pytest
import torch
from answers import RIGHT, WRONG

from handgrad.learn.as_json import exercise_json, grade_json
from handgrad.learn.course import COURSE, file_text, find
from handgrad.learn.grading import MAX_CODE, grade
from handgrad.ledger.check import RandomInputs
from handgrad.proof.oracles import differentiate, relative_error
from handgrad.sandbox.tensor_client import Limits

LINEAR = COURSE["linear"]
QUICK = Limits(cpu=0.3, wall=20.0, memory=300_000_000)


def test_the_course_has_twelve_exercises_from_softmax_to_a_block() -> None:
    names = list(COURSE)
    assert len(names) == 12 and (names[0], names[-1]) == ("softmax", "block"), names
    assert set(RIGHT) == set(COURSE), "tests/learn/answers.py has a right answer to every exercise"
    for exercise in COURSE.values():
        assert len(exercise.hints) >= 3 and exercise.text and exercise_json(exercise)["starter"]


@pytest.mark.parametrize("name", COURSE)
@pytest.mark.some_cases(6)
def test_three_right_answers_pass(name: str) -> None:
    solution, *others = COURSE[name].solution(), *RIGHT[name]
    for i, code in enumerate([solution, *others]):
        made = grade(COURSE[name], code, seed=i)
        assert made.passed, (code, made)
        assert len(made.cases) == 2 and all(part.difference is not None for part in made.parts)


@pytest.mark.parametrize(("name", "code", "value", "kind", "words"), WRONG, ids=[f"{w[0]}-{w[3]}" for w in WRONG])
def test_the_fault_of_a_wrong_answer_is_named(name: str, code: str, value: str, kind: str, words: str) -> None:
    made = grade(COURSE[name], code)
    first = made.first_wrong
    assert not made.passed and not made.unfinished and first is not None, made
    assert first.name == value
    assert first.diagnosis is not None and first.diagnosis.kind == kind and words in first.diagnosis.sentence
    assert [out["name"] for out in grade_json(made)["outputs"] if out["start"]] == [value]


@pytest.mark.parametrize("name", COURSE)
def test_what_was_given_is_not_judged_and_what_is_written_counts(name: str) -> None:
    exercise = COURSE[name]
    for code in (file_text(exercise), exercise.starter(), exercise.starter().replace("\n", "  \r\n")):
        made = grade(exercise, code)
        assert made.unfinished and not made.passed and not made.parts and made.problem is not None
        assert made.problem.message == "nothing is written yet: replace each ... in backward"
    made = grade(exercise, f"{exercise.starter()}\nx = 1\n")
    assert made.unfinished and not made.passed and made.problem is None
    assert all(part.state != "wrong" for part in made.parts)


def test_what_is_said_first_leaves_the_term_to_be_found() -> None:
    for name, code, value, kind, words in WRONG:
        part = next(part for part in grade(COURSE[name], code).parts if part.name == value)
        assert words in part.said(exactly=True)
        gives_away = kind in ("missing term", "known mistake", "factor", "missing sum")
        assert (words not in part.said(exactly=False)) == gives_away, (name, kind)


def test_parts_are_judged_separately() -> None:
    made = grade(LINEAR, "def backward(delta, a, w):\n    return ..., a.t() @ delta, delta.sum(1)\n")
    assert [part.state for part in made.parts] == ["unwritten", "right", "wrong"]
    assert not made.unfinished and made.summary() == "1 of 3 gradients right"


def test_terms_and_mistakes_are_what_they_say() -> None:
    """The named terms of an expected gradient add up to it, and no named mistake equals it."""
    for exercise in COURSE.values():
        case = exercise.random(RandomInputs(3, exercise.name, {}))
        right = dict(
            zip(case.leaves, differentiate(case.f, *case.leaves.values(), upstream=case.upstream), strict=True)
        )
        for name, terms in case.terms.items():
            parts = list(terms.values())
            together = {"attention": parts[:3], "block": parts[:2]}.get(exercise.name, parts)
            assert relative_error(torch.stack(together).sum(0), right[name]) < 1e-12, (exercise.name, name)
        for name, mistakes in case.mistakes.items():
            for mistake, value in mistakes.items():
                assert value.shape == right[name].shape, (exercise.name, mistake)
                assert relative_error(value, right[name]) > 1e-4, (exercise.name, mistake)
        for name, value in case.unsummed.items():
            assert relative_error(value.sum(0), right[name]) < 1e-12, (exercise.name, name)


@pytest.mark.parametrize(
    ("body", "kind", "words", "line"),
    [
        ("    while True: pass", "time", "takes too long", None),
        ("    x = []\n    while True: x.append(bytearray(10**9))", "memory", "300 MB", None),
        ("    import torch\n    return torch.zeros(10**12), a, w", "memory", "300 MB", 3),
        ("    return open('/etc/passwd').read()", "refused", "open() is refused", 2),
        ("    import os", "refused", "import os is refused", 2),
        ("    import socket", "refused", "import socket is refused", 2),
        ("    import torch\n    torch.save(a, 'stolen.pt')", "refused", "torch.save is refused", 3),
        ("    import torch\n    torch.hub.load('a/b', 'c')", "refused", "torch.hub is refused", 3),
        ("    import torch\n    torch.os.remove('precious.txt')", "refused", "torch.os is refused", 3),
        (
            "    print.__globals__['os'].remove('precious.txt')",
            "refused",
            "os.remove is refused: an answer uses no files",
            2,
        ),
        ("    print.__globals__['os'].fork()", "refused", "no other programs", 2),
        ("    print.__globals__['os'].mkfifo('left')", "refused", "os.mkfifo is refused", 2),
        ("    print.__globals__['signal'].setitimer(2, 0)", "refused", "signal.setitimer is refused", 2),
        ("    print.__globals__['os']._exit(0)", "exit", "ended its process", None),
        ("    raise SystemExit(0)", "exit", "ended its process", 2),
        ("    return delta @", "syntax", "not Python", 2),
        ("    return delta @ w", "exception", "shapes cannot be multiplied", 2),
        ("    return delta", "returned", "instead of 3 values: delta_prev, grad_w, grad_b", None),
        ("    return delta, 1.5, a", "returned", "grad_w is a float", None),
        ("    return delta, a, w, w", "returned", "4 values instead of 3", None),
        ("    a.requires_grad_()", "forbidden", "differentiates for you", 2),
        ("    import torch\n    torch.nn.functional.log_softmax_backward(a)", "forbidden", "by hand", 3),
        ("    raise NotImplementedError", "unwritten", "not written yet", 2),
        ("    class E(Exception):\n        def __str__(self): raise self\n    raise E", "exception", "raised E", 4),
        ("    return backward(delta, a, w)", "exception", "RecursionError", 2),
    ],
)
def test_hostile_and_broken_answers_are_reported(
    body: str, kind: str, words: str, line: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = grade(LINEAR, f"def backward(delta, a, w):\n{body}\n", limits=QUICK)
    assert made.problem is not None and not made.passed, made
    assert (made.problem.kind, made.problem.line) == (kind, line), made.problem
    assert words in made.problem.message
    assert grade(LINEAR, RIGHT["linear"][0]).passed, "the next answer is judged as if nothing had happened"


def test_other_answers_that_cannot_be_judged() -> None:
    for code, words in [
        ("def forward(): pass", "no function backward"), ("backward = 3", "no function backward"),
        ("x" * (MAX_CODE + 1), "the limit is 20,000"), ("def backward(a): return a", "positional argument"),
        ("((" * 2000, "nested"), ("def backward(\0): pass", "null"), ("", "no function backward"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ]:  # fmt: skip
        made = grade(LINEAR, code, limits=QUICK)
        assert made.problem is not None and words in made.problem.message, made


def test_shapes_types_prints_and_changed_arguments() -> None:
    made = grade(LINEAR, "def backward(delta, a, w):\n    return delta, (a.t() @ delta).float(), delta.sum(0)[None]\n")
    kinds = {part.name: part.diagnosis.kind for part in made.parts if part.diagnosis is not None}
    assert kinds == {"delta_prev": "shape", "grad_w": "dtype", "grad_b": "shape"}
    noisy = (
        "print('here', 7)\ndef backward(delta, a, w):\n    print('x' * 10**6)\n    delta *= 2\n    return delta, a, w\n"
    )
    made = grade(LINEAR, noisy)
    assert made.printed.startswith("here 7\nxxx") and len(made.printed) <= Limits().printed
    assert "changes its argument delta" in made.notes[0]


def test_an_unknown_exercise_has_a_suggestion() -> None:
    with pytest.raises(ValueError, match="did you mean layernorm"):
        find("layernrom")
