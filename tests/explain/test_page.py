"""The page in a real browser: what it shows equals the trace."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright
from tiny_session import QWEN3, TEXT, make_session

import handgrad as hg
from handgrad.explain.export import MAX_BYTES, export
from handgrad.explain.server import Server
from handgrad.explain.session import Session
from handgrad.ops import layernorm

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--no-first-run"]  # fmt: skip
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
LEFT_OUT = "no Chromium found: the tests of the explain page in a real browser were LEFT OUT"

pytestmark = pytest.mark.skipif(CHROMIUM is None and os.environ.get("CI") != "true", reason=LEFT_OUT)
Open = Callable[..., Page]
TIMEOUT = 120_000  # ms; the machine may be busy
expect.set_options(timeout=TIMEOUT)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None, "CI=true but no Chromium found: install it (apt-get install chromium)"
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def session() -> Session:
    return make_session()


@pytest.fixture(scope="module")
def url(session: Session) -> Iterator[str]:
    with Server(session) as url:
        yield url


@pytest.fixture
def open_page(browser: Browser, url: str) -> Iterator[Open]:
    """Open pages; fail if one logs an error or requests anything from another host."""
    contexts, errors = [], []

    def open_one(where: str = "", *, tour: bool = False, base: str = url, **options: object) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})  # type: ignore[arg-type]
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith((base, "data:", "blob:")) else errors.append(r.url))
        if not tour:
            page.add_init_script("try { localStorage.setItem('handgrad tour', 'seen') } catch {}")
        page.goto(base + where)
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert errors == []


def expect_station(page: Page, station: str) -> None:
    expect(page.locator("#view-station")).to_have_attribute("data-station", station)


def test_it_loads_the_first_station(open_page: Open, session: Session) -> None:
    page = open_page()
    expect(page.locator("#model")).to_contain_text("small · 2 blocks · d = 24")
    sentence = session.sentence(TEXT)
    assert float(page.locator("#loss").get_attribute("data-value") or "") == sentence.trace.loss
    assert page.locator("#tokens button").all_inner_texts() == [{" ": "␣"}.get(c, c) for c in TEXT]
    assert "#/station/a_1/forward" in page.url
    expect(page.locator("#map .here")).to_have_attribute("data-key", "a_1")


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
        if station.id != "loss":
            page.click("#walk-on")
    expect(page.locator("#map .tick.good", has_text="✔")).to_have_count(23 + 2)  # including the two block headings


def test_the_numbers_equal_the_trace(open_page: Open, session: Session) -> None:
    page = open_page("#/station/blocks.1.a_7/backward")
    trace = session.sentence(TEXT).trace
    for kind, name in (("a", "blocks.1.a_7"), ("delta", "blocks.1.delta_7")):
        x = trace[name].double()
        for stat, expected in (("norm", x.norm()), ("most", x.max()), ("least", x.min()), ("mean", x.mean())):
            shown = page.locator(f'[data-stat="{kind} {stat}"]').get_attribute("data-value")
            assert float(shown or "") == pytest.approx(expected.item(), rel=1e-12)
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
        shown = page.locator(f'[data-grad="blocks.1.grad_{symbol}"]').get_attribute("data-value")
        assert float(shown or "") == trace[f"blocks.1.grad_{symbol}"].norm().item()


def test_the_colours_match_the_numbers(open_page: Open, session: Session) -> None:
    """Read the pixels of ρ back from the canvas: orange for large values, the colour of zero for 0."""
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
    assert float(page.locator("#loss").get_attribute("data-value") or "") == sentence.trace.loss
    shown = page.locator('[data-stat="delta norm"]').get_attribute("data-value")
    assert float(shown or "") == pytest.approx(sentence.trace["delta_11"].double().norm().item(), rel=1e-12)
    expect(page.locator("#badge")).to_have_class("badge good")
    assert "text=another+thing" in page.url
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")
    expect(page.locator("#sentence")).to_have_value("another thing")


def test_malicious_and_invalid_sentences(open_page: Open, browser: Browser, url: str) -> None:
    page = open_page()
    page.fill("#sentence", '<img src=x onerror="window.bad=1"><b>')
    expect(page.locator("#tokens button").first).to_have_text("<")
    for where in ("a_0", "loss"):
        page.click(f'#map [data-key="{where}"]')
        expect_station(page, where)
    assert page.evaluate("window.bad") is None and page.locator("main img").count() == 0
    page.fill("#sentence", "\x01\x1b[0m\x7f\u202eabc")
    expect(page.locator("#tokens button").first).to_have_text("␁")
    # rejected requests are logged by the browser, so use a page without the check for errors
    context = browser.new_context()
    other = context.new_page()
    other.goto(url)
    other.wait_for_selector("html[data-ready=yes]")
    other.click("#tour-end")
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
    own = page.locator(".bars.signed .target .figure").get_attribute("data-value")
    assert float(own or "") == delta[3, ord(TEXT[4])].item()
    page.click('.loss-card .strip button:has-text("t") >> nth=0')
    assert "pulled up" in page.locator("#push-caption").inner_text()
    page.click(".loss-card .strip button >> nth=-1")
    expect(page.locator(".loss-card")).to_contain_text("no target")


def test_the_lens_follows_the_token(open_page: Open) -> None:
    page = open_page("#/station/blocks.0.a_5/backward")
    before = page.locator(".lens .caption").inner_text()
    page.click("#tokens button >> nth=4")
    expect(page.locator(".lens .caption")).not_to_have_text(before)
    assert page.locator(".lens .bars").count() == 3
    expect(page.locator(".lens h3")).to_contain_text(f"‘{TEXT[4]}’")


def test_a_step_lowers_the_loss_as_predicted(open_page: Open, session: Session) -> None:
    page = open_page("#/step")
    assert "null" not in page.locator("body").inner_text()
    page.locator("#rate").fill("-3")
    page.click("#step-one")
    idle = page.locator("#step-many:not([disabled])", has_text="run 20")
    expect(idle).to_be_visible()
    loss, predicted, measured = (
        float(page.locator(f"#loss-{x}").get_attribute("data-value") or "") for x in ("before", "predicted", "measured")
    )
    assert loss == pytest.approx(session.sentence(TEXT).trace.loss, rel=1e-6)
    assert measured < loss and measured - loss == pytest.approx(predicted - loss, rel=0.2)
    expect(page.locator(".outcome")).to_contain_text("as predicted")
    expect(page.locator("#steps-taken")).to_have_text("after 1 step")
    page.click("#step-many")
    expect(page.locator("#steps-taken")).to_have_text("after 21 steps")
    expect(idle).to_be_visible()
    assert page.locator(".measured-point").count() == 22
    assert float(page.locator("#loss").get_attribute("data-value") or "") < measured
    assert page.locator(".moves tbody tr").count() == len(TEXT) - 1
    page.click("#tab-station")
    expect(page.locator("#badge")).to_have_class("badge good")  # checked again for the new weights
    page.click("#tab-step")
    page.click("#step-reset")
    expect(page.locator("#steps-taken")).to_have_text("")
    assert float(page.locator("#loss").get_attribute("data-value") or "") == session.sentence(TEXT).trace.loss


def test_a_new_sentence_ends_a_run(open_page: Open, session: Session) -> None:
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
    expect(page.locator("#step-many")).to_have_text("run 20")
    expect(page.locator("#steps-taken")).to_have_text("")
    assert "".join(page.locator("#tokens button").all_inner_texts()) == "another"
    assert float(page.locator("#loss").get_attribute("data-value") or "") == session.sentence("another").trace.loss


def test_a_new_sentence_in_the_address_discards_the_steps(open_page: Open) -> None:
    page = open_page("#/step")
    page.click("#step-one")
    expect(page.locator("#steps-taken")).to_have_text("after 1 step")
    page.evaluate("location.hash = '#/step?text=a+much+longer+sentence'")
    expect(page.locator("#tokens button")).to_have_count(22)
    assert page.locator(".measured-point").count() == 0
    page.click("#step-one")
    expect(page.locator(".moves tbody tr")).to_have_count(21)
    expect(page.locator("#steps-taken")).to_have_text("after 1 step")
    page.go_back()
    expect(page.locator("#tokens button")).to_have_count(len(TEXT))
    assert page.locator(".measured-point").count() == 0


@pytest.mark.parametrize("width", [360, 1280])
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
    expect(page.locator("#step-one")).to_be_enabled()
    assert page.locator(".curve text").evaluate_all("nodes => Math.min(...nodes.map(n => n.getBBox().x))") >= 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("where", "message"),
    [("station/a_1/forward?text=x", "at least two tokens"), (f"flow?text={'x' * 60}", "at most 48"),
     ("station/blocks.7.a_3/backward", "no station ‘blocks.7.a_3’"), ("nowhere", "no view ‘nowhere’")],
)  # fmt: skip
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
    page = open_page("#/flow")
    expect(page.locator("#view-flow .caption").first).to_contain_text("the most error reaches")
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


def test_arrow_keys_move_between_stations(open_page: Open, session: Session) -> None:
    page = open_page("#/station/a_12/forward")
    page.focus('#map [data-key="a_12"]')
    for key, station, direction in (
        ("ArrowDown", "loss", "forward"), ("ArrowRight", "loss", "backward"), ("ArrowRight", "a_12", "backward"),
        ("ArrowUp", "a_11", "backward"), ("ArrowDown", "a_12", "backward"),
    ):  # fmt: skip
        page.keyboard.press(key)
        expect_station(page, station)
        expect(page.locator(".station-head")).to_have_class(f"station-head {direction}")
        assert f"#/station/{station}/{direction}" in page.url
        expect(page.locator("#map .here")).to_be_focused()
    page.go_back()
    expect_station(page, "a_11")
    page.locator('canvas[data-name="a_11"]').focus()
    page.keyboard.press("ArrowRight")  # inside a heat map the arrows move its cursor
    page.keyboard.press("ArrowRight")
    expect(page.locator("figure.heat .readout").first).to_contain_text("feature 1")
    expect_station(page, "a_11")


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
    page = open_page("#/station/a_12/forward")
    canvas = page.locator('canvas[data-name="a_12"]')
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


def test_only_adapters_are_trained(open_page: Open) -> None:
    with Server(make_session(lora=2, n_blocks=1)) as url:
        page = open_page("#/station/blocks.0.a_7/backward", base=url)
        expect(page.locator("#badge")).to_have_class("badge good")
        expect(page.locator(".parameters")).to_contain_text("frozen")
        assert page.locator('[data-grad="blocks.0.grad_u_6"]').count() == 1
        page.click("#tab-step")
        expect(page.locator("#view-step")).to_contain_text("only the adapters are trained")
        page.click("#step-one")
        expect(page.locator("#steps-taken")).to_have_text("after 1 step")


def test_the_tour_has_ten_stops(open_page: Open) -> None:
    page = open_page(tour=True)
    expect(page.locator("#tour")).to_be_visible()
    for i in range(1, 11):
        expect(page.locator("#tour .where")).to_have_text(f"Tour · {i} of 10")
        if i < 10:
            page.click("#tour-next")
    assert page.url.endswith("#/step")
    page.click("#tour-end")
    expect(page.locator("#tour")).to_be_hidden()
    page.goto(page.url.split("#")[0])
    page.wait_for_selector("html[data-ready=yes]")
    expect(page.locator("#tour")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_accessibility_violations(open_page: Open, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    expect(page.locator("html")).to_have_attribute("data-theme", scheme)
    for where in ("station/a_0/forward", "station/blocks.1.a_3/backward", "station/blocks.0.a_5/backward",
                  "station/loss/backward", "flow", "step"):  # fmt: skip
        page.goto(f"{page.url.split('#')[0]}#/{where}")
        expect(page.locator("[role=tabpanel]:not([hidden]) h2")).to_be_visible()
        if where.startswith("station"):
            expect_station(page, where.split("/")[1])
            expect(page.locator("#badge")).to_have_class("badge good")
        if where == "step":
            page.click("#step-one")
            expect(page.locator("#steps-taken")).to_have_text("after 1 step")
        found = Axe().run(page).response["violations"]
        assert [(v["id"], v["impact"], v["nodes"][0]["html"]) for v in found] == []


@pytest.mark.parametrize("width", [360, 1920])
def test_nothing_overflows_at_any_width(open_page: Open, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 760})
    for where in ("station/blocks.1.a_3/backward", "station/loss/backward", "station/a_0/forward", "flow", "step"):
        page.goto(f"{page.url.split('#')[0]}#/{where}")
        expect(page.locator("[role=tabpanel]:not([hidden]) h2")).to_be_visible()
        if where.startswith("station"):
            expect_station(page, where.split("/")[1])
        if where == "step":
            page.click("#step-one")
            expect(page.locator("#steps-taken")).to_have_text("after 1 step")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_exported_file_works_offline(open_page: Open, session: Session, tmp_path: Path) -> None:
    html = export(session, TEXT)
    assert len(html.encode()) < MAX_BYTES
    file = tmp_path / "page.html"
    file.write_text(html, encoding="utf-8")
    page = open_page(base=file.as_uri(), offline=True, tour=True)
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
    shown = page.locator('[data-stat="delta norm"]').get_attribute("data-value")
    assert float(shown or "") == pytest.approx(trace["blocks.1.delta_3"].double().norm().item(), rel=1e-5)
    page.click('[data-head-button="1"]')
    expect(page.locator(".attention")).to_have_attribute("data-shown-head", "1")
    page.hover('canvas[data-name="blocks.1.rho"]')
    expect(page.locator(".squares .readout").first).to_contain_text("≈")
    page.click("#tab-flow")
    expect(page.locator("#view-flow .caption").first).to_contain_text("the most error reaches")
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
        assert not re.search("null|undefined|NaN", page.locator("body").inner_text())
        assert page.locator(".math").evaluate_all(
            "lines => lines.filter((x) => x.scrollWidth > x.clientWidth + 1).length"
        ) == 0  # fmt: skip
        for name in () if station.id == "loss" else (*station.a, *station.incoming):
            row = page.locator(f'tr[data-name="{name}"]')
            shown = row.locator('[data-stat$=" norm"]').get_attribute("data-value")
            assert float(shown or "") == pytest.approx(trace[name].double().norm().item(), rel=1e-5)
        for parameter in station.parameters:
            shown = page.locator(f'[data-grad="{parameter.gradient}"]').get_attribute("data-value")
            assert float(shown or "") == pytest.approx(trace[parameter.gradient].norm().item(), rel=1e-5)
        if station.id == "blocks.0.a_3":
            page.click('[data-head-button="3"]')
            expect(page.locator("#head-group")).to_contain_text("Heads 3, 4 share")
            page.click("text=Queries, keys and values")
            assert page.locator('canvas[data-name="blocks.0.k"]').get_attribute("data-head") == "1"
        if station.id == "blocks.0.a_7":
            expect(page.locator("h2").first).to_have_text("Expand gate, up")
            expect(page.locator("#map .here")).to_contain_text("gate, up")
            expect(page.locator("#derived-in")).to_contain_text("docs/layers/gated.md")
            assert [(v["id"], v["nodes"][0]["html"]) for v in Axe().run(page).response["violations"]] == []
        if station.id != "loss":
            page.click("#walk-on")
    page.click("#tab-flow")
    expect(page.locator("#view-flow .caption").first).to_contain_text("the most error reaches")
    page.click("#tab-step")
    page.click("#step-one")
    expect(page.locator("#loss-measured")).to_be_visible()


def test_a_file_that_would_be_too_large_is_rejected(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.explain.export.MAX_BYTES", 1000)
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
        torch.tensor(float(page.locator("#loss").get_attribute("data-value") or "")),
        torch.tensor(session.sentence(text).trace.loss),
    )
