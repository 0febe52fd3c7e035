"""A file with the model: in a browser it takes any sentence and step, without a server."""

from pathlib import Path
from urllib.parse import quote

import pytest
from page_helpers import Open, check_accessibility, data, expect_all_proven, go, number
from playwright.sync_api import expect
from test_live import SHAPES, in_float64, session_of
from tiny_session import TEXT, make_session

import handgrad as hg
from handgrad.cli.explain import explain
from handgrad.explain_page.export import export_live
from handgrad.explain_page.views.attribution import attribution
from handgrad.explain_page.views.patching import patch_at, patch_map_at
from handgrad.explain_page.views.step import take_step

pytest_plugins = ["page_fixtures"]
OTHER = "to bet or not"


def written(folder: Path, change: tuple[str, str] = ("", "")) -> str:
    """The address of a file with the small model."""
    html = export_live(session_of(**SHAPES["nano"]))
    assert change[0] in html
    file = folder / "page.html"
    file.write_text(html.replace(*change) if change[0] else html, encoding="utf-8")
    return file.as_uri()


def test_the_page_is_live_without_a_server(open_page: Open, tmp_path: Path) -> None:
    session = in_float64(session_of(**SHAPES["nano"]))
    page = open_page(base=written(tmp_path), offline=True)
    assert number(page, "#loss") == pytest.approx(session.sentence(TEXT).trace.loss, rel=1e-9)
    expect(page.locator("#view-start")).to_contain_text("Change the sentence above and watch")

    page.fill("#sentence", OTHER)
    page.keyboard.press("Enter")
    sentence = session.sentence(OTHER)
    expect(page.locator("#loss")).to_have_text(f"{sentence.trace.loss:.4g}")
    assert number(page, "#loss") == pytest.approx(sentence.trace.loss, rel=1e-9)

    page.click("[data-choice=position]")
    expect(page.locator("#objective")).to_contain_text("the loss of ‘")
    page.click("[data-choice=sentence]")
    expect(page.locator("#objective")).to_contain_text("the mean loss")

    go(page, f"station/blocks.1.a_7/backward?text={quote(OTHER)}")
    figure = page.locator("figure.heat", has=page.locator('canvas[data-name="blocks.1.grad_w_6"]'))
    figure.locator("canvas[data-name]").click(position={"x": 90, "y": 40})
    expect(page.locator("#follow h3")).to_contain_text("∂w_6")
    assert number(page, "#followed-sum") == pytest.approx(number(page, "#followed-value"), rel=1e-9)
    page.locator("#follow .factor", has_text="Δ").first.click()
    expect(page.locator("#follow h3")).to_contain_text("Δ₇")
    check_accessibility(page)
    page.click("#follow-close")
    page.click("#hand-toggle")
    page.click("#hand-show")
    assert data(page.locator("#hand .sum")) == pytest.approx(number(page, "#hand-value"), rel=1e-9)

    badge = page.locator("#badge")
    expect(badge).to_have_class("badge good")
    expect(badge).to_contain_text("✔ Verified on this sentence: against finite differences")
    page.click("text=Show all checks")
    assert "autograd" not in badge.inner_text() and page.locator(".checks tbody tr").count() == 4
    expect_all_proven(page)

    page.click("#tab-whatif")
    page.click("[data-part='head 0 1']")
    expect(page.locator("#change-measured")).to_be_visible()
    page.click("#tab-attribution")
    expect(page.locator("#gap")).to_be_visible()
    assert number(page, "#gap") == pytest.approx(attribution(session, sentence)["gap"], rel=1e-6)
    page.click("#tab-compare")
    page.fill("#other-sentence", TEXT)
    page.click("#compare-sentence")
    expect(page.locator("#view-compare .heat", has_text="Predicted change by head")).to_be_visible()
    page.locator("section[aria-label='Largest predicted changes'] button").first.click()
    patches = patch_map_at(session, sentence, session.sentence(TEXT))
    best = patches["largest"][0]
    expect(page.locator("#view-compare .outcome h3")).to_contain_text(f"With {best['label']} from the other trace")
    found = patch_at(
        session, sentence, session.sentence(TEXT), best["block"], head=best["head"], position=best["position"]
    )
    for name in ("predicted", "measured"):
        assert number(page, f"#patch-{name}") == pytest.approx(found[name], rel=1e-7)  # type: ignore[literal-required]
    page.click("#tab-exercises")
    expect(page.locator("#view-exercises .where, #view-exercises header").first).to_be_visible()
    assert page.locator("#view-exercises textarea").count() == 0  # nothing to judge an answer by


def test_steps_until_it_diverges(open_page: Open, tmp_path: Path) -> None:
    session = in_float64(session_of(**SHAPES["nano"]))
    page = open_page("#/step", base=written(tmp_path), offline=True)
    page.locator("#rate").fill("-1")
    page.click("#step-one")
    expect(page.locator("#steps-taken")).to_have_text("after 1 step")
    taken = take_step(session, session.sentence(TEXT), 0.1)
    for name in ("before", "predicted", "measured"):
        value = taken["loss" if name == "before" else name]  # type: ignore[literal-required]
        assert number(page, f"#loss-{name}") == pytest.approx(value, rel=1e-9)
    page.select_option("#optimizer", "Adam")
    page.locator("#rate").fill("1")
    page.click("#step-many")
    expect(page.locator("#view-step [role=alert]")).to_contain_text("choose a smaller one")
    expect(page.locator("#step-one:not([aria-disabled])")).to_be_visible()
    page.click("#reset-weights")
    expect(page.locator("#steps-taken")).to_have_text("")
    assert number(page, "#loss") == pytest.approx(session.sentence(TEXT).trace.loss, rel=1e-9)


def test_where_no_worker_is_allowed_the_page_computes(open_page: Open, tmp_path: Path) -> None:
    base = written(tmp_path, ("worker-src blob:;", "worker-src 'none';"))
    page = open_page("#/station/a_11/backward", base=base, offline=True, refused="worker-src")
    expect(page.locator("#badge")).to_have_class("badge good")


def test_what_cannot_be_live_is_refused() -> None:
    for session in (make_session(), make_session(preset="nano-llama", n_heads=4, n_kv_heads=2)):
        with pytest.raises(hg.HandgradError, match="browser's engine"):
            export_live(session)
    with pytest.raises(hg.HandgradError, match="add --html FILE"):
        explain(model="nano", live=True)
