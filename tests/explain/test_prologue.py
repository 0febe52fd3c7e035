"""The prologue, every number recomputed by autograd, and the table of symbols: every symbol of every formula is in it."""

from pathlib import Path

import pytest
import torch
from page_helpers import Open, check_accessibility, expect_station
from playwright.sync_api import expect
from test_explain_experts import SHAPES as EXPERTS
from test_explain_experts import traced
from test_page import overflow
from test_views import SHAPES
from tiny_session import LFM2, make_session

from handgrad.explain_page.presentation.symbols import SYMBOLS, placed
from handgrad.explain_page.session.session import Session
from handgrad.explain_page.views import overview
from handgrad.paper import notation

pytest_plugins = ["page_fixtures"]

ROOT = Path(__file__).parent.parent.parent


def matrices(page: object) -> dict[str, torch.Tensor]:
    """The matrices that the open step shows."""
    shown = page.locator(".small-matrix").evaluate_all(  # type: ignore[attr-defined]
        "all => all.map((m) => [m.dataset.matrix,"
        " [...m.querySelectorAll('tr')].map((r) => [...r.querySelectorAll('td')].map((x) => Number(x.dataset.value)))])"
    )
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in shown}


def test_every_step_of_the_prologue(open_page: Open) -> None:
    """The integers are read from the page; everything else is computed here, gradients by autograd."""
    page = open_page("#/prologue")
    steps = page.locator("[data-open-step]").count()
    assert steps == 13
    shown: dict[str, torch.Tensor] = {}
    for i in range(steps):
        page.click(f'[data-open-step="{i}"]')
        page.click("#prologue-show")
        expect(page.locator("#prologue-why")).to_be_visible()
        shown |= matrices(page)
    for name in ("a1", "w", "delta2", "deltaY"):
        assert torch.equal(shown[name], shown[name].round()) and shown[name].abs().max() < 10, "small integers"
    b = shown["bRows"][0]
    a1, w, b = (x.clone().requires_grad_() for x in (shown["a1"], shown["w"], b))
    a2 = a1 @ w + notation.tilde_rows(b, 2)
    y = a2.softmax(1)
    targets = torch.tensor([1, 0])
    y_gt = notation.ohe(targets, 2)
    losses = -notation.row_dot(y_gt, y.log())
    (delta,) = torch.autograd.grad(losses.sum(), a2, retain_graph=True)
    (grad,) = torch.autograd.grad(losses.sum(), w, retain_graph=True)
    grad_w, grad_b, delta1 = torch.autograd.grad(a2, (w, b, a1), shown["delta2"], retain_graph=True)
    (delta_a,) = torch.autograd.grad(y, a2, shown["deltaY"], retain_graph=True)
    inner = notation.row_dot(shown["deltaY"], y)
    expected = {
        "a1w": a1 @ w, "bRows": notation.tilde_rows(b, 2), "a2": a2, "a1t": a1.t(), "wt": w.t(), "gradPracticed": grad_w,
        "delta1": delta1, "gradB": grad_b[None], "y": y,
        "inner": inner[:, None], "innerColumns": notation.tilde_columns(inner, 2),
        "deltaA": delta_a, "yGt": y_gt, "delta": delta, "grad": grad,
    }  # fmt: skip
    assert shown.keys() == expected.keys() | {"a1", "w", "delta2", "deltaY"}
    for name, x in expected.items():
        assert torch.allclose(shown[name], x.detach(), rtol=1e-12, atol=1e-12), name
    rate = 0.1
    after = -notation.row_dot(y_gt, (a1 @ (w - rate * grad) + b).softmax(1).log()).sum().item()
    said = page.locator("#prologue-why").inner_text()
    loss = losses.sum().item()
    for x in (grad[0, 0].item(), -rate * grad.square().sum().item(), loss, after):
        assert f"{x:.3g}".replace("-", "−") in said
    assert after < loss
    answers = {
        0: (a1 @ w)[1, 0], 1: a2[1, 0], 2: shown["delta2"][0, 1] * rate, 3: grad_w[0, 1], 4: delta1[0, 0], 5: grad_b[1],
        6: y[1, 0], 7: inner[1], 8: delta_a[1, 0], 10: losses[1], 11: delta[1, 0], 12: grad[0, 0],
    }  # fmt: skip
    for i, x in answers.items():
        page.click(f'[data-open-step="{i}"]')
        for given, kind in ((-x.item(), "sign"), (x.item(), "right"))[i % 3 > 0 :]:
            page.fill("#prologue-answer", f"{given:.4g}".replace(".", ",") if i == 2 else f"{given:.4g}")
            page.click("#prologue-check")
            expect(page.locator("#prologue-verdict")).to_have_attribute("data-kind", kind)
    page.click('[data-open-step="9"]')
    for row, kind in (((1, 0), "other column"), ((1, 1), "other"), ((0, 1), "right")):
        page.fill("#prologue-answer", str(row[0]))
        page.fill("#prologue-answer-2", str(row[1]))
        page.click("#prologue-check")
        expect(page.locator("#prologue-verdict")).to_have_attribute("data-kind", kind)
    expect(page.locator("#view-prologue .where")).to_contain_text("13 of 13 answered")
    page.click("#all-symbols summary")
    assert page.locator("#all-symbols tbody tr").count() == len(SYMBOLS)
    check_accessibility(page)
    page.set_viewport_size({"width": 320, "height": 700})
    assert overflow(page) <= 0
    page.click('[data-open-step="12"]')
    page.click("#prologue-end")
    expect_station(page, "a_1")


UNEXPLAINED = """async (formulas) => {
  const { keyOf, leavesOf, explain } = await import("/assets/symbols.js");
  const parser = new DOMParser();
  const leaves = formulas.flatMap((x) => leavesOf(parser.parseFromString(x, "application/xml").documentElement));
  const keys = leaves.map(keyOf).filter((key) => key !== null);
  return [[...new Set(keys.filter((key) => !explain(key)))], [...new Set(keys)]];
}"""


def test_every_symbol_explains_itself(open_page: Open, session: Session) -> None:
    sessions = [
        session,
        *(make_session(**shape) for shape in [*SHAPES[1:], LFM2]),
        *(traced(family)[0] for family in EXPERTS),
    ]
    formulas = {
        part
        for one in sessions
        for station in overview.table(one)["stations"]
        for about in (station, *station["by_objective"].values())
        for line in (*about["forward"], *about["backward"])
        for part in line["math"]
    }
    page = open_page("#/station/blocks.0.a_2/backward")
    unexplained, keys = page.evaluate(UNEXPLAINED, sorted(formulas))
    assert unexplained == [] and {"Δ_2", "~", "^t", "⊖", "∘", "ā_1", "∂", "w_k", "ρ", "θ_i", "ĝ"} <= set(keys)
    note = page.locator("#symbol-note")
    expect(note).to_be_hidden()
    page.locator(".formula.backward math mi", has_text="Δ").first.hover()
    expect(note).to_contain_text("error signal")
    page.keyboard.press("Escape")
    expect(note).to_be_hidden()
    page.mouse.move(5, 5)
    box = page.locator(".station-head h2 span").bounding_box()  # a₂, in a text
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(note).to_contain_text("activation")
    page.mouse.move(5, 5)
    expect(note).to_be_hidden()
    chips = page.locator(".symbols button")
    chips.first.focus()
    expect(note).to_be_visible()
    chips.first.press("ArrowRight")
    expect(chips.nth(1)).to_be_focused()
    label = chips.nth(1).get_attribute("aria-label") or ""
    assert (page.locator("#symbol-note p").nth(1).inner_text()) in label
    assert page.locator(".symbols button[tabindex='0']").count() == 1
    check_accessibility(page)
    touched = open_page("#/station/a_11/backward", viewport={"width": 360, "height": 740}, has_touch=True)
    touched.locator(".formula.forward math mover").first.tap()
    expect(touched.locator("#symbol-note")).to_contain_text("normalized, a bar")
    inside = touched.locator("#symbol-note").bounding_box()
    assert inside is not None and inside["x"] >= 0 and inside["x"] + inside["width"] <= 360


def test_the_table_of_symbols_is_that_of_the_documentation() -> None:
    page = ROOT / "docs/layers/README.md"
    assert placed(page.read_text()) == page.read_text(), "run python -m handgrad.explain_page.presentation.symbols"
    keys = [key for symbol in SYMBOLS for key in symbol.keys.split()]
    assert len(keys) == len(set(keys))
    for symbol in SYMBOLS:
        assert symbol.introduced == "prologue" or (ROOT / f"docs/layers/{symbol.introduced}.md").is_file()
    with pytest.raises(ValueError, match="expected"):
        placed("")
