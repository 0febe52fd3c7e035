"""Patches on the page: what is shown equals hg.patch_map and hg.patch_from, and its Python makes it."""

from typing import Any

import pytest
import torch
from page_helpers import Open, check_accessibility, data, number
from playwright.sync_api import Browser, expect
from tiny_session import LFM2, LLAMA, TEXT, evaluate, make_session

import handgrad as hg
from handgrad.explain_page.session.objectives import objective_of
from handgrad.explain_page.session.session import Session, TracedSentence
from handgrad.explain_page.views import patching

pytest_plugins = ["page_fixtures"]
OTHER, LONGER = "to we, or not", "to be there, or not"
SHAPES = {"gpt2": {}, "llama": LLAMA, "lfm2": LFM2}


def pair(shape: str, other: str, **objective: Any) -> tuple[Session, TracedSentence, TracedSentence]:
    session = make_session(dtype=torch.float64, **SHAPES[shape])
    return session, session.sentence(TEXT, 0, objective_of(session, TEXT, 0, objective)), session.sentence(other)


def names(session: Session, sentence: TracedSentence, other: TracedSentence) -> dict[str, Any]:
    """What the lines of Python that the page shows refer to."""
    given = {"tokens": sentence.tokens, "targets": sentence.targets, "trace": sentence.trace, "other": other.trace}
    return {"hg": hg, "model": session.model, **given}


@pytest.mark.parametrize("other", [OTHER, LONGER])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_patch_is_predicted_and_one_measured(shape: str, other: str) -> None:
    session, one, two = pair(shape, other, kind="difference", position=12, against="z")
    known = names(session, one, two)
    for of in [kind["of"] for kind in patching.patch_map_at(session, one, two)["kinds"]]:
        found = patching.patch_map_at(session, one, two, of)
        values = torch.tensor(found["values"], dtype=torch.float64)
        assert torch.allclose(values, evaluate(found["python"], **known), rtol=1e-9, atol=1e-13)
        assert (
            values.shape == (len(one.ids), len(found["places"]))
            and f"All {values.numel():,} patches" in found["caption"]
        )
        assert found["largest"][0]["predicted"] == values.flatten()[values.abs().argmax()].item()
        first = found["largest"][0]
        assert f"{first['label']}: ⟦{first['predicted']!r}⟧" in found["caption"]
        for position in (first["position"], None):
            made = patching.patch_at(session, one, two, first["block"], of, first["head"], position)
            measured, predicted = evaluate(made["python"], **known)
            assert made["measured"] == measured != 0 and made["predicted"] == pytest.approx(predicted, rel=1e-9)
            assert f"changes by ⟦{measured!r}⟧" in made["caption"] and f"⟦{two.trace.loss!r}⟧" in made["caption"]
            if position is not None:
                assert made["predicted"] == pytest.approx(first["predicted"], rel=1e-12)
    unpaired = len(one.ids) - len(hg.align(one.tokens, two.tokens)) if other == LONGER else 0
    assert (f"{unpaired} of the {len(one.ids)} tokens have no partner" in found["caption"]) == (unpaired > 0)


def test_the_whole_of_the_other_stream_gives_the_other_answer() -> None:
    """Everything below the last block from the other sentence, at every position."""
    session, one, two = pair("gpt2", OTHER, kind="difference", position=12, against="z")
    o = one.objective
    assert isinstance(o, hg.LogitDifference)
    made = patching.patch_at(session, one, two, 1, "a_1")
    logits = two.trace["a_12"][12]
    assert made["value"] + made["measured"] == pytest.approx((logits[o.token] - logits[o.against]).item(), rel=1e-9)


def test_tokens_that_the_objective_does_not_read() -> None:
    session, one, two = pair("gpt2", "to be, or now")
    found = patching.patch_map_at(session, one, two)
    assert found["largest"] == [] and "All predicted changes are 0" in found["caption"]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"of": "a_99"}, "'a_99' cannot be patched here: choose one of a_3, a_1"),
        ({"block": 2}, "block must be a number from 0 to 1, not 2"),
        ({"head": 3}, "head must be a number from 0 to 2, not 3"),
        ({"position": 13}, "position must be a number from 0 to 12, not 13"),
        ({"of": "a_5", "head": 0}, "a_5 has no heads"),
    ],
)
def test_what_cannot_be_patched(given: dict[str, Any], message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        patching.patch_at(*pair("gpt2", OTHER), **{"block": 0, **given})


def test_patch_on_the_page(open_page: Open, session: Session) -> None:
    page = open_page("#/compare")
    page.fill("#other-sentence", "to we, or not")
    page.click("#compare-sentence")
    one, two = session.sentence(TEXT), session.sentence("to we, or not")
    found = patching.patch_map_at(session, one, two)
    buttons = page.locator("[aria-label='Largest predicted changes'] button")
    expect(buttons).to_have_count(8)
    assert data(buttons.first) == pytest.approx(found["largest"][0]["predicted"], rel=1e-6)
    buttons.first.click()
    cell = found["largest"][0]
    made = patching.patch_at(session, one, two, cell["block"], "a_3", cell["head"], cell["position"])
    expect(page.locator("#patch-measured")).to_be_visible()
    assert number(page, "#patch-measured") == pytest.approx(made["measured"], rel=1e-6)
    assert number(page, "#patch-predicted") == pytest.approx(made["predicted"], rel=1e-6)
    expect(buttons.first).to_have_attribute("aria-pressed", "true")
    page.click("[data-choice=all]")
    expect(page.locator(".outcome h3")).to_contain_text("at every position")
    check_accessibility(page)
    page.select_option("#patch-kind", "a_5")
    expect(page.locator(".outcome")).to_have_count(0)
    canvas = page.locator("#view-compare .heat", has_text="Predicted change by block").locator("canvas").first
    left, top, width, height = (data(canvas, x) for x in ("left", "top", "cell-width", "cell-height"))
    canvas.click(position={"x": left + 1.5 * width, "y": top + 5.5 * height})
    expect(page.locator(".outcome h3")).to_contain_text("With a₅ of block 2 at every position")  # as chosen before
    page.click("[data-choice=one]")
    expect(page.locator(".outcome h3")).to_contain_text("With a₅ of block 2 at ‘,’ (position 6)")


def test_maps_in_a_notebook_are_linked(browser: Browser) -> None:
    model, words = make_session().model, list(TEXT)
    tokens = torch.tensor([list(TEXT.encode())])
    trace = hg.trace(model, tokens, torch.cat([tokens[:, 1:], torch.tensor([[-100]])], 1))
    rho = trace["blocks.1.rho"]
    page, errors = browser.new_page(), []
    page.on("console", lambda m: errors.append(m.text))
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("request", lambda r: errors.append(r.url) if not r.url.startswith("data:") else None)
    page.set_content(rho.show(words)._repr_html_())
    frame = page.frame_locator("iframe")
    expect(frame.locator("canvas")).to_have_count(3)
    frame.locator("canvas").nth(1).focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    written = [float(text.split()[2]) for text in frame.locator("figcaption").all_text_contents()]
    assert written == pytest.approx(rho[:, 2, 1].tolist(), rel=1e-4)
    expect(frame.locator("output")).to_contain_text(f"head 1: 2 ␣ · 1 o → {written[1]:.5g}")
    frame.locator("canvas").first.hover(position={"x": 3, "y": 3})  # on the labels: nothing changes
    expect(frame.locator("output")).to_contain_text("head 1: 2 ␣")
    assert errors == []
    page.close()
