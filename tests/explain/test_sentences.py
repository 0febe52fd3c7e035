"""The sentences of the page that state a fact, recomputed from the trace: after too large steps, with equal logits,
with one target, and for every objective."""

import math
import re
import threading

import pytest
import torch
from tiny_session import TEXT, make_session, make_traced

import handgrad as hg
from handgrad.explain_page.exercises import case_of
from handgrad.explain_page.presentation import captions
from handgrad.explain_page.presentation.chances import log_chances, losses_of, standing
from handgrad.explain_page.proofs import prover as provers
from handgrad.explain_page.proofs.prover import Prover
from handgrad.explain_page.session.session import Session, TracedSentence
from handgrad.explain_page.views import attention as attention_view
from handgrad.explain_page.views import overview as overview_view
from handgrad.explain_page.views import station as station_view
from handgrad.explain_page.views import what_if
from handgrad.explain_page.views.predictions import predict
from handgrad.explain_page.views.step import take_step
from handgrad.learn.course import COURSE
from handgrad.learn.exercises.loss import EXERCISE
from handgrad.model.passes.objective import TEXT_LOSS, Objective


def diverged(scale: float = 300.0) -> Session:
    """A model whose logits are so large that float32 has no digits for most probabilities."""
    session = make_session()
    with torch.no_grad():
        session.model.final_norm.weight *= scale
    return session


def undecided() -> Session:
    """A model whose logits are all equal."""
    session = make_session()
    with torch.no_grad():
        session.model.final_norm.weight.zero_()
        session.model.final_norm.bias.zero_()
    return session


def log_p(sentence: TracedSentence) -> torch.Tensor:
    return torch.log_softmax(sentence.trace["a_12"].double(), 1)


def test_losses_and_probabilities_of_a_diverged_model_are_not_rounded() -> None:
    session = diverged()
    sentence = session.sentence(TEXT)
    expected = -log_p(sentence)[range(len(TEXT) - 1), sentence.ids[1:]]
    assert expected.max() > 150  # e^−104 is the least float32
    overview = overview_view.overview(session, sentence)
    assert overview["losses"] == pytest.approx(expected.tolist(), rel=1e-9)
    assert overview["loss"] == pytest.approx(expected.mean().item(), rel=1e-5)
    rows = station_view.at_station(session, sentence, session.by_id["loss"])
    typed = predict(session, TEXT, 0)
    assert typed["losses"] == pytest.approx(expected.tolist(), rel=1e-5)
    for t, (row, other) in enumerate(zip(rows["positions"][:-1], typed["positions"], strict=False)):
        logits = sentence.trace["a_12"][t]
        assert row["rank"] == other["rank"] == int((logits > logits[sentence.ids[t + 1]]).sum()) + 1
        assert row["ties"] == 0 and row["probability"] > 0 and row["loss"] == pytest.approx(expected[t].item())
        assert all(x["p"] > 0 for x in row["top"])
    assert len({row["rank"] for row in rows["positions"][:-1]}) > 3
    worst = int(expected.argmax())
    assert f"(position {worst + 1}), with ⟦" in rows["loss_caption"]
    assert f"−log p = ⟦{expected[worst].item()!r}⟧" in rows["loss_caption"]
    taken = take_step(session, sentence, 1e-6, "SGD")
    assert all(move["before"] > 0 and move["after"] > 0 for move in taken["moves"])


def test_equal_logits_share_their_rank() -> None:
    session = undecided()
    sentence = session.sentence(TEXT)
    view = station_view.at_station(session, sentence, session.by_id["loss"])
    assert all((row["rank"], row["ties"]) == (1, 255) for row in view["positions"][:-1])
    assert "All 12 targets were equally probable" in view["loss_caption"]
    assert "together with 255 equally probable ones" in view["positions"][0]["caption"]
    row = torch.tensor([0.0, 1.0, 0.0, 2.0]).double()
    found = standing(session, row, 2)
    assert (found["rank"], found["ties"]) == (3, 1)


def test_one_target_is_the_only_one() -> None:
    session = make_session()
    sentence = session.sentence("ab")
    view = station_view.at_station(session, sentence, session.by_id["loss"])
    assert view["loss_caption"].startswith("The only target is ‘b’ after ‘a’ (position 1), with ⟦")
    assert "1 − p = ⟦" in view["positions"][0]["caption"]


@pytest.mark.parametrize("objective", [TEXT_LOSS, hg.PositionLoss(4), hg.LogitDifference(4, 65, 66)], ids=str)
def test_the_tokens_that_no_error_reaches_are_counted(objective: Objective) -> None:
    session = make_session()
    sentence = session.sentence(TEXT, 0, objective)
    n = len(TEXT)
    for station in session.stations:
        if not station.incoming:
            continue
        view = station_view.at_station(session, sentence, station)
        for shown in (m for m in view["maps"] if m["kind"] == "delta"):
            norms = sentence.trace[shown["name"]].norm(dim=1)
            zero = [t for t in range(n) if norms[t] == 0]
            said = re.search(
                r"No error reaches (.*): what is explained does not depend on (it|them) here", shown["caption"]
            )
            assert said is not None, shown["caption"]
            if len(zero) > 3:
                assert (
                    said[1].startswith(f"{len(zero)} of the {n} tokens, the last of them")
                    and f"(position {n})" in said[1]
                )
            else:
                assert said[1].count("position") == len(zero) and (said[2] == "it") == (len(zero) == 1)
            assert "as computed" not in shown["caption"]
    assert len(zero) == (1 if objective == TEXT_LOSS else n - 1)  # the last station: the rows that are read


def test_an_error_that_rounding_made_0_is_not_called_unreachable() -> None:
    text = captions.about_error(torch.tensor([[1.0], [0.0], [0.0]]), "abc", lambda row: row < 2)
    assert text.endswith("No error reaches ‘c’ (position 3): what is explained does not depend on it here."
                         " It is 0, as computed, at ‘b’ (position 2).")  # fmt: skip


def test_the_share_of_the_first_token_says_over_which_rows() -> None:
    session, sentence = make_traced()
    rho = torch.eye(4) * 0.4
    rho[:, 0] += 0.6
    text = captions.about_attention(rho, torch.zeros(4, 4), "abcd")
    mean = rho[1:, 0].mean().item()
    assert f"On average over the rows after the first, which can attend only to itself, ⟦{mean!r}%⟧" in text
    assert text.startswith("No attention goes to any token but the first and the token itself.")
    head = attention_view.at_head(session, sentence, 0, 0)
    t, s = map(int, re.findall(r"\(position (\d+)\)", head["caption"])[:2])
    assert f"⟦{sentence.trace['blocks.0.rho'][0, t - 1, s - 1].item()!r}%⟧" in head["caption"]


def test_a_small_change_is_not_read_from_two_paths() -> None:
    session, sentence = make_traced()
    taken = take_step(session, sentence, 1e-9, "SGD")
    assert taken["loss"] == session.model.loss(sentence.tokens, sentence.targets)
    assert abs(taken["measured"] - taken["loss"]) <= taken["rounding"] < 1e-5


def test_a_station_is_not_done_before_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(n_blocks=1)
    sentence, station = session.sentence(TEXT), session.by_id["a_11"]
    prover = Prover(session)
    go, compare = threading.Event(), provers.compare_with_differences
    monkeypatch.setattr(provers, "compare_with_differences", lambda *x: (go.wait(60), compare(*x))[1])
    try:
        while (answer := prover.request(sentence, station, 0.05))["passed"] is None:
            pass
        assert answer["passed"] is True and answer["state"] == "measuring"
        assert {check["kind"] for check in answer["checks"]}.isdisjoint({"differences"})
        go.set()
        answer = prover.request(sentence, station, 60.0)
        assert answer["state"] == "done" and "differences" in {check["kind"] for check in answer["checks"]}
    finally:
        go.set()
        prover.stop()


def test_the_formula_of_the_loss_station_solves_its_exercise() -> None:
    session, sentence = make_traced(dtype=torch.float64)
    a_12, targets = sentence.trace["a_12"], sentence.targets[0]
    case = EXERCISE.case("", a_12, targets)
    leaf = a_12.clone().requires_grad_()
    (expected,) = torch.autograd.grad(case.f(leaf), leaf)
    assert torch.allclose(expected, sentence.trace["delta_12"], atol=1e-15)
    assert "L = − 1/n Σ_t log y_pred" in EXERCISE.text
    loss = next(s for s in overview_view.table(session)["stations"] if s["id"] == "loss")
    assert ["<mfrac>" in kind["forward"][0]["math"][1] for kind in loss["by_objective"].values()] == [
        True, False, False,
    ]  # fmt: skip


def test_the_exercise_of_the_loss_says_what_is_graded() -> None:
    session = make_session()
    labels = []
    for objective in (TEXT_LOSS, hg.PositionLoss(2)):
        case = case_of(session, session.sentence(TEXT, objective=objective), COURSE["loss"], None)
        assert case is not None
        labels.append(case.label)
    assert labels[1] == f"{labels[0]}, with the mean loss, not with what is explained"


def test_the_tokens_station_names_no_loss_where_a_difference_may_be_explained() -> None:
    tokens = next(s for s in overview_view.table(make_session())["stations"] if s["id"] == "a_0")
    assert "how the explained number would change" in tokens["summary"] and "loss" not in tokens["summary"]


def test_parts_of_characters_and_units_are_named() -> None:
    session = make_session()
    assert [session.token_text(id) for id in session.sentence("é!").ids] == ["‹C3›", "‹A9›", "!"]
    assert overview_view.table(session)["unit"] == "byte"
    session._texts.raw = lambda id: b"\xf0\x9f\x98"  # type: ignore[method-assign]
    assert captions.visible(session.token_text(7)) == "‹F0-9F-98›"


# ── numbers that rounding would change ──────────────────────────────────────────────────────────────────────────────


def tiny_errors() -> tuple[Session, TracedSentence]:
    """A sentence whose gradients are so small that their squares are 0 in float32."""
    session = make_session(tied=False)
    with torch.no_grad():
        session.model.head.plain().weight *= 1e-26
    return session, session.sentence(TEXT)


def test_a_gradient_is_0_only_if_its_entries_are() -> None:
    session, sentence = tiny_errors()
    for name, norm in sentence.trace.norms.items():
        assert norm == pytest.approx(sentence.trace[name].double().norm().item(), rel=1e-5)
    view = station_view.at_station(session, sentence, session.by_id["blocks.1.a_9"])
    assert 0 < view["parameters"][0]["grad_norm"] < 1e-23 and "Exactly 0" not in view["parameters_caption"]
    assert "smallest nonzero one" in overview_view.overview(session, sentence)["groups_caption"]
    place = what_if.place_of(session, sentence, "head", 1, head=0)
    found = what_if.what_if_error(session, sentence, place)
    assert all(row["before"] and row["change"] for row in found["gradients"])
    assert captions.about_groups({"w_8 in block 1": 0.0}) == "Every gradient is 0, as computed."
    assert captions.about_groups({}) == "No parameter is trained."
    assert captions.about_gradients({"w_8": 0.0}, {}) == "Every gradient here is 0, as computed."


def test_probabilities_near_1_are_told_apart() -> None:
    logits = torch.tensor([0.0, 575.0, 0.0])
    assert -log_chances(logits)[1].item() == pytest.approx(2 * math.exp(-575), rel=1e-12)
    ordinary = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(log_chances(ordinary), torch.log_softmax(ordinary, 0), rtol=1e-14, atol=0)
    losses = losses_of(torch.tensor([[0.0, 575.0], [0.0, 576.0]]), torch.tensor([1, 1]))
    text = captions.about_loss("ab", "bc", losses)
    assert text.startswith("The biggest surprise is ‘b’") and "The best prediction is ‘c’ after ‘b’" in text
    assert captions.about_loss("ab", "bc", [0.0, 0.0]).startswith("All 2 targets were equally probable, as computed: ")


def test_equal_losses_and_errors_are_counted() -> None:
    text = captions.about_loss("abcd", "bcde", [2.0, 0.0, 0.0, 0.0])
    assert "The best prediction is ‘c’ after ‘b’ (position 2) and 2 other targets, with" in text
    assert "The biggest surprise is ‘b’ after ‘a’ (position 1), with" in text
    text = captions.about_error(torch.eye(4), "abcd", lambda row: True)
    assert (
        text
        == "The largest error arrives at ‘a’ (position 1) and 3 other tokens: ⟦0.25%⟧ of all squared error here, at each."
    )
    assert " other " not in captions.about_error(torch.tensor([[1.0], [2.0]]), "ab", lambda row: True)


def test_a_tied_table_is_named_at_both_places() -> None:
    for tied, layer in ((True, "embedding and logits (tied)"), (False, "embedding")):
        session = make_session(tied=tied)
        view = overview_view.overview(session, session.sentence(TEXT))
        assert [g["where"] for g in view["groups"] if g["symbol"] == "w_tok"] == [layer]
        assert [g["where"] for g in view["groups"] if g["symbol"] == "w_pos"] == ["embedding"]
        assert {g["layer"] for g in view["groups"] if g["symbol"] in ("w_tok", "w_pos")} == {"embedding"}  # one row
        assert ("logits have the same token table" in session.by_id["a_1"].summary) is tied


def test_the_push_in_words_is_that_of_the_bars() -> None:
    session, sentence = make_traced()
    for row in station_view.at_station(session, sentence, session.by_id["loss"])["positions"][:-1]:
        (own,) = [x["delta"] for x in row["push"] if x["target"]]
        assert f"pushed up by (1 − p)/12 = ⟦{-own!r}⟧." in row["caption"]
    alone = session.sentence(TEXT, 0, hg.PositionLoss(3))
    row = station_view.at_station(session, alone, session.by_id["loss"])["positions"][3]
    assert f"pushed up by 1 − p = ⟦{-alone.trace['delta_12'][3, ord(TEXT[4])].item()!r}⟧" in row["caption"]
    certain = {"token": "a", "target": "b", "probability": 1.0, "rank": 1, "ties": 0, "top": []}
    assert "pushed up by 1 − p = ⟦0.0⟧, as computed." in captions.about_push(certain, 0.0, 1)
