"""The page as a folder of static files, opened from the disk with the network off."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from page_helpers import Open, check_accessibility, expect_station, number
from playwright.sync_api import Page, expect
from test_live import SHAPES, in_float64
from test_live import session_of as live_session
from tiny_session import LLAMA, TEXT, make_session

import handgrad as hg
from handgrad.cli.explain import explain
from handgrad.explain_page import export as exporting
from handgrad.explain_page.export import bundle
from handgrad.explain_page.folder import Shown, base_files, compressed, export_folder, short
from handgrad.explain_page.page_files import asset, served
from handgrad.explain_page.session.session import Session
from handgrad.explain_page.views.overview import overview, table
from handgrad.explain_page.views.station import at_station

pytest_plugins = ["page_fixtures"]
TEXTS = (TEXT, "it's 'so'")
FIRST_VIEW = 500_000  # bytes of all files together


@pytest.fixture(scope="module")
def stored() -> Session:
    session = make_session(n_blocks=1, d_model=12)
    session.command = "handgrad explain --model small"
    return session


@pytest.fixture(scope="module")
def folder(stored: Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    live = live_session(**SHAPES["nano"])
    live.name = "live"
    made = tmp_path_factory.mktemp("folder") / "demo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "STEPS", 2)
        export_folder(made, [Shown(stored, TEXTS), Shown(live, (TEXT,), live=True)])
    return made


def loaded_files(page: Page, folder: Path) -> set[str]:
    """What the page loads for the view that it opens with."""
    found: list[str] = []
    page.on("request", lambda request: found.append(unquote(urlsplit(request.url).path)))
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")
    expect(page.locator("#map .tick").first).to_have_text("✔")
    return {Path(name).relative_to(folder).as_posix() for name in found if Path(name).is_relative_to(folder)}


def test_every_view_of_every_sentence_opens_from_the_disk(open_page: Open, folder: Path, stored: Session) -> None:
    page = open_page("index.html", base=f"{folder.as_uri()}/", offline=True)
    loss = stored.sentence(TEXT).trace.loss
    assert number(page, "#loss") == pytest.approx(loss, rel=1e-5)
    assert loaded_files(page, folder) == {"index.html", "page.js", "style.css", "views.css", "data/small/table.js", *(
        f"data/small/1/{name}.js" for name in ("overview", "loss", "proofs")
    )}, "other parts are loaded when they are needed"  # fmt: skip

    for view in page.locator("[role=tab]").all():
        view.click()
        expect(page.locator("[role=tabpanel]:not([hidden]):not([aria-busy]) h2").first).to_be_visible()
        expect(page.locator(".problem")).to_have_count(0)
    for view in ("whatif", "compare"):
        page.click(f"#tab-{view}")
        expect(page.locator("#absent-command").last).to_have_text(f"handgrad explain --model small --text '{TEXT}'")
    expect(page.locator("#view-compare")).to_contain_text("The model live computes this view in your browser")
    check_accessibility(page)
    page.click("#tab-station")
    for station in stored.stations[1:]:
        expect_station(page, station.id)
        expect(page.locator("#badge")).to_have_class("badge good")
        assert page.locator(".formula math").count() >= 2
        if station.id != "loss":
            page.click("#walk-on")

    page.select_option("#sentences", TEXTS[1])
    expect(page.locator("#loss")).to_have_text(f"{stored.sentence(TEXTS[1]).trace.loss:.4g}")
    assert "text=it" in page.url
    page.click("#tab-compare")
    expect(page.locator("#absent-command").last).to_have_text(
        r"handgrad explain --model small --text 'it'\''s '\''so'\'''"
    )
    page.click("#tab-step")
    page.click("#step-one")
    expect(page.locator("#loss-measured")).to_be_visible()
    page.go_back()
    page.go_back()
    page.go_back()
    expect(page.locator("#loss")).to_have_text(f"{loss:.4g}")
    expect(page.locator("#sentences")).to_have_value(TEXT)


def test_a_sentence_that_is_not_stored(open_page: Open, folder: Path) -> None:
    page = open_page("index.html#/flow?text=other", base=f"{folder.as_uri()}/", offline=True)
    expect(page.locator("#status")).to_contain_text("To see it, run: handgrad explain --model small --text 'other'")
    expect(page.locator("#view-flow .caption").first).to_contain_text("the largest share of the error")


def test_the_other_model_is_live(open_page: Open, folder: Path) -> None:
    page = open_page("index.html", base=f"{folder.as_uri()}/", offline=True)
    page.click("#tab-whatif")
    page.select_option("#models", "live")
    page.wait_for_url("**/index.html?model=live#/whatif*")
    page.click("[data-part='head 0 1']")
    expect(page.locator("#change-measured")).to_be_visible()
    page.fill("#sentence", "to bet or not")
    page.keyboard.press("Enter")
    loss = in_float64(live_session(**SHAPES["nano"])).sentence("to bet or not").trace.loss
    expect(page.locator("#loss")).to_have_text(f"{loss:.4g}")
    assert number(page, "#loss") == pytest.approx(loss, rel=1e-9)


def test_the_first_view_is_small() -> None:
    """With the stations, heads and number of tokens of SmolLM2's first sentence."""
    shape = {**LLAMA, "n_blocks": 30, "n_heads": 9, "n_kv_heads": 3, "d_model": 36, "n_vocab": 256}
    session = make_session(**shape)
    sentence = session.sentence("The capital of ")
    parts = {
        "table": table(session), "overview": overview(session, sentence),
        "loss": at_station(session, sentence, session.by_id["loss"]),
        "proofs": {station.id: {"passed": True, "state": "autograd"} for station in session.stations},
    }  # fmt: skip
    files = {**base_files([]), **{name: compressed({name: part}) for name, part in parts.items()}}
    sizes = {name: len(text.encode()) for name, text in files.items()}
    assert len(session.stations) == 275 and len(sentence.ids) == 15 and sum(sizes.values()) < FIRST_VIEW, sizes


def test_a_script_without_comments_is_the_same_script() -> None:
    for name in served():
        assert not name.endswith(".js") or all(line.count("`") % 2 == 0 for line in asset(name).splitlines()), name
    whole, less = bundle(), short(bundle())
    assert len(less) < 0.85 * len(whole) and not re.search(r"^(\s|//)", less, re.M)
    assert short("/** a */\nconst x = 1; // b\n  /** @type {y} */ (z);\n  /**\n   * c */\n  w();\n") == (
        "const x = 1; // b\n/** @type {y} */ (z);\nw();\n"
    )


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path, stored: Session) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("mine")
    (tmp_path / "file").write_text("")
    for name, said in (("mine", "has other files"), ("file", "is a file"), ("no/demo", "does not exist")):
        with pytest.raises(hg.HandgradError, match=said):
            explain(model="nano", folder=tmp_path / name)
    with pytest.raises(hg.HandgradError, match="one of them"):
        explain(model="nano", folder=tmp_path / "x", html=tmp_path / "y")
    with pytest.raises(hg.HandgradError, match="--folder"):
        explain(model="nano", text=["ab", "cd"])
    with pytest.raises(hg.HandgradError, match="at most 48"):
        export_folder(tmp_path / "long", [Shown(stored, [TEXT, "x" * 50])])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]
    assert (tmp_path / "mine" / "index.html").read_text() == "mine"


def test_the_folder_is_replaced(tmp_path: Path) -> None:
    session = live_session(**SHAPES["nano"])
    for name in ("one", "two words/é"):
        session.name = name
        export_folder(tmp_path, [Shown(session, (TEXT,), live=True)])
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"program.js", "two_words__"}
    assert "two words/é" in (tmp_path / "index.html").read_text()
