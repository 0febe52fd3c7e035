"""The questions that the page answers from a trace: objectives, what if, attribution, and following one number."""

import math
import re
from typing import Any

import pytest
import torch
from tiny_session import LFM2, LLAMA, QWEN3, SCORES, SMOLLM3, TEXT, evaluate, make_session

import handgrad as hg
from conftest import perturb
from handgrad.explain_page.follow.follow import follow
from handgrad.explain_page.proofs.prover import CheckResults, Prover
from handgrad.explain_page.proofs.prover import report as report_of
from handgrad.explain_page.session.objectives import describe, objective_of, token_id
from handgrad.explain_page.session.session import Session, TracedSentence
from handgrad.explain_page.views import attribution as attribution_view
from handgrad.explain_page.views import overview as overview_view
from handgrad.explain_page.views import what_if
from handgrad.explain_page.views.step import take_step

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "qwen3": QWEN3,
    "smollm3": SMOLLM3,
    "lfm2": LFM2,
    "scores": SCORES,
    "lora": {"lora": 2},
}


def traced(shape: str = "gpt2", **objective: Any) -> tuple[Session, TracedSentence]:
    session = make_session(dtype=torch.float64, **SHAPES[shape])
    if shape == "lora":
        perturb(session.model, scale=0.1)
    return session, session.sentence(TEXT, 0, objective_of(session, TEXT, 0, objective))


# ── objectives ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_everything_on_the_page_follows_the_objective() -> None:
    session, plain = traced()
    sentence = session.sentence(TEXT, 0, objective_of(session, TEXT, 0, {"kind": "position", "position": 4}))
    assert sentence.id != plain.id and session.find(sentence.id).objective == hg.PositionLoss(4)
    overview = overview_view.overview(session, sentence)
    assert overview["objective"]["value"] == pytest.approx(overview["losses"][4])
    assert overview["loss"] == pytest.approx(overview_view.overview(session, plain)["loss"])
    assert overview["objective"]["label"] == "the loss of ‘,’, after ‘e’ (position 5)"
    assert not sentence.trace["blocks.0.delta_1"][5:].any()
    step = take_step(session, sentence, 0.01, "SGD")
    assert step["loss"] == pytest.approx(overview["losses"][4])
    assert step["measured"] == pytest.approx(session.find(step["id"]).trace.loss)
    assert session.find(step["id"]).objective == sentence.objective


def test_why_not_this_word() -> None:
    session, plain = traced()
    last = len(plain.ids) - 1
    wanted = {"kind": "difference", "position": last, "against": "zebra"}
    sentence = session.sentence(TEXT, 0, objective_of(session, TEXT, 0, wanted))
    o = describe(session, sentence)
    best = int(plain.trace["a_12"][last].argmax())
    assert o["token"]["id"] == best and o["against"] == {"id": ord("z"), "word": "z"}
    assert o["value"] == pytest.approx((plain.trace["a_12"][last, best] - plain.trace["a_12"][last, ord("z")]).item())
    namespace = {"hg": hg, "model": session.model, "tokens": sentence.tokens, "targets": sentence.targets}
    assert torch.equal(eval(o["python"], namespace)["blocks.0.delta_1"], sentence.trace["blocks.0.delta_1"])


@pytest.mark.parametrize("kind", ["sentence", "position", "difference"])
def test_the_checks_hold_for_every_objective(kind: str) -> None:
    session, sentence = traced("llama", kind=kind, position=3 if kind == "position" else 12, against="z")
    prover, results = Prover(session), CheckResults()
    for id in ("loss", "blocks.0.a_3", "a_1"):
        prover.check_now(sentence, results, session.by_id[id])
        report = report_of(results, id)
        assert report["passed"], report


@pytest.mark.parametrize(
    "wanted, message",
    [
        ({"kind": "word"}, "unknown objective 'word'"),
        ({"kind": "position"}, "needs the position"),
        ({"kind": "position", "position": 99}, "row from 0 to 12"),
        ({"kind": "difference", "position": 3}, "against"),
        ({"kind": "difference", "position": 99, "against": "a"}, "no position 99"),
        ({"kind": "difference", "position": 3, "against": 256}, "outside the vocabulary"),
        ({"kind": "difference", "position": 3, "against": ""}, "a token is given"),
    ],
)
def test_bad_objectives_are_refused(wanted: dict[str, Any], message: str) -> None:
    session, _ = traced()
    with pytest.raises(hg.HandgradError, match=message):
        session.sentence(TEXT, 0, objective_of(session, TEXT, 0, wanted))


# ── what if ─────────────────────────────────────────────────────────────────────────────────────────────────────────

PLACES: list[dict[str, Any]] = [
    {"kind": "head", "head": 1},
    {"kind": "skip", "edge": "5"},
    {"kind": "skip", "edge": "10"},
    {"kind": "neuron", "neuron": 7},
    {"kind": "weight", "head": 2, "row": 8, "column": 3},
]


@pytest.mark.parametrize("where", PLACES, ids=lambda w: w["kind"])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_what_if_is_measured_and_predicted(shape: str, where: dict[str, Any]) -> None:
    session, sentence = traced(shape)
    place = what_if.place_of(session, sentence, block=1, **where)
    found = what_if.what_if(session, sentence, place)
    names: dict[str, Any] = {"hg": hg, "torch": torch, "model": session.model, "trace": sentence.trace}
    names |= {"tokens": sentence.tokens, "targets": sentence.targets}
    *lines, last = found["python"].splitlines()
    exec("\n".join(lines), names)
    assert found["measured"] == eval(last, names)
    assert found["measured"] != 0 and f"{place.label}" in found["caption"]

    def shrunk(x: torch.Tensor) -> torch.Tensor:  # the prediction is the slope of the change
        x[place.index] *= 1 - 1e-6
        return x

    small = hg.trace(session.model, sentence.tokens, sentence.targets, edit={place.name: shrunk}).loss
    assert found["predicted"] == pytest.approx((small - sentence.trace.loss) / 1e-6, rel=1e-4, abs=1e-8)


# the last station of the last block whose gradients the error of each place reaches
REACHED = {"head": "1.a_3", "skip 5": "0.a_10", "skip 10": "1.a_4", "neuron": "1.a_7", "weight": "1.a_3"}


@pytest.mark.parametrize("where", PLACES, ids=lambda w: w["kind"])
def test_without_an_error_path_only_the_gradients_below_change(where: dict[str, Any]) -> None:
    session = make_session(**LLAMA)  # in float32: two paths would differ by rounding
    sentence = session.sentence(TEXT)
    place = what_if.place_of(session, sentence, block=1, **where)
    found = what_if.what_if_error(session, sentence, place)
    names: dict[str, Any] = {"hg": hg, "torch": torch, "model": session.model}
    lengths = evaluate(found["python"], **names, tokens=sentence.tokens, targets=sentence.targets)
    changed = {name: x.item() for name, x in lengths.items() if x}
    assert {row["name"]: row["change"] for row in found["gradients"]} == pytest.approx(changed)
    last = REACHED[where["kind"] + (f" {where['edge']}" if "edge" in where else "")]
    end = session.stations.index(session.by_id[f"blocks.{last}"])
    below = {p.gradient for s in session.stations[: end + 1] for p in s.parameters}
    assert set(changed) == below - ({"blocks.1.grad_w_v"} if where["kind"] == "weight" else set())
    assert found["caption"].startswith(f"{len(changed)} of {found['count']} gradients change")
    if where["kind"] == "weight":  # w_v has its error still, and the sentence says so
        assert found["label"] == f"the score of {place.label} (through the value it still flows)"
    assert f"no error flows back through {found['label']}." in found["caption"]


def test_what_changes_nothing_is_said_to() -> None:
    session = make_session()
    sentence = session.sentence(TEXT, 0, hg.PositionLoss(3))
    place = what_if.place_of(
        session, sentence, "weight", 0, head=0, row=5, column=2
    )  # the explained row does not see it
    found = what_if.what_if(session, sentence, place)
    assert found["measured"] == 0 and "the objective is the same" in found["caption"]
    assert what_if.what_if_error(session, sentence, place)["caption"].startswith("0 of ")


def test_effects_are_the_predictions() -> None:
    session, sentence = traced()
    found = what_if.effects(session, sentence)
    for where, value in (
        ({"kind": "head", "head": 2}, found["heads"][1][2]),
        ({"kind": "skip", "edge": "10"}, found["skips"][1][1]),
        ({"kind": "neuron", "neuron": found["neurons"][1][0]["neuron"]}, found["neurons"][1][0]["predicted"]),
    ):
        place = what_if.place_of(session, sentence, block=1, **where)  # type: ignore[arg-type]
        assert what_if.predicted(sentence.trace, place) == pytest.approx(value)


@pytest.mark.parametrize(
    "where, message",
    [
        ({"kind": "all"}, "unknown change"),
        ({"kind": "head", "head": 3}, "head must be between 0 and 2"),
        ({"kind": "skip"}, "edge must be 5"),
        ({"kind": "weight", "head": 0, "row": 1}, "column must be between"),
        ({"kind": "head", "head": 0, "block": 2}, "no block 2"),
    ],
)
def test_places_that_do_not_exist(where: dict[str, Any], message: str) -> None:
    session, sentence = traced()
    with pytest.raises(hg.HandgradError, match=message):
        what_if.place_of(session, sentence, **{"block": 0, **where})


# ── attribution ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_attribution_is_that_of_python() -> None:
    session, sentence = traced("llama")
    found = attribution_view.attribution(session, sentence, 6, None, ord("z"), 8)
    python = eval(found["python"], {"hg": hg, "model": session.model})
    assert [row["score"] for row in found["rows"]] == python.scores[:7].tolist()
    assert found["gap"] == python.gap and found["total"] == pytest.approx(python.integrated.sum().item())
    removed = [math.nan if row["removed"] is None else row["removed"] for row in found["rows"]]
    assert removed == pytest.approx(python.removed[:7].tolist(), nan_ok=True)
    assert "Completeness gap" in found["caption"]
    worst = attribution_view.attribution(session, sentence, steps=1)["position"]
    losses = overview_view.overview(session, sentence)["losses"]
    assert worst == max(range(3, len(losses)), key=losses.__getitem__)  # the first ones have no context
    with pytest.raises(hg.HandgradError, match="no target"):
        attribution_view.attribution(session, sentence, len(sentence.ids) - 1)
    assert (
        attribution_view.attribution(session, sentence, len(sentence.ids) - 1, ord("x"), steps=2)["word"]["word"] == "x"
    )


def test_attribution_follows_a_difference_of_logits() -> None:
    """At the last position as well, where there is no target."""
    session, sentence = traced(kind="difference", position=12, token="a", against="z")
    found = attribution_view.attribution(session, sentence, 12, steps=4)
    assert found["word"]["word"] == "a" and found["against"]["word"] == "z"
    assert found["value"] == pytest.approx(sentence.trace.loss)
    a, delta = sentence.trace["blocks.0.a_1"], sentence.trace["blocks.0.delta_1"]
    assert [row["score"] for row in found["rows"]] == pytest.approx((a * delta).sum(1).tolist())


# ── follow one number ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_is_the_sum_of_its_terms(shape: str) -> None:
    """A cell of every tensor of the trace, and every factor of its largest term in turn."""
    session, sentence = traced(shape)
    seen: set[str] = set()

    def check(name: str, head: int | None, row: int, column: int, size: float) -> list[dict[str, Any]]:
        found = follow(session, sentence, name, head, row, column)
        assert found["sum"] == pytest.approx(found["value"], rel=1e-9, abs=1e-10 * size + 1e-15), name
        shown = sum(term["value"] for term in found["terms"]) + found["rest"]["value"]
        assert found["leaf"] or shown == pytest.approx(found["sum"], rel=1e-9, abs=1e-10 * size + 1e-15)
        for term in found["terms"]:
            product = math.prod(factor["value"] for factor in term["factors"]) * term["scale"]
            assert product == pytest.approx(term["value"], rel=1e-9, abs=1e-300)
        if found["python"] is not None:
            assert eval(found["python"], {"trace": sentence.trace}).item() == found["value"]
        seen.add(name)
        return [factor["cell"] for term in found["terms"][:1] for factor in term["factors"] if factor["cell"]]

    for name, x in sentence.trace.items():
        if name == "a_0" or (name.startswith("blocks.0.") and name not in ("blocks.0.a_1", "blocks.0.delta_10")):
            continue
        shape_of = (1, *x.shape)[-2:]
        row = sentence.ids[5] if name == "grad_w_tok" else min(5, shape_of[0] - 1)
        size = x.abs().max().item()
        for cell in check(name, 0 if x.ndim == 3 else None, row, min(7, shape_of[1] - 1), size):
            check(cell["name"], cell["head"], cell["row"], cell["column"], max(1.0, size))
    assert "blocks.1.score" in seen and "blocks.1.delta_v" in seen


def test_the_way_up_ends_at_the_loss() -> None:
    session, sentence = traced("llama", kind="difference", position=9, token="a", against="b")
    cell: dict[str, Any] = {"name": "blocks.0.grad_w_gate", "head": None, "row": 3, "column": 2}
    for _ in range(60):
        found = follow(session, sentence, cell["name"], cell["head"], cell["row"], cell["column"])
        signals = [
            f["cell"] for f in found["terms"][0]["factors"] if f["cell"] and re.search("delta_|G_", f["cell"]["name"])
        ]
        if not signals:
            break
        cell = signals[0]
    assert found["name"] == "delta_12" and abs(found["value"]) == 1


def test_a_norm_without_a_bias_has_none_in_words() -> None:
    for shape, words in (("gpt2", "the normalized input times the gain, plus the bias"),
                         ("llama", "the normalized input times the gain")):  # fmt: skip
        assert follow(*traced(shape), "blocks.0.a_2", None, 3, 2)["formula"] == words


def test_a_target_that_is_not_read_is_not_called_missing() -> None:
    session, sentence = traced(kind="position", position=4)
    formulas = [follow(session, sentence, "delta_12", None, row, 0)["formula"] for row in (3, 4, len(sentence.ids) - 1)]
    assert formulas == ["what is explained does not depend on this row", "y_pred − y_gt", "this row has no target"]


@pytest.mark.parametrize("shape", ["gpt2", "smollm3"])
def test_masked_tokens_are_no_terms(shape: str) -> None:
    """Block 1 of smollm3 has a window of 4 tokens, and 4 heads with the same keys."""
    session, sentence = traced(shape)
    n, window, heads = len(sentence.ids), *((4, 4) if shape == "smollm3" else (99, 1))
    for name, row, sees in (("a_3", 4, True), ("a_3", n - 1, True), ("delta_q", 4, True), ("delta_k", 4, False),
                            ("delta_v", 4, False)):  # fmt: skip
        found = follow(session, sentence, f"blocks.1.{name}", None if name == "a_3" else 0, row, 2)
        seen = min(row + 1 if sees else n - row, window)
        assert found["count"] == seen * (1 if sees else heads)
        assert found["formula"].endswith(f"; {n - seen} masked tokens are left out" if seen < n else "values")
        assert found["sum"] == pytest.approx(found["value"], rel=1e-9)
        tokens = {term["position"] - 1 for term in found["terms"]}
        assert min(tokens) >= (max(0, row + 1 - window) if sees else row) and max(tokens) < (row + 1 if sees else n)


def test_a_number_that_does_not_exist() -> None:
    session, sentence = traced()
    for name, head, row, column, message in (
        ("blocks.0.a_99", None, 0, 0, "no tensor"),
        ("blocks.0.rho", None, 0, 0, "has 3 heads"),
        ("blocks.0.a_5", None, 99, 0, "there is no 99"),
    ):
        with pytest.raises(hg.HandgradError, match=message):
            follow(session, sentence, name, head, row, column)


def test_a_word_is_its_first_token() -> None:
    session, _ = traced()
    assert token_id(session, " cat") == ord(" ") and token_id(session, 7) == 7
