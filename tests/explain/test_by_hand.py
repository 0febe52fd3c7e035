"""By hand at every station: entries with all their terms, in the page and in its file, and what is said about an answer."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from page_helpers import Open, check_accessibility, data, expect_station, exported, go, number
from playwright.sync_api import Page, expect
from test_page import overflow
from tiny_session import LFM2, LLAMA, TEXT, make_session

from handgrad.explain_page.follow.follow import follow
from handgrad.explain_page.follow.tensors import Tensors
from handgrad.explain_page.json_types.station import HandTerms
from handgrad.explain_page.session.session import Session
from handgrad.explain_page.views import station as station_view
from handgrad.explain_page.views.by_hand import digits

pytest_plugins = ["page_fixtures"]


def terms_of(stored: HandTerms) -> list[tuple[Any, float]]:
    """The places and values of stored terms, multiplied here."""
    found = []
    for part in stored["parts"]:
        for place, *rest in part["terms"]:
            value = float(part["scale"])
            for name in part["names"]:
                value *= float(rest.pop(0))  # type: ignore[arg-type]
                del rest[: 0 if name is None else 2]
            assert rest == []
            found.append((place, value))
    return found


@pytest.mark.parametrize(
    "shape", [{"n_blocks": 1}, {**LLAMA, "n_blocks": 1}, {"lora": 2, "n_blocks": 1}, {**LFM2, "n_blocks": 1}]
)
def test_every_stored_entry_is_the_sum_of_its_products(shape: dict[str, Any]) -> None:
    session = make_session(**shape)
    sentence, seen = session.sentence(TEXT), 0
    tensors = Tensors(session.model, sentence.trace, session.network)
    for station in session.stations:
        results = station_view.at_station(session, sentence, station, stored=2)["by_hand"]
        assert results and {r["name"] for r in results} >= {*station.a} - {"a_0"}
        for result in results:
            x = tensors[result["name"]]
            assert result["shape"] == list(x.shape[-2:]) and result["heads"] == (len(x) if x.ndim == 3 else None)
            assert len({(c["row"], c["column"]) for c in result["cells"]}) == len(result["cells"]) > 0
            for cell in result["cells"]:
                stored = cell["terms"]
                assert stored is not None
                index = [*([] if cell["head"] is None else [cell["head"]]), cell["row"], cell["column"]]
                assert float(stored["value"]) == pytest.approx(x[tuple(index)].item(), rel=1e-8)
                terms = [value for _, value in terms_of(stored)]
                size = math.fsum(map(abs, terms)) + abs(float(stored["rest"]))
                assert len(terms) == stored["count"] or (len(terms) == 12 and stored["count"] > 40)
                assert math.fsum([*terms, float(stored["rest"])]) == pytest.approx(
                    float(stored["sum"]), abs=1e-8 * size
                )
                assert float(stored["sum"]) == pytest.approx(float(stored["value"]), abs=3e-6 * size), result["name"]
                seen += 1
    assert seen > 60


def test_factors_are_stored_with_all_their_digits() -> None:
    session = make_session(n_blocks=1)
    sentence = session.sentence(TEXT)
    (grad,) = [
        r
        for r in station_view.at_station(session, sentence, session.by_id["blocks.0.a_7"], stored=1)["by_hand"]
        if r["name"] == "blocks.0.grad_w_6"
    ]
    (cell,) = grad["cells"]
    assert cell["terms"] is not None
    (part,) = cell["terms"]["parts"]
    assert part["names"] == ["blocks.0.a_6", "blocks.0.delta_7"] and len(part["terms"]) == len(TEXT)
    for place, a, i, j, delta, k, m in part["terms"]:
        assert i == k == place and (j, m) == (cell["row"], cell["column"])
        for text, name, index in ((a, "a_6", (i, j)), (delta, "delta_7", (k, m))):
            assert torch.equal(torch.tensor(float(text)), sentence.trace[f"blocks.0.{name}"][index])  # type: ignore[arg-type,index]
    for station in session.stations:  # of a large model a file has one entry of a station, in most blocks
        (one,) = station_view.at_station(session, sentence, station, stored=1, every=False)["by_hand"]
        assert len(one["cells"]) == 1 and (one["way"] == "gradient" or not station.parameters)
    assert [digits(x) for x in (0.1, -2.0, 1 / 3, 1e300)] == ["0.1", "-2", "0.333333333333", "1e+300"]
    x = torch.randn(100)
    assert torch.equal(torch.tensor([float(digits(one)) for one in x.tolist()]), x)


def answer(page: Page, x: float | str) -> str:
    """Give an answer; return the kind of mistake that the page sees in it."""
    page.fill("#hand-sum", x if isinstance(x, str) else f"{x:.6g}")
    page.click("#hand-check")
    return page.locator("#hand-verdict").get_attribute("data-kind") or ""


def shown_products(page: Page) -> list[float]:
    return page.locator("#hand [data-term]").evaluate_all("nodes => nodes.map((n) => Number(n.dataset.term))")


def test_the_homework_can_be_done_with_an_exported_file(open_page: Open, tmp_path: Path) -> None:
    session = make_session(n_blocks=1)
    page = open_page("#/station/blocks.0.a_7/backward", base=exported(session, tmp_path))
    page.click("#hand-toggle")
    expect(page.locator('[data-result="blocks.0.grad_w_6"]')).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#hand")).to_contain_text("This file has the terms of these entries")
    row, column = (int(x) for x in re.findall(r"\[(\d+), (\d+)\]", page.locator("#hand-title").inner_text())[0])
    trace = session.sentence(TEXT).trace
    assert trace["blocks.0.grad_w_6"].abs().argmax() == row * trace["blocks.0.grad_w_6"].shape[1] + column
    shown = page.locator("#hand .digits td[data-value]").evaluate_all(
        "cells => cells.map((cell) => cell.dataset.value)"
    )
    factors = torch.tensor([float(x) for x in shown]).view(len(TEXT), 2)
    assert torch.equal(factors[:, 0], trace["blocks.0.a_6"][:, row])
    assert torch.equal(factors[:, 1], trace["blocks.0.delta_7"][:, column])
    page.click("#hand-digits")
    expect(page.locator("#hand .digits td").first).to_have_text(f"{factors[0, 0]:.9g}".replace("-", "−"))
    assert shown_products(page) == [] and page.locator("#hand .sum").count() == 0  # until the reader has answered
    products = (factors[:, 0].double() * factors[:, 1].double()).tolist()
    total = math.fsum(products)
    largest = max(products, key=abs)
    assert answer(page, -total) == "sign"
    assert answer(page, total - largest) == "missing term"
    place = products.index(largest)
    expect(page.locator("#hand-verdict")).to_contain_text(f"(position {place + 1})")  # not the first attempt
    assert answer(page, 1000 * total) == "power of ten"
    assert answer(page, "x") == "no number"
    assert answer(page, total) == "right"
    assert shown_products(page) == pytest.approx(products, rel=1e-8)  # nine digits are a number of float32 exactly
    assert data(page.locator("#hand .sum")) == pytest.approx(total, rel=1e-8)
    assert torch.tensor(number(page, "#hand-value")) == trace["blocks.0.grad_w_6"][row, column]
    # lit: the column of each operand and the entry of the result, from what the file has
    assert page.locator("#hand .heat canvas[data-name]").count() == 3
    for station in ("a_1", "blocks.0.a_3", "loss"):
        page.goto(f"{page.url.split('#')[0]}#/station/{station}/forward?hand=")
        expect_station(page, station)
        for result in page.locator("#hand [data-result]").all():
            result.click()
            page.click("#hand-show")
            terms, total = shown_products(page), data(page.locator("#hand .sum"))
            assert sum(terms) == pytest.approx(total, abs=1e-8 * sum(map(abs, terms)))
            assert total == pytest.approx(number(page, "#hand-value"), abs=3e-6 * sum(map(abs, terms)))


def test_any_entry_can_be_chosen(open_page: Open, session: Session) -> None:
    page = open_page("#/station/blocks.1.a_3/forward")
    page.click("#hand-toggle")
    sentence = session.sentence(TEXT)
    page.click('[data-result="blocks.1.a_3"]')
    assert "hand=blocks.1.a_3" in page.url
    page.click('[data-result="blocks.1.score"]')
    page.select_option("#hand-head", "1")
    expect(page.locator("#hand-title")).to_contain_text("head 2")
    result = page.locator('#hand canvas[data-name="blocks.1.score"]')
    left, top, wide, high = (
        float(result.get_attribute(f"data-{x}") or "") for x in ("left", "top", "cell-width", "cell-height")
    )
    result.click(position={"x": left + 4.5 * wide, "y": top + 7.5 * high})
    expect(page.locator("#hand-title")).to_contain_text("‘o’ (8), ‘e’ (5)")
    assert "hand=blocks.1.score%3A7%3A4%3A1" in page.url
    page.click("#hand-show")
    found = follow(session, sentence, "blocks.1.score", 1, 7, 4)
    expect(page.locator("#hand .sum")).to_have_attribute("data-value", str(found["sum"]))
    assert sorted(shown_products(page)) == sorted(term["value"] for term in found["terms"])
    q, k = sentence.trace["blocks.1.q"][1, 7].double(), sentence.trace["blocks.1.k"][1, 4].double()
    assert data(page.locator("#hand .sum")) == pytest.approx((q @ k).item() / math.sqrt(len(q)), rel=1e-9)
    page.reload()
    expect(page.locator("#hand-title")).to_contain_text("score of block 2, head 2 [‘o’ (8), ‘e’ (5)] = ?")
    page.click("[data-choice=shape]")
    page.fill("#hand-rows", "13")
    page.fill("#hand-columns", "8")
    page.locator("#hand-columns").press("Enter")
    expect(page.locator("#hand-verdict")).to_have_attribute("data-kind", "columns")
    page.click("[data-choice=sign]")
    page.click(f"[data-sign='{1 if found['sum'] < 0 else -1}']")
    expect(page.locator("#hand-verdict")).to_have_attribute("data-kind", "sign")
    page.click(f"[data-sign='{1 if found['sum'] > 0 else -1}']")
    expect(page.locator("#hand-verdict")).to_have_class("verdict good")
    # the norm's backward pass is the paper's formula, term by term
    go(page, "station/blocks.1.a_6/backward?hand=blocks.1.delta_5:4:3")
    expect(page.locator("#hand-title")).to_contain_text("Δ₅ of block 2")
    page.click("[data-choice=sum]")
    page.click("#hand-show")
    t = sentence.trace
    gain = session.model.get_parameter(session.by_id["blocks.1.a_6"].parameters[0].name).data.double()
    g = t["blocks.1.delta_6"][4].double() * gain
    a_bar, sigma = t["blocks.1.a_bar_5"][4].double(), t["blocks.1.sigma_5"].flatten()[4].double()
    expected = [
        t["blocks.1.delta_10"][4, 3].item(), (g[3] / sigma).item(), (-g.mean() / sigma).item(),
        (-a_bar[3] * (g * a_bar).mean() / sigma).item(),
    ]  # fmt: skip
    assert sorted(shown_products(page)) == pytest.approx(sorted(expected), rel=1e-6)
    assert page.locator("#hand .digits th").all_inner_texts().count("Δ₁₀") == 1
    page.set_viewport_size({"width": 320, "height": 700})
    assert overflow(page) <= 0
    check_accessibility(page)
    page.click("#walk-on")
    expect(page.locator("#hand-title")).to_be_visible()  # stays open, at the next station's own results
