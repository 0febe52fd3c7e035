"""The views of the page that ask the model a question, in a real browser: what they show equals Python."""

import contextlib
import re

import pytest
import torch
from page_helpers import Open, check_accessibility, expect_all_proven, expect_station, go, number
from playwright.sync_api import Locator, expect
from tiny_session import LLAMA, TEXT, make_session

import handgrad as hg
from handgrad.explain_page.server import Server
from handgrad.explain_page.session.session import Session
from handgrad.learn.course import COURSE

pytest_plugins = ["page_fixtures"]


def hover_cell(figure: Locator, row: int, column: int, entry: dict[str, str]) -> None:
    """Point at a drawn cell until its exact `entry` is shown: the page may still move and resize the matrix."""
    canvas, readout = figure.locator("canvas[data-name]"), figure.locator(".readout")
    while not all(readout.get_attribute(f"data-{name}") == value for name, value in entry.items()):
        left, top, width, height = (
            float(canvas.get_attribute(f"data-{x}") or "") for x in ("left", "top", "cell-width", "cell-height")
        )
        canvas.hover(position={"x": left + (column + 0.5) * width, "y": top + (row + 0.5) * height})
        with contextlib.suppress(AssertionError):  # the exact value arrives after the drawn one
            expect(readout).to_have_attribute("data-row", entry["row"], timeout=5000)


def test_one_target_at_a_time(open_page: Open, session: Session) -> None:
    page = open_page("#/station/a_11/backward?token=3")
    sentence = session.sentence(TEXT)
    model, tokens, targets = session.model, sentence.tokens, sentence.targets
    page.click("[data-choice=position]")
    expect(page.locator("#objective")).to_contain_text("the loss of ‘e’")
    trace = hg.trace(model, tokens, targets, objective=hg.PositionLoss(3))
    assert number(page, "#objective") == pytest.approx(trace.loss, rel=1e-6)
    id = session.sentence(TEXT, 0, hg.PositionLoss(3)).id
    expect(page.locator("#view-station")).to_have_attribute("data-sentence", id)
    assert number(page, "[data-stat='delta norm']") == pytest.approx(trace["delta_11"].double().norm().item(), rel=1e-6)
    assert "objective=position-3" in page.url
    expect(page.locator("#badge")).to_have_class("badge good")
    go(page, "station/loss/backward?token=3&objective=position-3")
    expect(page.locator(".loss-card")).to_contain_text("not divided by the number of targets")
    expect(page.locator("#badge")).to_have_class("badge good")  # nothing moves any more where the next click goes
    page.click(".loss-card .strip button >> nth=5")
    expect(page.locator("#push-caption")).to_contain_text("does not depend on this position")
    assert page.locator(".bars.push").count() == 0
    page.select_option("#position", "6")
    expect(page.locator("#objective")).to_contain_text("the loss of ‘o’")
    page.click("[data-choice=difference]")
    expect(page.locator("#against")).to_be_visible()
    page.fill("#against", "x")
    page.keyboard.press("Enter")
    expect(page.locator("#objective")).to_contain_text("minus that of ‘x’")
    best = int(sentence.trace["a_12"][6].argmax())
    trace = hg.trace(model, tokens, targets, objective=hg.LogitDifference(6, best, ord("x")))
    assert number(page, "#objective") == pytest.approx(trace.loss, rel=1e-5)
    assert f"objective=difference-6-{best}-{ord('x')}" in page.url
    expect(page.locator("#badge")).to_have_class("badge good")
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")
    expect(page.locator("#objective")).to_contain_text("minus that of ‘x’")
    page.go_back()
    expect(page.locator("#objective")).to_contain_text("minus that of ‘o’")
    page.go_forward()
    expect(page.locator("#objective")).to_contain_text("minus that of ‘x’")
    page.click(".loss-card .strip button >> nth=6")
    expect(page.locator("#push-caption")).to_contain_text("Δ₁₂ is 1 for")
    page.click("#tab-attribution")
    expect(page.locator("#view-attribution h2")).to_contain_text("rather than ‘x’")
    found = hg.attribute(model, [*sentence.ids[:7], best], against=ord("x"), steps=32)
    shown = page.locator("#attributed button").evaluate_all("nodes => nodes.map((n) => Number(n.dataset.value))")
    assert found.integrated is not None
    assert torch.allclose(torch.tensor(shown), found.integrated[:7].float(), rtol=1e-4, atol=1e-6)
    page.click("#tab-step")
    expect(page.locator("#view-step")).to_contain_text("minus that of ‘x’")


def test_follow_a_number_up_to_the_loss(open_page: Open, session: Session) -> None:
    page = open_page("#/station/blocks.1.a_7/backward")
    figure = page.locator("figure.heat", has=page.locator('canvas[data-name="blocks.1.grad_w_6"]'))
    figure.locator("canvas[data-name]").click(position={"x": 90, "y": 40})
    expect(page.locator("#follow")).to_be_visible()
    row, column = (
        int(x) for x in re.findall(r"\[row (\d+), column (\d+)\]", page.locator("#follow h3").inner_text())[0]
    )
    trace = session.sentence(TEXT).trace
    assert number(page, "#followed-value") == trace["blocks.1.grad_w_6"][row, column].item()
    for _ in range(10):
        terms = page.locator("#follow [data-term]").evaluate_all("nodes => nodes.map((n) => Number(n.dataset.term))")
        value = number(page, "#followed-value")
        assert sum(terms) == pytest.approx(number(page, "#followed-sum"), rel=1e-6, abs=1e-12)
        assert sum(terms) == pytest.approx(value, rel=1e-3, abs=1e-7)
        sizes = [abs(x) for x in terms[:12]]
        assert sizes == sorted(sizes, reverse=True)
        if "Δ₁₂" in page.locator("#follow h3").inner_text():
            break
        before = page.locator("#follow h3").inner_text()
        page.locator("#follow .factor", has_text=re.compile("Δ|^G")).first.click()  # G is Δ times the gain of a norm
        expect(page.locator("#follow h3")).not_to_have_text(before)
    else:
        pytest.fail("Δ₁₂ was not reached")
    check_accessibility(page)
    page.locator(".path button").first.click()
    expect(page.locator("#follow h3")).to_contain_text("∂w_6")
    page.click("#follow-close")
    expect(page.locator("#follow")).to_have_count(0)


def test_what_if_a_part_did_not_exist(open_page: Open, session: Session) -> None:
    page = open_page("#/whatif")
    sentence = session.sentence(TEXT)
    base = sentence.trace
    page.click("[data-part='head 1 2']")
    expect(page.locator("#change-measured")).to_be_visible()

    def zero(x: torch.Tensor) -> torch.Tensor:
        x[:, 16:24] = 0
        return x

    changed = hg.trace(session.model, sentence.tokens, sentence.targets, edit={"blocks.1.a_3": zero})
    assert number(page, "#change-measured") == pytest.approx(changed.loss - base.loss, rel=1e-3, abs=1e-6)
    expected = -(base["blocks.1.a_3"][:, 16:24].double() * base["blocks.1.delta_3"][:, 16:24].double()).sum().item()
    assert number(page, "#change-predicted") == pytest.approx(expected, rel=1e-6)
    expect(page.locator("[data-part='head 1 2']")).to_be_focused()
    for part in ("[data-part='skip 0 10']", "[data-part^='neuron 1']"):
        page.locator(part).first.click()
        expect(page.locator(part).first).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".outcome h3")).to_contain_text("skip connection" if "skip" in part else "neuron")
    page.select_option("select[name=row]", "5")
    page.select_option("select[name=column]", "2")
    page.click("#weight-zero")
    expect(page.locator(".outcome h3")).to_contain_text("the attention of ‘,’ to a space")
    page.click("[data-choice=backward]")
    expect(page.locator("#cut-caption")).to_contain_text("gradients change")
    check_accessibility(page)
    page.fill("#sentence", "to be")  # too short for the chosen weight, which is left
    expect(page.locator("#tokens button")).to_have_count(5)
    expect(page.locator(".outcome")).to_have_count(0)
    expect(page.locator("[data-part='head 1 2']")).to_be_visible()


def test_attribution_and_its_gap(open_page: Open, session: Session) -> None:
    page = open_page("#/attribution?objective=position-7")
    expect(page.locator("#view-attribution h2")).to_contain_text("Why ‘r’?")
    found = hg.attribute(session.model, session.sentence(TEXT).ids, [8], steps=32)
    shown = page.locator("#attributed button").evaluate_all("nodes => nodes.map((n) => Number(n.dataset.value))")
    assert found.integrated is not None and len(shown) == 8
    assert torch.allclose(torch.tensor(shown), found.integrated[:8].float(), rtol=1e-4, atol=1e-6)
    gaps = [number(page, "#gap")]
    for steps in ("64", "128"):
        before = page.locator("#gap").get_attribute("data-value") or ""
        page.select_option("#ig-steps", steps)
        expect(page.locator("#gap")).not_to_have_attribute("data-value", before)
        gaps.append(number(page, "#gap"))
    assert abs(gaps[0]) > abs(gaps[1]) > abs(gaps[2])
    page.click("[data-choice=removed]")
    expect(page.locator("#view-attribution figcaption span").first).to_have_text("removed")
    check_accessibility(page)


def test_all_heads_at_a_glance(open_page: Open) -> None:
    page = open_page("#/heads")
    expect(page.locator("[data-head]")).to_have_count(6)
    page.click("[data-choice=sent]")
    check_accessibility(page)
    page.click("[data-head='1.2']")
    expect_station(page, "blocks.1.a_3")
    expect(page.locator(".attention")).to_have_attribute("data-shown-head", "2")
    page.click(".attention .what-if")
    expect(page.locator("#view-whatif .outcome h3")).to_contain_text("head 3 of block 2")


def test_compare(open_page: Open, session: Session) -> None:
    page = open_page("#/compare")
    page.fill("#other-sentence", "to be, or now")
    page.click("#compare-sentence")
    expect(page.locator(".trio")).to_have_count(2)
    one, other = (session.sentence(text).trace for text in (TEXT, "to be, or now"))
    page.select_option("#compare-station", "blocks.1.a_10")
    expect(page.locator("[data-map='blocks.1.a_10']")).to_be_visible()
    x, y = one["blocks.1.a_10"], other["blocks.1.a_10"]
    relative = ((y - x).norm() / x.norm()).item()
    assert number(page, "[data-map='blocks.1.a_10'] .caption[data-relative]", "relative") == pytest.approx(
        relative, rel=1e-5
    )
    check_accessibility(page)
    page.click("#tab-step")
    page.click("#step-one")
    expect(page.locator("#steps-taken")).to_have_text("after 1 step")
    page.click("#tab-compare")
    page.click("#compare-before")
    expect(page.locator("#view-compare")).to_contain_text("the weights before the steps")
    expect(page.locator("#view-compare .trio")).to_have_count(2)


def test_the_neuron_lens_of_a_gated_layer(open_page: Open) -> None:
    session = make_session(**{**LLAMA, "n_blocks": 1})
    with Server(session) as url:
        page = open_page("#/station/blocks.0.a_8/backward", base=url)
        trace = session.sentence(TEXT).trace
        blame = (trace["blocks.0.a_8"].double() * trace["blocks.0.delta_8"].double()).sum(0)
        first = int(blame.abs().argmax())
        expect(page.locator("[data-neuron]").first).to_have_attribute("data-neuron", str(first))
        page.locator("[data-neuron]").nth(1).click()
        expect(page.locator("[data-neuron]").nth(1)).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".inputs")).to_contain_text("gate is")
        assert page.locator(".word-chip.up").count() >= 6
        check_accessibility(page)
        expect_all_proven(page)


def test_swaps_and_words_of_the_vocabulary(open_page: Open, session: Session) -> None:
    page = open_page("#/station/a_0/forward?token=4")
    sentence = session.sentence(TEXT)
    shown = page.locator("tr.chosen b[data-value]")
    expect(shown.first).to_be_visible()
    ids = sentence.tokens.clone()
    ids[0, 4] = int(shown.first.get_attribute("data-id") or "")
    change = session.model.loss(ids, sentence.targets) - sentence.trace.loss
    assert float(shown.first.get_attribute("data-value") or "") == pytest.approx(change, rel=1e-4, abs=1e-6)
    expect(page.locator("#view-station")).to_contain_text("too large a step for a gradient")
    go(page, "station/a_12/backward")
    expect_station(page, "a_12")
    figure = page.locator("figure.heat", has=page.locator('canvas[data-name="delta_12"]'))
    hover_cell(figure, 2, 0, {"row": "2", "column": str(ord(TEXT[1]))})
    expect(figure.locator(".readout")).to_contain_text(f"token ‘{TEXT[1]}’")  # targets come first
    shown_value = float(figure.locator(".readout").get_attribute("data-value") or "")
    assert shown_value == sentence.trace["delta_12"][2, ord(TEXT[1])].item()


def test_the_first_exercise_from_its_template_to_the_next_one(open_page: Open) -> None:
    page = open_page("#/exercises")
    expect(page.locator("#code")).to_have_value(re.compile("delta_scores = \\.\\.\\."))
    page.click("#grade")
    expect(page.locator("#judgment")).to_have_text("… nothing is written yet: replace each ... in backward")
    expect(page.locator("#judgment")).to_have_class("badge wait")
    expect(page.locator("table:has-text('worst case')")).to_have_count(0)
    page.fill("#code", "def backward(delta_rho, rho):\n    return delta_rho * rho\n")
    page.click("#grade")
    fault = page.locator("[data-fault='missing term']")
    expect(fault).to_contain_text("one of its terms is missing")
    expect(fault).not_to_contain_text("second term")
    expect(page.locator("#exactly")).to_have_text("Which one is named after 2 hints.")
    page.click("#hint")
    expect(page.locator("#exactly")).to_be_visible()
    page.click("#hint")
    expect(fault).to_contain_text("lacks the second term")
    expect(page.locator("#exactly")).to_have_count(0)
    page.fill("#code", COURSE["softmax"].solution())
    page.click("#grade")
    expect(page.locator("#judgment")).to_have_text("✔ Right, against autograd and finite differences.")
    expect(page.locator("h3").first).to_have_text("1. softmax of the scores")
    expect(page.locator("#code")).to_have_value(COURSE["softmax"].solution())
    check_accessibility(page)
    page.click("#next")
    expect(page.locator("h3").first).to_contain_text("2. ")
    expect(page.locator("#judgment")).to_have_count(0)
    page.click("[data-exercise=softmax]")
    expect(page.locator("#judgment")).to_have_class("badge good")
    page.reload()  # the address names the exercise, so its success screen is there again
    expect(page.locator("#judgment")).to_contain_text("✔ Solved on 20")
    expect(page.locator("h3").first).to_have_text("1. softmax of the scores")
    expect(page.locator("#next")).to_be_visible()


def test_an_exercise_is_graded_in_the_page(open_page: Open) -> None:
    page = open_page("#/station/blocks.1.a_6/backward")
    page.click("[data-open=layernorm]")
    expect(page.locator("[data-exercise]")).to_have_count(len(COURSE))
    expect(page.locator("#exercise-station")).to_have_value("blocks.1.a_6")
    page.click("#hint")
    expect(page.locator(".hints li")).to_have_count(1)
    page.click("#solution")
    right = page.locator(".solution").inner_text()
    page.fill("#code", right)
    page.click("#grade")
    expect(page.locator("#judgment")).to_have_class("badge good")
    expect(page.locator("#grade")).to_be_focused()
    page.fill("#code", "def backward(:")
    page.click("#grade")
    expect(page.locator("#judgment")).to_contain_text("not Python")
    check_accessibility(page)
    page.click("#restart")
    expect(page.locator("#code")).not_to_have_value("def backward(:")
    page.click("#undo")
    expect(page.locator("#code")).to_have_value("def backward(:")
