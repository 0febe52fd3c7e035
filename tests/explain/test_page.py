"""The page in a real browser: what it shows equals the trace."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from page_helpers import Open, check_accessibility, expect_all_proven, expect_station, go, number
from playwright.sync_api import Browser, Locator, Page, Route, expect
from tiny_session import QWEN3, TEXT, evaluate, make_session

import handgrad as hg
from handgrad.explain_page.export import MAX_BYTES, export
from handgrad.explain_page.notebook import Page as Notebook
from handgrad.explain_page.presentation.captions import quote
from handgrad.explain_page.server import Server
from handgrad.explain_page.session.session import Session
from handgrad.ops import layernorm

pytest_plugins = ["page_fixtures"]


def test_it_opens_with_the_story_of_the_worst_word(open_page: Open, session: Session) -> None:
    page = open_page()
    expect(page.locator("#model")).to_contain_text("small · 2 blocks · d = 24")
    for text in (TEXT, "another thing"):
        if text != TEXT:
            page.fill("#sentence", text)
        sentence = session.sentence(text)
        chances = sentence.trace["y_pred"][range(len(text) - 1), sentence.ids[1:]]
        t = 3 + int(chances[3:].argmin())  # the first ones have no context
        expect(page.locator("#view-start")).to_have_attribute("data-sentence", sentence.id)
        before, word = re.findall(r"\S+\s*$", text[: t + 1])[0], text[t + 1]
        story = f"After {quote(before)} the model gave {quote(word)}"
        expect(page.locator("#story")).to_contain_text(story)
        assert "␣" not in story
        shown = {" ": "␣"}
        shown_p = number(page, "#story b")
        assert shown_p == pytest.approx(chances[t].item(), rel=1e-6)
        assert number(page, "#loss") == sentence.trace.loss
        assert page.locator("#tokens .chips button").all_text_contents() == [shown.get(c, c) for c in text]
        assert page.locator(".story-words button small").count() == len(text)
        expect(page.locator(".strip-note")).to_contain_text("surprise of the model, −log p: from 0 to")
    page.click(".story-words button >> nth=4")
    expect(page.locator("#story")).to_contain_text("After ‘anot’ the model gave ‘h’")
    expect(page.locator(".story-words button >> nth=4")).to_be_focused()
    page.click("#follow-up")
    expect_station(page, "loss")
    expect(page.locator("#map .here")).to_have_attribute("data-key", "loss")
    assert "#/station/loss/backward?token=3" in page.url
    held: list[Route] = []
    page.route("**/api/sentence", lambda route: held.append(route))
    page.route("**/api/progress*", lambda route: route.fulfill(json=HALFWAY))
    page.reload()
    expect(page.locator("#opening-text")).to_have_text("Backward pass, block 21 of 30")
    assert float(page.locator("#opening-bar").get_attribute("value") or "") == HALFWAY["share"]
    page.unroute("**/api/progress*")
    page.route("**/api/progress*", lambda route: route.fulfill(json={**HALFWAY, "compiling": True}))
    expect(page.locator("#opening-text")).to_contain_text("Compiling kernels for this machine, once")
    held[0].continue_()
    expect(page.locator("#opening")).to_be_hidden()
    expect_station(page, "loss")


HALFWAY = {"busy": True, "compiling": False, "backward": True, "share": 0.5, "block": 20, "blocks": 30}


def test_a_wait_says_what_is_computed(open_page: Open) -> None:
    page, held = open_page(), []
    status = page.locator("#status")
    for tab, request, said in (("flow", "flow", "Measuring ‖a‖ and ‖Δ‖"), ("heads", "heads", "Drawing every head")):
        page.route(f"**/api/{request}?*", lambda route: held.append(route))
        page.click(f"#tab-{tab}")
        expect(status).to_contain_text(said)
        expect(page.locator("#progress")).to_be_visible()
        held.pop().continue_()
        expect(page.locator(f"#view-{tab} h2")).to_be_visible()
        expect(status).to_have_text("")
        expect(page.locator("#progress")).to_be_hidden()


def test_every_station_shows_formulas_matrices_and_a_green_badge(open_page: Open, session: Session) -> None:
    page = open_page("#/station/a_0/forward")
    for station in session.stations:
        expect_station(page, station.id)
        expect(page.locator("#badge")).to_have_class("badge good")
        expect(page.locator("#badge")).to_have_attribute("data-state", "done")
        for way in ("forward", "backward"):
            assert page.locator(f".formula.{way} math").count() >= 1
            assert page.locator(f".formula.{way} .equation").first.inner_text()
        for canvas in page.locator(".maps canvas[data-name]").all():
            assert canvas.bounding_box()["width"] > 100  # type: ignore[index]
        assert page.locator(".maps .caption").first.inner_text()
        assert page.locator(".code pre").count() >= 2
        named = page.locator(".code figcaption").all_text_contents()
        readable = [name.startswith("handgrad/paper/") for name in named]
        assert readable[0] or not any(readable), named  # what is easy to read comes first
        if station.kind == "activation":
            assert page.locator("[data-neuron]").count() >= 6  # the lens of a plain feed-forward layer
        if station.id != "loss":
            page.click("#walk-on")
    expect(page.locator("#map .tick.good", has_text="✔")).to_have_count(23 + 2)  # including the two block headings


def test_the_numbers_equal_the_trace(open_page: Open, session: Session) -> None:
    page = open_page("#/station/blocks.1.a_7/backward")
    trace = session.sentence(TEXT).trace
    for kind, name in (("a", "blocks.1.a_7"), ("delta", "blocks.1.delta_7")):
        x = trace[name].double()
        for stat, expected in (("norm", x.norm()), ("most", x.max()), ("least", x.min()), ("mean", x.mean())):
            assert number(page, f'[data-stat="{kind} {stat}"]') == pytest.approx(expected.item(), rel=1e-12)
        figure = page.locator("figure.heat", has=page.locator(f'canvas[data-name="{name}"]'))
        box = figure.locator("canvas[data-name]").bounding_box()
        assert box is not None
        figure.locator("canvas[data-name]").hover(position={"x": box["width"] * 0.6, "y": box["height"] * 0.4})
        readout = figure.locator(".readout")
        expect(readout).to_have_attribute("data-value", re.compile(r"\d"))
        value, row, column = (float(readout.get_attribute(f"data-{k}") or "") for k in ("value", "row", "column"))
        assert value == trace[name][int(row), int(column)].item()
        assert float(readout.inner_text().rpartition(" ")[2]) == pytest.approx(value, rel=1e-8)
    for symbol in ("w_6", "b_6"):
        assert number(page, f'[data-grad="blocks.1.grad_{symbol}"]') == trace[f"blocks.1.grad_{symbol}"].norm().item()


def test_the_colors_match_the_numbers(open_page: Open, session: Session) -> None:
    """Read the pixels of ρ back from the canvas: orange for large values, the color of zero for 0."""
    page = open_page("#/station/blocks.0.a_3/forward", color_scheme="light")
    rho = session.sentence(TEXT).trace["blocks.0.rho"][0]
    canvas = page.locator('canvas[data-name="blocks.0.rho"]')
    n, pixels = len(rho), json.loads(canvas.evaluate(READ_CELLS, len(TEXT)))
    for i in range(n):
        for j in range(n):
            red, _, blue = pixels[i][j]
            if rho[i, j] == 0:
                assert (red, blue) == (250, 245)
            elif rho[i, j] > 0.3:
                assert red - blue > 40


READ_CELLS = """(canvas, n) => {
  const ratio = canvas.width / parseFloat(canvas.style.width);
  const [left, top, cell] = [canvas.dataset.left, canvas.dataset.top, canvas.dataset.cellWidth].map(Number);
  const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const pixel = (x, y) => 4 * (Math.floor(y * ratio) * canvas.width + Math.floor(x * ratio));
  const first = (i, j) => pixel(left + (j + 0.5) * cell, top + (i + 0.5) * cell);
  const at = (i, j) => [...all.slice(first(i, j), first(i, j) + 3)];
  return JSON.stringify([...Array(n).keys()].map((i) => [...Array(n).keys()].map((j) => at(i, j))));
}"""


def test_a_new_sentence_updates_everything(open_page: Open, session: Session) -> None:
    page = open_page("#/station/a_11/backward")
    before = page.locator("#loss").inner_text()
    page.fill("#sentence", "another thing")
    expect(page.locator("#tokens button").first).to_have_text("a")
    expect(page.locator("#loss")).not_to_have_text(before)
    sentence = session.sentence("another thing")
    expect(page.locator("#view-station")).to_have_attribute("data-sentence", sentence.id)
    assert number(page, "#loss") == sentence.trace.loss
    assert number(page, '[data-stat="delta norm"]') == pytest.approx(
        sentence.trace["delta_11"].double().norm().item(), rel=1e-12
    )
    expect(page.locator("#badge")).to_have_class("badge good")
    assert "text=another+thing" in page.url
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")
    expect(page.locator("#sentence")).to_have_value("another thing")
    page.fill("#sentence", "a third")  # several edits are one entry of the history, until the box is left
    expect(page.locator("#tokens button")).to_have_count(7)
    page.fill("#sentence", "a third one")
    expect(page.locator("#tokens button")).to_have_count(11)
    page.go_back()
    expect(page.locator("#sentence")).to_have_value("another thing")
    expect(page.locator("#tokens button")).to_have_count(13)
    assert "#/station/a_11/backward" in page.url  # Back undoes the sentence, not the place


UNSEEN = "\x01\x1b[0m\x7f\u202eabc"  # bytes of U+202E are shown as ‹E2›, ‹80›, ‹AE›


def test_malicious_and_invalid_sentences(open_page: Open, browser: Browser, url: str, session: Session) -> None:
    page = open_page()
    page.fill("#sentence", '<img src=x onerror="window.bad=1"><b>')
    expect(page.locator("#tokens button").first).to_have_text("<")
    for where in ("a_0", "loss"):
        page.click(f'#map [data-key="{where}"]')
        expect_station(page, where)
    assert page.evaluate("window.bad") is None and page.locator("main img").count() == 0
    page.fill("#sentence", UNSEEN)
    expect(page.locator("#tokens button").first).to_have_text("␁")
    expect(page.locator("#view-station")).to_have_attribute("data-sentence", session.sentence(UNSEEN).id)
    assert re.findall(r"[\x01\x1b\x7f\u202e]", page.locator("main").inner_text()) == []  # captions of the server too
    # rejected requests are logged by the browser, so use a page without the check for errors
    context = browser.new_context()
    other = context.new_page()
    other.goto(url)
    other.wait_for_selector("html[data-ready=yes]")
    other.evaluate("document.getElementById('sentence').value = 'x'.repeat(100000)")
    other.click("#sentence-form button")
    expect(other.locator("#status")).to_contain_text("at most 64,000 bytes")
    other.fill("#sentence", "x")
    expect(other.locator("#status")).to_contain_text("at least two tokens")
    other.fill("#sentence", "x" * 60)
    expect(other.locator("#status")).to_contain_text("at most 48")
    expect(other.locator("#loss")).not_to_have_text("–")
    context.close()


def test_heads_switch(open_page: Open, session: Session) -> None:
    page = open_page("#/station/blocks.1.a_3/backward")
    before = page.locator("#head-caption").inner_text()
    page.click('[data-head-button="2"]')
    expect(page.locator(".attention")).to_have_attribute("data-shown-head", "2")
    expect(page.locator("#head-caption")).not_to_have_text(before)
    expect(page.locator('[data-head-button="2"]')).to_have_attribute("aria-pressed", "true")
    assert "head=2" in page.url
    for name in ("rho", "delta_raw"):
        assert page.locator(f'canvas[data-name="blocks.1.{name}"][data-head="2"]').count() == 1
    assert page.locator(".branches path").count() == 4
    page.click("text=Queries, keys and values")
    expect(page.locator('canvas[data-name="blocks.1.q"]')).to_be_visible()


def test_the_loss_station_describes_the_correction(open_page: Open, session: Session) -> None:
    page = open_page("#/station/loss/backward?token=3")
    delta = session.sentence(TEXT).trace["delta_12"]
    assert number(page, ".bars.push .target .figure") == -delta[3, ord(TEXT[4])].item()
    assert (
        page.locator(".bars.push .target .fill.up").count() == 1
    )  # a push up is to the right and blue, as in the lens
    expect(page.locator(".loss-card")).to_contain_text(f"divided by the {len(TEXT) - 1} targets")
    page.click(".loss-card .strip button >> nth=-1")
    expect(page.locator(".loss-card")).to_contain_text("no target")


def test_the_lens_follows_the_token(open_page: Open) -> None:
    page = open_page("#/station/blocks.0.a_5/backward")
    before = page.locator(".lens .caption").inner_text()
    page.click("#tokens button >> nth=4")
    expect(page.locator(".lens .caption")).not_to_have_text(before)
    assert page.locator(".lens .bars").count() == 2
    expect(page.locator(".lens h3")).to_contain_text(f"‘{TEXT[4]}’")


def test_a_step_lowers_the_loss_as_predicted(open_page: Open, session: Session) -> None:
    page = open_page("#/step")
    page.locator("#rate").fill("-3")
    page.click("#step-one")
    idle = page.locator("#step-many:not([aria-disabled])", has_text="run 20")
    expect(idle).to_be_visible()
    expect(page.locator("#step-one")).to_be_focused()  # though it was disabled meanwhile
    loss, predicted, measured = (number(page, f"#loss-{x}") for x in ("before", "predicted", "measured"))
    assert loss == pytest.approx(session.sentence(TEXT).trace.loss, rel=1e-6)
    assert measured < loss and measured - loss == pytest.approx(predicted - loss, rel=0.2)
    expect(page.locator(".outcome")).to_contain_text("as predicted")
    expect(page.locator("#steps-taken")).to_have_text("after 1 step")
    page.click("#step-many")
    expect(page.locator("#steps-taken")).to_have_text("after 21 steps")
    expect(idle).to_be_visible()
    assert page.locator(".measured-point").count() == 22
    assert number(page, "#loss") < measured
    assert page.locator(".moves tbody tr").count() == len(TEXT) - 1
    page.click("#tab-station")
    expect(page.locator("#badge")).to_have_class("badge good")  # checked again for the new weights
    page.click("#tab-step")
    page.click("#step-reset")
    expect(page.locator("#steps-taken")).to_have_text("")
    assert number(page, "#loss") == session.sentence(TEXT).trace.loss


def test_a_new_sentence_ends_a_run_and_keeps_the_weights(open_page: Open, session: Session) -> None:
    page = open_page("#/step")
    asked: list[Route] = []

    def hold(route: Route) -> None:
        asked.append(route)
        if len(asked) == 1:
            route.continue_()

    page.route("**/api/step", hold)
    page.click("#step-many")
    expect(page.locator(".measured-point")).to_have_count(2)
    page.fill("#sentence", "another")
    expect(page.locator("#tokens button")).to_have_count(7)
    with page.expect_response("**/api/step"):
        asked[1].continue_()  # the old run answers after the new sentence
    page.wait_for_timeout(300)
    assert len(asked) == 2 and page.locator(".measured-point").count() == 0
    expect(page.locator("#view-step .problem")).to_contain_text("it was not taken")
    expect(page.locator("#step-many")).to_have_text("run 20")
    expect(page.locator("#steps-taken")).to_have_text("after 1 step")
    loss = number(page, "#loss")
    assert loss in [session.sentence("another", version).trace.loss for version in list(session._versions)]
    page.evaluate("location.hash = '#/step?text=a+much+longer+sentence'")
    expect(page.locator("#tokens button")).to_have_count(22)
    expect(page.locator("#steps-taken")).to_have_text("after 1 step")
    page.unroute("**/api/step")
    traces: list[Route] = []
    page.route("**/api/sentence", lambda route: traces.append(route))
    page.click("[data-choice=position]")
    page.click("#step-one")  # while a trace is computed
    expect(page.locator("#view-step [role=status]")).to_have_text("Waiting for the trace…")
    traces[0].continue_()
    expect(page.locator(".moves tbody tr")).to_have_count(21)
    expect(page.locator("#steps-taken")).to_have_text("after 2 steps")
    assert "objective=position" in page.url
    page.unroute("**/api/sentence")
    page.click("#reset-weights")
    expect(page.locator("#steps-taken")).to_have_text("")
    expected = session.sentence("a much longer sentence").trace.loss
    assert number(page, "#loss") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.some_cases(3)
def test_no_number_is_cut_off(open_page: Open, width: int) -> None:
    page = open_page("#/step", viewport={"width": width, "height": 760})

    def extreme(route: Route) -> None:
        answer = route.fetch().json()
        for flow in answer.get("flows", []):
            flow["a"] = flow["a"] and [1.7e11 * x for x in flow["a"]]
            flow["delta"] = flow["delta"] and [1.7e-14 * x for x in flow["delta"]]
        answer.update({"measured": -6.67e10, "predicted": 6.67e10} if "measured" in answer else {})
        route.fulfill(json=answer)

    page.route(re.compile("/api/(sentence|step|overview)"), extreme)
    page.fill("#sentence", "another")
    expect(page.locator("#tokens button")).to_have_count(7)
    cut = "nodes => nodes.filter(n => n.scrollWidth > n.clientWidth).map(n => n.textContent)"
    numbers = page.locator("#map .num")
    assert any("·10⁻¹" in text for text in numbers.all_inner_texts()) and numbers.evaluate_all(cut) == []
    page.click("#step-one")
    expect(page.locator(".curve text").first).to_contain_text("·10¹⁰")
    expect(page.locator("#steps-taken")).to_have_text("after 1 step")
    expect(page.locator("#step-one:not([aria-disabled])")).to_be_visible()
    assert page.locator(".curve text").evaluate_all("nodes => Math.min(...nodes.map(n => n.getBBox().x))") >= 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("where", "message"),
    [("station/a_1/forward?text=x", "at least two tokens"), (f"flow?text={'x' * 60}", "at most 48"),
     ("station/blocks.7.a_3/backward", "no station ‘blocks.7.a_3’"), ("nowhere", "no view ‘nowhere’")],
)  # fmt: skip
@pytest.mark.some_cases(3)
def test_an_invalid_link_shows_a_message(browser: Browser, url: str, where: str, message: str) -> None:
    context = browser.new_context()  # the browser logs the rejected request
    page = context.new_page()
    page.goto(f"{url}#/{where}")
    page.wait_for_selector("html[data-ready=yes]")
    expect(page.locator("#status.problem")).to_contain_text(message)
    expect(page.locator("#sentence")).to_have_value(TEXT)
    assert page.locator("#tokens button").count() == len(TEXT)
    context.close()


def test_gradient_flow(open_page: Open, session: Session) -> None:
    page = open_page("#/flow", viewport={"width": 1280, "height": 400})
    expect(page.locator("#view-flow .caption").first).to_contain_text("the largest share of the error")
    sentence = session.sentence(TEXT)
    shown = {b.get_attribute("aria-label"): b.get_attribute("data-value") for b in page.locator(".groups button").all()}
    (found,) = [float(v or "") for k, v in shown.items() if k and k.startswith("gradient of w_8, block 2")]
    assert found == sentence.trace["blocks.1.grad_w_8"].norm().item()
    canvas = page.locator("#view-flow canvas").first
    left, width = (float(canvas.get_attribute(f"data-{x}") or "") for x in ("left", "cell-width"))
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": left + 2.5 * width, "y": box["height"] - 6})
    expect_station(page, "a_11")
    assert "token=2" in page.url and "backward" in page.url
    page.go_back()
    page.locator("#view-flow .groups button").last.click()  # far below
    expect(page.locator("#view-station h2").first).to_be_in_viewport()
    page.go_back()
    page.click("[data-choice=product]")
    figure, names = page.locator(".flow-card figure"), {"trace": sentence.trace, "torch": torch}
    for rows, height in (("all", 16), ("none", 4), ("1", 10)):  # all rows; ends of blocks; and all rows of one block
        page.select_option("#flow-rows", rows)
        expect(figure.locator(".shape")).to_have_text(f"{height} × {len(TEXT)}")
        made = evaluate(figure.locator(".python").text_content() or "", **names)
        canvas.hover(position={"x": left + 2.5 * width, "y": float(canvas.get_attribute("data-top") or "") + 6})
        assert made.shape == (height, len(TEXT))
        first = sentence.trace["blocks.0.a_1"][2].norm() * sentence.trace["blocks.0.delta_1"][2].norm()
        assert made[0, 2].item() == pytest.approx(first.item(), rel=1e-6)
        shown_value = float(figure.locator(".readout").inner_text().rpartition(" ")[2])
        assert shown_value == pytest.approx(first.item(), rel=1e-2)


def test_arrow_keys_move_between_stations(open_page: Open, session: Session) -> None:
    page = open_page("#/station/a_12/forward")
    page.focus('#map [data-key="a_12"]')
    for key, station, direction in (
        ("ArrowDown", "loss", "forward"), ("ArrowRight", "loss", "backward"), ("ArrowRight", "a_12", "backward"),
        ("ArrowUp", "a_11", "backward"), ("ArrowDown", "a_12", "backward"),
    ):  # fmt: skip
        page.keyboard.press(key)
        expect_station(page, station)
        expect(page.locator("#view-station .station-head")).to_have_class(f"station-head {direction}")
        assert f"#/station/{station}/{direction}" in page.url
        expect(page.locator("#map .here")).to_be_focused()
    page.go_back()
    expect_station(page, "a_11")
    page.locator('canvas[data-name="a_11"]').focus()
    page.keyboard.press("ArrowRight")  # inside a heat map the arrows move its cursor
    page.keyboard.press("ArrowRight")
    expect(page.locator("figure.heat .readout").first).to_contain_text("feature 1")
    expect_station(page, "a_11")


def test_home_and_end_choose_the_first_and_the_last_tab(open_page: Open) -> None:
    page = open_page("#/flow")
    tabs = page.locator("[role=tab]")
    page.locator("#tab-flow").focus()
    for key, tab in (("End", tabs.last), ("ArrowRight", tabs.first), ("End", tabs.last), ("Home", tabs.first)):
        page.keyboard.press(key)
        expect(tab).to_have_attribute("aria-selected", "true")
        expect(tab).to_be_focused()


def test_the_chosen_token_is_in_view_on_a_phone(open_page: Open) -> None:
    address = f"#/station/a_1/forward?token=44&text={45 * 'm'}"
    page = open_page(address, viewport={"width": 360, "height": 740})
    strip, chosen = page.locator("#tokens .chips"), page.locator('#tokens [aria-pressed="true"]')
    expect(chosen).to_have_attribute("data-token", "44")
    outer, inner = strip.bounding_box(), chosen.bounding_box()
    assert outer is not None and inner is not None
    assert outer["y"] <= inner["y"] and inner["y"] + inner["height"] <= outer["y"] + outer["height"] + 1
    strip.evaluate("node => (node.scrollTop = 0)")
    page.click("#tab-flow")
    expect(page.locator("#view-flow h2")).to_be_visible()
    assert strip.evaluate("node => node.scrollTop") == 0  # a redraw leaves alone what the reader has scrolled


def test_blocks_unfold_and_arrows_can_be_selected(open_page: Open) -> None:
    page = open_page()
    expect(page.locator('#map [data-key="blocks.1.a_6"]')).to_have_count(0)
    page.click('#map [data-key="block 1"]')
    page.click('#map [data-key="blocks.1.a_6"]')
    expect_station(page, "blocks.1.a_6")
    assert page.locator("#map .skipline.forward").count() == page.locator("#map .skipline.backward").count() == 2
    page.click(".map-choice button >> nth=0")
    assert page.locator("#map .flow.backward").count() == 0 < page.locator("#map .flow.forward").count()


def test_zooming_and_back(open_page: Open, session: Session) -> None:
    page = open_page("#/station/blocks.1.a_7/forward")
    canvas = page.locator('canvas[data-name="blocks.1.a_7"]')
    box = canvas.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.5, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=4)
    page.mouse.up()
    show_all = page.locator("figure.heat", has=canvas).locator("button", has_text="show all")
    expect(show_all).to_be_visible()
    show_all.click()
    expect(show_all).to_be_hidden()


def test_a_broken_formula_turns_its_badge_red(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layernorm, "grad_w", lambda delta, a_bar, into: 1.01 * (a_bar * delta).sum(0))
    with Server(make_session(n_blocks=1)) as url:
        page = open_page("#/station/blocks.0.a_6/backward", base=url)
        expect(page.locator("#badge")).to_have_class("badge bad")
        expect(page.locator("#badge")).to_contain_text("the fault is in this layer")
        expect(page.locator('#map [data-key="blocks.0.a_6"] .tick')).to_have_class("tick bad")
        page.click('#map [data-key="blocks.0.a_7"]')
        expect_station(page, "blocks.0.a_7")
        expect(page.locator("#badge")).to_have_class("badge good")
        ticks = page.locator("#map .tick")
        expect(ticks.filter(has_text=re.compile("[✔✘]"))).to_have_count(ticks.count())  # the page asks until then


def test_only_adapters_are_trained(open_page: Open) -> None:
    with Server(make_session(lora=2, n_blocks=1)) as url:
        page = open_page("#/station/blocks.0.a_7/backward", base=url)
        expect(page.locator("#badge")).to_have_class("badge good")
        expect(page.locator("#frozen")).to_contain_text("w_6")
        grads = page.locator("[data-grad]").evaluate_all("nodes => nodes.map((node) => node.dataset.grad)")
        assert sorted(grads) == ["blocks.0.grad_d_6", "blocks.0.grad_u_6"]
        expect(page.locator("#zero-down")).to_contain_text("u starts at 0")
        page.click("#tab-flow")
        expect(page.locator(".groups th[scope=col]").first).to_be_visible()
        shown = page.locator(".groups th[scope=col]").all_inner_texts()
        assert shown and all(re.fullmatch("∂[du]_.*", name) for name in shown)
        page.click("#tab-step")
        expect(page.locator("#view-step")).to_contain_text("only the adapters are trained")
        page.click("#step-one")
        expect(page.locator("#steps-taken")).to_have_text("after 1 step")
        page.click("#tab-compare")
        page.click("#compare-base")
        expect(page.locator("#view-compare .trio")).to_have_count(2)
        expect_all_proven(page)


@pytest.mark.parametrize("size", [(1280, 900), (360, 740)])
@pytest.mark.some_cases(3)
def test_the_tour_shows_its_subjects(open_page: Open, size: tuple[int, int]) -> None:
    page = open_page(viewport={"width": size[0], "height": size[1]})
    page.click("#tour-button")
    for i in range(1, 11):
        expect(page.locator("#tour .where")).to_have_text(f"Tour · {i} of 10")
        expect(page.locator("#tour")).to_have_attribute("data-pointed", str(i))
        subject, box = page.locator(".subject").bounding_box(), page.locator("#tour").bounding_box()
        assert subject is not None and box is not None
        top, bottom = max(subject["y"], 0), min(subject["y"] + subject["height"], size[1])
        left, right = max(subject["x"], 0), min(subject["x"] + subject["width"], size[0])
        assert bottom - top > 30, f"the subject of stop {i} is not on the screen"
        wide = min(right, box["x"] + box["width"]) - max(left, box["x"])
        high = min(bottom, box["y"] + box["height"]) - max(top, box["y"])
        covered = max(0.0, wide) * max(0.0, high) / ((right - left) * (bottom - top))
        assert covered < 0.5, f"the box covers {covered:.0%} of the subject of stop {i}"
        if i < 10:
            page.click("#tour-next")
    assert page.url.endswith("#/step")
    page.click("#tour-end")
    expect(page.locator("#tour")).to_be_hidden()
    assert page.locator(".subject").count() == 0


def visit_every_view(page: Page) -> Iterator[str]:
    """Open every view that has a tab, one after another, with its results; of the stations five kinds."""
    views = page.locator("[role=tab]").evaluate_all("tabs => tabs.map((tab) => tab.id.replace('tab-', ''))")
    for view in views:
        for station in STATIONS if view == "station" else [""]:
            go(page, view + station)
            if station:
                expect_station(page, station.split("/")[1])
                expect(page.locator("#badge")).to_have_class("badge good")
            if view == "step":
                page.click("#step-one")
                expect(page.locator("#steps-taken")).to_have_text("after 1 step")
            yield view + station


STATIONS = (
    "/a_0/forward",
    "/blocks.1.a_3/backward",
    "/blocks.0.a_5/backward",
    "/blocks.0.a_8/backward",
    "/loss/backward",
)


@pytest.mark.parametrize(
    ("scheme", "width", "rules"),
    [("light", 1280, ()), pytest.param("dark", 1920, ("color-contrast",), marks=pytest.mark.long)],
    ids=["light", "dark"],
)
def test_no_accessibility_violations(open_page: Open, scheme: str, width: int, rules: tuple[str, ...]) -> None:
    """The schemes differ in their colors only. Nothing overflows at these widths."""
    page = open_page(color_scheme=scheme, viewport={"width": width, "height": 760})
    expect(page.locator("html")).to_have_attribute("data-theme", scheme)
    for where in visit_every_view(page):
        check_accessibility(page, *rules)
        assert overflow(page) <= 0, where


@pytest.mark.long
def test_nothing_overflows_on_a_phone(open_page: Open) -> None:
    page = open_page(viewport={"width": 360, "height": 760})
    for where in visit_every_view(page):
        assert overflow(page) <= 0, where


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth") - page.viewport_size["width"]  # type: ignore[index,no-any-return]


def test_the_exported_file_works_offline(open_page: Open, session: Session, tmp_path: Path) -> None:
    html = export(session, TEXT)
    assert len(html.encode()) < MAX_BYTES
    file = tmp_path / "page.html"
    file.write_text(html, encoding="utf-8")
    page = open_page(base=file.as_uri(), offline=True)
    page.click("#tour-button")
    for _ in range(9):
        page.click("#tour-next")
    page.click("#tour-end")
    page.goto(f"{file.as_uri()}#/station/a_1/forward")
    trace = session.sentence(TEXT).trace
    for station in session.stations[1:]:
        expect_station(page, station.id)
        expect(page.locator("#badge")).to_have_class("badge good")
        assert page.locator(".formula math").count() >= 2
        if station.id != "loss":
            page.click("#walk-on")
    page.goto(f"{file.as_uri()}#/station/blocks.1.a_3/backward")
    expect_station(page, "blocks.1.a_3")
    assert number(page, '[data-stat="delta norm"]') == pytest.approx(
        trace["blocks.1.delta_3"].double().norm().item(), rel=1e-5
    )
    page.click('[data-head-button="1"]')
    expect(page.locator(".attention")).to_have_attribute("data-shown-head", "1")
    page.hover('canvas[data-name="blocks.1.rho"]')
    expect(page.locator(".squares .readout").first).to_contain_text("≈")
    page.click("#tab-flow")
    expect(page.locator("#view-flow .caption").first).to_contain_text("the largest share of the error")
    page.click("#tab-step")
    page.click("#step-one")
    expect(page.locator("#loss-measured")).to_be_visible()
    expect(page.locator("#step-many")).to_have_text("run 11")
    page.click("#step-many")
    expect(page.locator("#view-step [role=status]")).to_contain_text("run handgrad explain")
    assert page.locator(".measured-point").count() == 13 and page.locator("[role=alert]").count() == 0
    expect(page.locator("#steps-taken")).to_have_text("after 12 steps")
    assert page.locator("#loss").get_attribute("data-value") == page.locator("#loss-measured").get_attribute(
        "data-value"
    )


@pytest.mark.long
def test_the_exported_page_of_another_family(open_page: Open, tmp_path: Path) -> None:
    """Grouped queries, rotation, q/k norms, RMSNorm and a gate, in one page load."""
    session = make_session(**{**QWEN3, "n_blocks": 1})
    trace = session.sentence(TEXT).trace
    file = tmp_path / "page.html"
    file.write_text(export(session, TEXT), encoding="utf-8")
    page = open_page("#/station/a_0/forward", base=file.as_uri(), offline=True)
    for station in session.stations:
        expect_station(page, station.id)
        expect(page.locator("#badge")).to_have_class("badge good")
        assert page.locator(".formula math").count() >= 2 and page.locator("math merror").count() == 0
        assert page.locator("math[aria-label]").count() == 0  # a screen reader speaks the formula itself, not LaTeX
        assert page.locator(".math").evaluate_all(
            "lines => lines.filter((x) => x.scrollWidth > x.clientWidth + 1).length"
        ) == 0  # fmt: skip
        for name in () if station.id == "loss" else (*station.a, *station.incoming):
            row = page.locator(f'tr[data-name="{name}"]')
            shown = row.locator('[data-stat$=" norm"]').get_attribute("data-value")
            assert float(shown or "") == pytest.approx(trace[name].double().norm().item(), rel=1e-5)
        for parameter in station.parameters:
            assert number(page, f'[data-grad="{parameter.gradient}"]') == pytest.approx(
                trace[parameter.gradient].norm().item(), rel=1e-5
            )
        if station.id == "blocks.0.a_3":
            page.click('[data-head-button="3"]')
            expect(page.locator("#head-group")).to_contain_text("Heads 3, 4 share")
            page.click("text=Queries, keys and values")
            assert page.locator('canvas[data-name="blocks.0.k"]').get_attribute("data-head") == "1"
        if station.id == "blocks.0.a_7":
            expect(page.locator("h2").first).to_have_text("Expand gate, up")
            expect(page.locator("#map .here")).to_contain_text("gate, up")
            expect(page.locator("#derived-in")).to_contain_text("docs/layers/gated.md")
            check_accessibility(page)
        if station.id != "loss":
            page.click("#walk-on")
    page.click("#tab-flow")
    expect(page.locator("#view-flow .caption").first).to_contain_text("the largest share of the error")
    page.click("#tab-step")
    page.click("#step-one")
    expect(page.locator("#loss-measured")).to_be_visible()


def test_a_file_that_would_be_too_large_is_rejected(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.explain_page.export.MAX_BYTES", 1000)
    with pytest.raises(hg.HandgradError, match="shorter sentence"):
        export(session, TEXT)


def test_html_in_an_exported_sentence_stays_text(open_page: Open, tmp_path: Path) -> None:
    session = make_session(n_blocks=1, d_model=12)
    text = "</script><b>x</b><!--"
    file = tmp_path / "page.html"
    file.write_text(export(session, text), encoding="utf-8")
    page = open_page(base=file.as_uri(), offline=True)
    assert "".join(page.locator("#tokens button").all_inner_texts()) == text
    assert torch.isclose(
        torch.tensor(number(page, "#loss")),
        torch.tensor(session.sentence(text).trace.loss),
    )
    notebook = tmp_path / "notebook.html"  # the same file in a frame without an address, as a notebook shows it
    notebook.write_text(f"<html data-ready=yes>{Notebook(file.read_text(encoding='utf-8'))._repr_html_()}</html>")
    frame = open_page(base=notebook.as_uri(), offline=True).frame_locator("iframe")
    expect(frame.locator("#story")).to_be_visible()
    frame.locator("#skip").press("Enter")
    frame.locator("#tab-station").click()
    expect(frame.locator("#badge")).to_have_class("badge good")
    frame.locator("#walk-on").click()
    expect(frame.locator("#view-station")).to_have_attribute("data-station", "blocks.0.a_2")


# ── input ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_a_redraw_leaves_focus_and_open_sections_alone(open_page: Open) -> None:
    page = open_page("#/station/blocks.1.a_3/backward")
    expect(page.locator("#badge")).to_have_class("badge good")
    page.click("text=Queries, keys and values")
    page.click("text=Show all checks")
    page.click('[data-head-button="1"]')
    expect(page.locator(".attention")).to_have_attribute("data-shown-head", "1")
    expect(page.locator('[data-head-button="1"]')).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".attention")).to_have_attribute("data-shown-head", "2")
    expect(page.locator('[data-head-button="2"]')).to_be_focused()
    page.click("#tokens button >> nth=3")
    page.locator("#tokens button >> nth=3").press("ArrowRight")  # the arrows belong to the strip of tokens
    expect(page.locator("#tokens button >> nth=4")).to_be_focused()
    expect_station(page, "blocks.1.a_3")
    assert page.locator("#tokens button[tabindex='0']").count() == 1
    assert page.locator("#view-station details[open]").count() == 2
    page.locator("#walk-on").focus()
    page.keyboard.press("Enter")
    expect_station(page, "blocks.1.a_2")
    expect(page.locator("#walk-on")).to_be_focused()
    page.click("#tab-step")
    page.locator("#rate").focus()
    before = page.locator("#shown-rate").inner_text()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#shown-rate")).not_to_have_text(before)
    expect(page.locator("#rate")).to_be_focused()


REACHED = """() => {
  const seen = (window.reached = new Set()), unmarked = (window.unmarked = []);
  document.addEventListener("focusin", ({ target }) => {
    seen.add(target);
    if (!target.matches(":focus-visible")) unmarked.push(target.outerHTML);
  });
}"""
MISSED = """() => [...document.querySelectorAll("a, button, input, select, textarea, summary, [tabindex]")]
  .filter((node) => node.tabIndex >= 0 && node.checkVisibility() && !window.reached.has(node))
  .map((node) => node.outerHTML)"""


def test_everything_can_be_reached_by_keyboard(open_page: Open) -> None:
    page = open_page()
    page.evaluate(REACHED)
    for where in ("start", "station/blocks.1.a_3/backward", "exercises"):
        go(page, where)
        page.evaluate("window.reached.clear()")
        page.focus("#skip")
        for _ in range(200):
            page.keyboard.press("Tab")
            here = page.evaluate("document.activeElement.id || document.activeElement.tagName")
            if here == "code":
                page.keyboard.press("Escape")  # in the editor Tab indents
            if here == "BODY":
                break
        else:
            pytest.fail(f"the Tab key does not leave {where}")
        assert page.evaluate(MISSED) == [] and page.evaluate("window.unmarked") == [], where
    go(page, "flow")
    page.locator("#view-flow .groups button").first.press("ArrowRight")  # the table has one stop of the Tab key
    expect(page.locator("#view-flow .groups button").nth(1)).to_be_focused()
    assert page.locator("#view-flow .groups button[tabindex='0']").count() == 1
    go(page, "start")
    page.locator("#blame").press("Enter")  # disappears
    expect(page.locator("#shares")).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.doors') !== null")
    page.locator("#follow-up").press("Enter")  # leaves the view
    expect_station(page, "loss")
    page.keyboard.press("ArrowRight")
    expect_station(page, "a_12")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#view-station') !== null")


def test_a_tap_shows_the_value(open_page: Open, session: Session) -> None:
    page = open_page("#/station/blocks.1.a_7/backward", viewport={"width": 360, "height": 740}, has_touch=True)
    canvas = page.locator('canvas[data-name="blocks.1.delta_7"]')
    canvas.scroll_into_view_if_needed()
    canvas.tap(position={"x": 120, "y": 60})
    readout = page.locator("figure.heat", has=canvas).locator(".readout")
    expect(readout).to_have_attribute("data-value", re.compile(r"\d"))
    value, row, column = (float(readout.get_attribute(f"data-{k}") or "") for k in ("value", "row", "column"))
    assert value == session.sentence(TEXT).trace["blocks.1.delta_7"][int(row), int(column)].item()
    expect(readout).to_contain_text({" ": "␣"}.get(TEXT[int(row)], TEXT[int(row)]))


def test_the_error_between_tokens_points_from_row_to_column(open_page: Open) -> None:
    page = open_page("#/station/blocks.0.a_3/backward")
    figures = page.locator(".squares figure")
    for index, arrow in ((0, "←"), (2, "→")):
        canvas = figures.nth(index).locator("canvas:not(.bar)")
        left, top, cell = (float(canvas.get_attribute(f"data-{x}") or "") for x in ("left", "top", "cell-width"))
        canvas.hover(position={"x": left + 1.5 * cell, "y": top + 4.5 * cell})
        expect(figures.nth(index).locator(".readout")).to_contain_text(f"‘e’ (position 5) {arrow} ‘o’ (position 2)")


@pytest.mark.long
def test_pictures_can_be_saved(open_page: Open, session: Session) -> None:
    page = open_page("#/station/blocks.0.a_3/backward?head=1", permissions=["clipboard-read", "clipboard-write"])
    figure = page.locator("figure.heat", has=page.locator('canvas[data-name="blocks.0.delta_raw"]'))
    figure.locator(".save summary").click()
    figure.locator("text=copy as Python").click()
    expect(figure.locator(".saved")).to_have_text("copied")
    line = page.evaluate("navigator.clipboard.readText()")
    expected = eval(line, {"trace": session.sentence(TEXT).trace})
    assert torch.equal(expected, session.sentence(TEXT).trace["blocks.0.delta_raw"][1])
    found = saved(page, figure)
    assert found["PNG"].startswith(b"\x89PNG") and b"<image" in found["SVG"] and b"<text" in found["SVG"]
    head, *rows = found["CSV"].decode().strip().split("\r\n")
    read = torch.tensor([[float(x) for x in row.rsplit(",", len(TEXT))[1:]] for row in rows])
    assert torch.equal(read, expected) and head.endswith(",t")
    figure.locator(".save summary").press("Escape")
    expect(figure.locator(".save-menu")).to_be_hidden()
    for where, chosen, drawn in (
        ("station/blocks.0.a_3/backward", "figure.branches", b"<path"),
        ("heads", "figure.all-heads", b"<image"),
        ("whatif", ".parts figure >> nth=0", b"head 3"),
    ):
        go(page, where)
        page.reload()  # Chromium drops what a page downloads beyond ten files in a second
        files = saved(page, page.locator(chosen))
        assert files["PNG"].startswith(b"\x89PNG") and drawn in files["SVG"] and b"<text" in files["SVG"]
        assert len(files["CSV"].splitlines()) >= 3
    assert files["CSV"].decode().startswith("block,head 1,head 2,head 3\r\n1,")


def saved(page: Page, figure: Locator) -> dict[str, bytes]:
    """The files of a picture, by their kind."""
    if not figure.locator(".save-menu").is_visible():
        figure.locator(".save summary").click()
    found = {}
    for kind in ("PNG", "SVG", "CSV"):
        with page.expect_download() as download:
            figure.locator(f".save-menu button:text-is('{kind}')").click()
        found[kind] = Path(download.value.path()).read_bytes()
    return found


@pytest.mark.long
def test_every_line_of_python_on_the_page_runs(open_page: Open, session: Session) -> None:
    page = open_page("#/station/a_0/forward")
    sentence = session.sentence(TEXT)
    lines = page.locator("#target .python").text_content() or ""
    names: dict[str, object] = {"model": session.model}
    exec(lines, names)
    trace = names["trace"]
    assert isinstance(trace, hg.Trace) and trace.loss == sentence.trace.loss
    tried = 0
    for where in ("start", "station/a_0/forward", "station/a_1/backward", "station/blocks.0.a_3/backward?head=1", "flow",
                  "station/blocks.1.a_8/backward", "station/loss/backward", "heads", "attribution", "whatif"):  # fmt: skip
        go(page, where)
        panel = page.locator("[role=tabpanel]:not([hidden])")
        for copied in panel.locator(".save .python").all_text_contents():
            assert evaluate(copied, **names) is not None
            tried += 1
    assert tried >= 25
