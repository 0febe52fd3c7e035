"""For a class and for sharing: typeset tasks, numbers to compute in the page and in its file, the result file as Python
reads it, links and cards."""

import html
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from page_helpers import Open, check_accessibility, exported, number
from playwright.sync_api import Page, expect
from test_page import overflow
from tiny_session import TEXT

from handgrad.explain_page.presentation.plain_math import formulas, latex
from handgrad.explain_page.session.session import Session
from handgrad.learn.course import COURSE
from handgrad.learn.result_file import read_result

pytest_plugins = ["page_fixtures"]
SAME = str.maketrans({"ᵗ": "t", "²": "2", "³": "3", "Σ": "∑", "ā": "a"})


def characters(text: str) -> list[str]:
    return [c for c in text.translate(SAME) if c.isalnum() or c in "∑=+−<>"]


def blocks() -> Iterator[str]:
    for exercise in COURSE.values():
        yield from (part for part in exercise.paragraphs() if part.startswith(" "))


def test_every_formula_of_a_task_is_typeset_and_nothing_is_lost() -> None:
    seen = 0
    for block in blocks():
        made = html.unescape(re.sub("<[^>]*>", "", "".join(x for line in formulas(block) for x in line)))
        assert characters(made) == characters(block), block
        seen += sum(map(len, formulas(block)))
    assert seen > 30
    assert latex("Δ_{i−1} = aᵗ w_q + b_q~") == r"\Delta_{i -1} =a^{\mathrm{t}}\;w_{q} +\tilde{b}_{q}"
    assert latex("√(2/π) of one row") == r"\sqrt{2/\pi}\;\text{of\xa0one\xa0row}".replace(r"\xa0", "\xa0")
    assert latex("ρ_tj y_pred") == r"\rho_{t j} \;y_{\mathrm{pred}}"


def saved(page: Page, folder: Path) -> Path:
    page.fill("#student", "Ada <b>")
    with page.expect_download() as download:
        page.click("#save-result")
    assert download.value.suggested_filename == "learn.json"
    download.value.save_as(folder / "learn.json")
    expect(page.locator("#result-saved")).to_have_text("saved as learn.json")
    return folder / "learn.json"


def test_numbers_are_computed_in_a_file_and_handed_in(open_page: Open, session: Session, tmp_path: Path) -> None:
    page = open_page("#/exercises?exercise=linear", base=exported(session, tmp_path))
    expect(page.locator(".task h3")).to_have_text("3. fully connected layer")
    assert page.locator(".task-math math").count() == 2
    assert page.locator("#number-tasks li").count() == 7
    page.locator("[data-task='linear sum']").press("Enter")
    expect(page.locator("#hand-toggle")).to_be_focused()
    page.fill("#hand-sum", "nonsense")
    page.click("#hand-check")
    row, column = (int(x) for x in re.findall(r"\[(\d+), (\d+)\]", page.locator("#hand-title").inner_text())[0])
    right = session.sentence(TEXT).trace["blocks.1.grad_w_3"][row, column].item()
    for x in (-right, right):
        page.fill("#hand-sum", f"{x:.5g}")
        page.click("#hand-check")
    expect(page.locator("#hand-verdict")).to_have_class("verdict good")
    page.click("#tab-prologue")
    page.click("#prologue-show")
    page.click("#tab-exercises")
    expect(page.locator("li:has([data-task='linear sum'])")).to_contain_text("✔ solved")
    expect(page.locator("li:has([data-task='linear sign'])")).not_to_contain_text("solved")
    expect(page.locator("#solved")).to_have_text("0 of 12 exercises and 1 of 2 numbers by hand solved.")
    check_accessibility(page)
    result = read_result(saved(page, tmp_path))
    assert result.student == "Ada <b>" and [x.name for x in result.exercises] == list(COURSE)
    computed, prologue = result.numbers
    assert computed.name.startswith(f"blocks.1.a_4 gradient, sum: ∂w_3 of block 2 [{row}, {column}]")
    assert (
        computed.name.endswith(f" · {TEXT}")
        and (computed.attempts, computed.solution) == (2, False)
        and computed.solved
    )
    assert prologue.name.startswith("prologue, 1: ") and prologue.solution and not prologue.solved
    page.reload()  # the browser remembers
    expect(page.locator("#solved")).to_contain_text("1 of 2 numbers")
    page.set_viewport_size({"width": 320, "height": 700})
    assert overflow(page) <= 0
    link = copied(page)
    assert link.startswith(page.url.partition("#")[0] + "#/exercises?") and "exercise=linear" in link
    check_accessibility(page, "color-contrast")


def copied(page: Page) -> str:
    """The link that the menu copies."""
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    page.click("#share summary")
    page.click("#share button:has-text('copy link')")
    expect(page.locator("#share .saved")).to_have_text("copied")
    link: str = page.evaluate("window.copied")
    return link


def test_a_link_and_a_card_of_what_is_shown(open_page: Open, session: Session, tmp_path: Path) -> None:
    page = open_page("#/station/blocks.1.a_3/backward?head=1&token=2", color_scheme="dark")
    link = copied(page)
    address, _, hash = link.partition("#")
    assert "key=" in page.url and "key" not in link and address.endswith("/")
    path, _, query = hash.partition("?")
    assert path == "/station/blocks.1.a_3/backward"
    assert parse_qs(query) == {"token": ["2"], "head": ["1"], "text": [TEXT]}, "defaults too"
    expect(page.locator("#share")).to_contain_text("not the key of this server")
    with page.expect_download() as download:
        page.click("#share button:has-text('save card')")
    picture = download.value.path().read_bytes()
    assert download.value.suggested_filename == "small-station.png"
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", picture[16:24]) == (1200, 630)
    assert len(picture) > 5000
    check_accessibility(page)
    page.keyboard.press("Escape")
    expect(page.locator("#share details")).not_to_have_attribute("open", "")
    page.goto(page.url.partition("#")[0] + "#" + hash)  # what a reader of the link puts behind the own address
    expect(page.locator("#view-station h2")).to_contain_text("Attention")
    page.goto(page.url.partition("#")[0] + "#/start?token=3")
    sentence = session.sentence(TEXT)
    assert number(page, "#story b") == pytest.approx(sentence.trace["y_pred"][3, sentence.ids[4]].item(), rel=1e-6)
    story = page.locator("#story").inner_text().strip()
    assert story.startswith("After ‘b’ the model gave ‘e’ ")
    assert page.locator("#card-story").text_content() == f"The card begins: {story}"
    expect(page.locator("#story")).not_to_contain_text("␣")
