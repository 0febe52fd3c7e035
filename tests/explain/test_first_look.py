"""What a newcomer meets first: the word of the story in every view, terms with names, the lines of Python, a narrow page."""

import re

import pytest
import torch
from page_helpers import Open, expect_station
from playwright.sync_api import expect
from tiny_session import TEXT, make_session, make_traced

import handgrad as hg
from handgrad.explain_page import export as exporting
from handgrad.explain_page.export import export
from handgrad.explain_page.follow.follow import follow
from handgrad.explain_page.presentation.pictures import _pool
from handgrad.explain_page.server import Server
from handgrad.explain_page.session.session import Session
from handgrad.explain_page.views.step import take_step

pytest_plugins = ["page_fixtures"]


def word_of_the_story(session: Session) -> int:
    """The position before the word that the model predicted worst, apart from the first ones."""
    sentence = session.sentence(TEXT)
    chances = sentence.trace["y_pred"][range(len(TEXT) - 1), sentence.ids[1:]]
    return 3 + int(chances[3:].argmin())


@pytest.mark.long
def test_every_view_starts_at_the_word_of_the_story(open_page: Open, session: Session) -> None:
    t = word_of_the_story(session)
    assert t > 0
    page = open_page()
    chosen = page.locator("#tokens .chips button[aria-pressed=true]")
    expect(chosen).to_have_attribute("data-token", str(t))
    page.click("text=why not another byte?")
    expect(page.locator("#objective")).to_contain_text(f"(position {t + 1})")
    best = int(session.sentence(TEXT).trace["a_12"][t].argmax())
    against, word = session.sentence(TEXT).ids[t + 1], session.token_text(best)
    assert best != against and f"difference-{t}-{best}-{against}" in page.url
    expect(page.locator(".against label")).to_contain_text(word)
    page = open_page()
    page.click("#tour-button")
    for _ in range(4):
        page.click("#tour-next")
    expect_station(page, "loss")
    expect(page.locator("#push-caption")).to_contain_text(
        f"After ‘{session.token_text(session.sentence(TEXT).ids[t])}’"
    )
    page = open_page(f"#/station/loss/backward?token={t - 1}")  # a link may ask for another one
    expect(page.locator("#tokens .chips button[aria-pressed=true]")).to_have_attribute("data-token", str(t - 1))
    page.click(f"#tokens [data-token='{t}']")
    assert "token" not in page.url
    page.click("#tab-start")
    page.click(".story-words button >> nth=2")  # the reader's word is that of all views
    expect(page).to_have_url(re.compile("token=1"))


def test_terms_name_their_tokens(open_page: Open, session: Session) -> None:
    sentence = session.sentence(TEXT)
    words = [session.token_text(id) for id in sentence.ids]
    found = follow(session, sentence, "blocks.1.grad_w_6", None, 3, 5)  # over the tokens
    a, delta = sentence.trace["blocks.1.a_6"][:, 3].double(), sentence.trace["blocks.1.delta_7"][:, 5].double()
    for term in found["terms"]:
        t = term["position"] - 1
        assert term["token"] == words[t] and term["value"] == (a[t] * delta[t]).item()
    for term in follow(session, sentence, "blocks.1.a_3", None, 4, 5)["terms"]:  # over the tokens that are attended to
        assert term["token"] == words[term["position"] - 1]
    for term in follow(session, sentence, "delta_11", None, 4, 5)["terms"]:  # over the vocabulary
        assert term["position"] is None and term["token"] in (
            factor["cell"]["column_label"] for factor in term["factors"]
        )
    for term in follow(session, sentence, "blocks.1.a_4", None, 4, 5)["terms"][:3]:  # over features
        assert term["feature"] is not None or term["factors"][0]["cell"]["name"].endswith("b_3")
    page = open_page("#/station/blocks.1.a_7/backward")
    page.locator('canvas[data-name="blocks.1.grad_w_6"]').click()
    places = page.locator("#follow .terms .place")
    expect(places.first).to_have_text(re.compile(r"^(‘.+’|a space) \(position \d+\)$"))


def test_the_lines_of_python_define_the_model(open_page: Open) -> None:
    made = make_session()
    other = Session(made.model, made.tokenizer, "small", "for a test", TEXT, "model = hg.GPT(CONFIG, seed=0).eval()")
    with Server(other) as url:
        lines = open_page(base=url).locator("#target .python").text_content() or ""
    names: dict[str, object] = {"CONFIG": made.model.config}
    exec(lines, names)
    assert isinstance(names["model"], hg.GPT) and isinstance(names["trace"], hg.Trace)


@pytest.mark.long
def test_a_narrow_page_shows_the_station_and_folds_the_map(open_page: Open) -> None:
    page = open_page("#/station/blocks.0.a_2/forward", viewport={"width": 360, "height": 740})
    top = page.locator(".station-head h2").bounding_box()
    assert top is not None and top["y"] + top["height"] < 740
    fold = page.locator(".map-fold")
    expect(fold).to_contain_text("block 1")
    expect(page.locator("#map .station").first).to_be_hidden()
    fold.click()
    page.locator("#map [data-key=a_1]").click()
    expect_station(page, "a_1")
    expect(page.locator("#map .station").first).to_be_hidden()  # it was chosen to be seen
    page.click("#tour-button")
    page.click("#tour-next")
    expect(page.locator("#map .station").first).to_be_visible()  # the tour speaks of it
    page = open_page("#/station/blocks.0.a_2/forward")
    expect(page.locator(".map-fold")).to_be_hidden()
    expect(page.locator("#map .station").first).to_be_visible()


def test_a_step_that_is_undone_has_the_same_numbers() -> None:
    session, sentence = make_traced()
    before = {name: p.data for name, p in session.model.named_parameters()}
    undone = take_step(session, sentence, 0.01, "SGD", undo=True)
    assert all(
        p.data is before[name] or torch.equal(p.data, before[name]) for name, p in session.model.named_parameters()
    )
    assert not session._versions and len(session._sentences) == 1
    taken = take_step(session, sentence, 0.01, "SGD")
    for key in ("loss", "predicted", "measured"):
        assert abs(undone[key] - taken[key]) < 1e-6
    for one, other in zip(undone["moves"], taken["moves"], strict=True):
        assert one["before"] == other["before"] and abs(one["after"] / other["after"] - 1) < 1e-5


def test_pictures_of_an_export_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session, made = make_session(n_blocks=5, d_model=48), []
    right = exporting.Embedded.add

    def count(self: exporting.Embedded, name: str, options: dict[str, int], **given: object) -> None:
        made.append((name, options["limit"]))
        right(self, name, options, **given)

    monkeypatch.setattr(exporting, "answers", lambda *_: {})
    monkeypatch.setattr(exporting, "COLUMNS", (8,))
    limit = len(export(session, TEXT).encode()) + 50_000
    monkeypatch.setattr(exporting.Embedded, "add", count)
    monkeypatch.setattr(exporting, "COLUMNS", (128, 8, 4))
    monkeypatch.setattr(exporting, "MAX_BYTES", limit)
    assert len(export(session, TEXT).encode()) <= limit
    # the size is estimated from one block
    assert made.count(("station", 128)) == sum(s.block == 0 for s in session.stations), (
        "the size is estimated from one block"
    )


def test_pools_are_the_entries_furthest_from_0() -> None:
    x = torch.randn(23, 5)
    pooled, size = _pool(x, 4)
    assert size == 6 and len(pooled) == 4
    for i, part in enumerate(torch.split(x, 6)):
        assert torch.equal(pooled[i].abs(), part.abs().amax(0)) and all(p in part for p in pooled[i])
