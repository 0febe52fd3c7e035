"""The sentences and numbers that the page writes, in a real browser, recomputed in Python: on a usual model, after
divergence, with equal logits, and for every objective."""

import re
import threading
from collections.abc import Iterator

import pytest
import torch
from page_helpers import Open, expect_all_proven, go, number
from playwright.sync_api import expect
from test_sentences import diverged, log_p, undecided
from tiny_session import TEXT, make_session

import handgrad as hg
from handgrad.explain_page.presentation.captions import quote
from handgrad.explain_page.proofs import prover
from handgrad.explain_page.server import Server
from handgrad.explain_page.session.session import Session
from handgrad.explain_page.views import overview as overview_view
from handgrad.explain_page.views import station as station_view
from handgrad.formatting import typeset

pytest_plugins = ["page_fixtures"]

EVERY_VIEW = ("start", "station/loss/backward", "station/blocks.1.a_6/backward", "station/blocks.1.a_3/backward",
              "station/blocks.1.a_8/backward", "station/a_1/backward", "station/a_0/forward", "flow", "heads", "attribution",
              "whatif", "step")  # fmt: skip


def share(p: float) -> str:
    """As format.js writes a share."""
    if p < 1e-5:
        return "< 0.001 %"
    return "> 99.9 %" if 0.9995 < p < 1 else f"{float(f'{100 * p:.{3 if p >= 0.995 else 2}g}'):g} %"


@pytest.fixture(scope="module", params=["diverged", "undecided"])
def odd(request: pytest.FixtureRequest) -> Iterator[tuple[Session, str]]:
    session = diverged() if request.param == "diverged" else undecided()
    with Server(session) as url:
        yield session, url


@pytest.mark.some_cases(3)
def test_the_start_of_a_diverged_and_of_an_undecided_model(open_page: Open, odd: tuple[Session, str]) -> None:
    session, url = odd
    sentence = session.sentence(TEXT)
    chosen = log_p(sentence)[range(len(TEXT) - 1), sentence.ids[1:]]
    page = open_page("#/start", base=url)
    shown = page.locator(".story-words small").all_text_contents()
    assert shown == ["–", *(share(x) for x in chosen.exp().tolist())]
    t = 3 + int(chosen[3:].argmin())
    equal = int((chosen[3:] == chosen[t]).sum())
    expected = "the byte" if equal == 1 else f"one of {equal} bytes"
    expect(page.locator(".story-head .where")).to_have_text(
        f"{expected} that this model predicted worst, from the 5th on"
    )
    logits = sentence.trace["a_12"][t]
    own = logits[sentence.ids[t + 1]]
    rank, ties = int((logits > own).sum()) + 1, int((logits == own).sum()) - 1
    tied = f", shared with {ties} other tokens" if ties else ""
    p = share(chosen[t].exp().item())
    said = f"had rank {rank}{tied}, with p {p if p[0] in '<>' else f'= {p}'}. The loss of this byte is"
    expect(page.locator("#view-start")).to_contain_text(f"{said} −log p = {typeset(-chosen[t].item())}:")
    for where in EVERY_VIEW:  # none shows null, undefined or NaN, or logs an error
        go(page, where)
        panel = page.locator(f"#view-{where.partition('/')[0]}")
        expect(panel).to_have_attribute("data-sentence", sentence.id)
        if "/" in where:
            expect(panel).to_have_attribute("data-station", where.split("/")[1])
        assert not re.search(r"10⁻⁴\d %|−log 0", panel.inner_text())


def test_a_badge_names_what_has_been_checked(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(n_blocks=1)
    server = Server(session)
    compare = prover.compare_with_differences
    page_is_read = threading.Event()
    monkeypatch.setattr(prover, "compare_with_differences", lambda *x: (page_is_read.wait(60), compare(*x))[1])
    with server as url:
        page = open_page("#/station/a_11/backward", base=url)
        expect(page.locator("#badge")).to_contain_text("autograd ✔, finite differences running: error against autograd")
        expect(page.locator("#badge")).to_have_class("badge wait")
        expect(page.locator('#map [data-key="a_11"] .tick')).to_have_text("✓")
        page_is_read.set()
        expect(page.locator("#badge")).to_contain_text("✔ Verified on this sentence")
        expect_all_proven(page)


def test_the_loss_is_defined_by_what_is_explained(open_page: Open, session: Session) -> None:
    page = open_page("#/station/loss/backward?token=3")
    formula = page.locator(".formula.forward")
    expect(page.locator(".summary")).to_contain_text("divided by the number of targets n")
    assert formula.locator("mfrac").count() == 1
    expect(page.locator("#push-caption")).to_contain_text("(1 − p)/12 = ")
    go(page, "station/loss/backward?token=3&objective=position-3")
    expect(page.locator(".summary")).to_contain_text("nothing is divided")
    assert page.locator(".formulas mfrac").count() == 0
    delta = session.sentence(TEXT, 0, hg.PositionLoss(3)).trace["delta_12"][3, ord(TEXT[4])].item()
    expect(page.locator("#push-caption")).to_contain_text(f"1 − p = {typeset(-delta)}")
    go(page, f"station/loss/backward?token=3&objective=difference-3-{ord('a')}-{ord('b')}")
    expect(page.locator(".summary")).to_contain_text("A difference of two logits is explained")


def test_attribution_says_what_it_explains_and_in_which_unit(open_page: Open, session: Session) -> None:
    page = open_page("#/attribution")
    chosen = log_p(session.sentence(TEXT))[range(len(TEXT) - 1), session.sentence(TEXT).ids[1:]]
    t = 3 + int(chosen[3:].argmin())
    said = page.locator("#attributed-value")
    expect(said).to_contain_text("in units of log-probability (natural logarithm): log p of")
    expect(said).to_contain_text(
        f"(position {t + 1}): {typeset(chosen[t].item())}, p = {share(chosen[t].exp().item())}"
    )
    expect(said).to_contain_text("not the mean loss of the sentence")
    assert page.locator(".attributions th", has_text="in log-probability").count() == 3
    page.click("#explain-attributed")
    expect(page.locator("#objective")).to_contain_text(f"(position {t + 1})")
    expect(said).not_to_contain_text("the mean loss")
    go(page, f"attribution?objective=difference-3-{ord('a')}-{ord('b')}")
    expect(said).to_contain_text("in logits: the logit of ‘a’ minus that of ‘b’")
    assert page.locator(".attributions th", has_text="in logits").count() == 3


def test_bars_are_as_long_as_their_numbers(open_page: Open, session: Session) -> None:
    page = open_page("#/start")
    row = station_view.at_station(session, session.sentence(TEXT), session.by_id["loss"])["positions"]
    t = max(range(3, len(TEXT) - 1), key=lambda t: row[t]["loss"])
    expected = [x["p"] for x in row[t]["top"]] + [row[t]["probability"]]
    widths = page.locator(".bars.a .track").evaluate_all(
        "tracks => tracks.map((x) => x.firstChild.getBoundingClientRect().width / x.getBoundingClientRect().width)"
    )
    assert widths == pytest.approx(expected, abs=2e-4) and min(expected) < 0.003
    go(page, f"station/loss/backward?token=3&objective=difference-3-{ord('a')}-{ord('b')}")
    expect(page.locator(".bars.push li")).to_have_count(2)
    page.locator(".bars.push .fill").evaluate_all("all => all.forEach((x) => { if (x.style.width !== '50%') throw x })")


def test_the_flow_speaks_of_the_rows_that_it_shows(open_page: Open, session: Session) -> None:
    page = open_page("#/flow")
    rows = overview_view.flow(session, session.sentence(TEXT))["rows"]
    ends = [row for row in rows if not row["station"].startswith("blocks") or row["station"].endswith("a_10")]
    for choice, chosen in (("all", rows), ("none", ends)):
        page.select_option("#flow-rows", choice)
        mean = torch.tensor([row["share"] for row in chosen]).mean(0)
        t = int(mean.argmax())
        said = f"Averaged over the {len(chosen)} rows shown, the largest share of the error is at {quote(TEXT[t])}"
        expect(page.locator(".flow-card")).to_contain_text(f"{said} (position {t + 1}): {share(mean[t].item())}")
    low, high = (torch.tensor(rows[i]["delta"]).norm().item() for i in (0, -1))
    expect(page.locator(".flow-card")).to_contain_text(
        f"Δ₁ has length {typeset(low)}, {typeset(low / high)} times the {typeset(high)} of Δ₁₁"
    )


def test_a_cut_counts_what_it_changes_and_what_it_hides(open_page: Open, session: Session) -> None:
    page = open_page("#/whatif")
    page.click("[data-choice=backward]")
    page.click('[data-part="head 1 0"]')
    expect(page.locator("#cut-caption")).to_contain_text("gradients change")  # the server has done with the model
    sentence = session.sentence(TEXT)

    def zero(x: torch.Tensor) -> torch.Tensor:
        x[:, :8] = 0
        return x

    base, cut = (
        hg.trace(session.model, sentence.tokens, sentence.targets, edit=e) for e in ({}, {"blocks.1.delta_3": zero})
    )
    names = [x for x in base if "grad_" in x]
    changed = [x for x in names if not torch.equal(base[x], cut[x])]
    assert 0 < len(changed) < len(names)
    expect(page.locator("#cut-caption")).to_contain_text(f"{len(changed)} of {len(names)} gradients change")
    expect(page.locator(".outcome tbody tr")).to_have_count(len(changed))
    expect(page.locator(".outcome .rows-note")).to_have_text(f"{len(changed)} rows: scroll to see all")
    expect(page.locator(".outcome .rows-note")).to_be_in_viewport()


def test_a_step_promises_only_what_it_measures(open_page: Open) -> None:
    page = open_page("#/step")
    expect(page.locator("#view-step")).to_contain_text("A short enough step against the gradient lowers it")
    page.locator("#rate").evaluate("x => { x.value = 1; x.dispatchEvent(new Event('input', { bubbles: true })) }")
    page.click("#step-one")
    expect(page.locator("#loss-measured")).to_be_visible()
    before, predicted, measured = (number(page, f"#loss-{name}") for name in ("before", "predicted", "measured"))
    assert predicted < 0 < before < measured  # so long a step is far from its prediction
    for said in ("below 0, which no loss can reach", "The loss rose: the step was too large"):
        expect(page.locator(".outcome")).to_contain_text(said)
    tops = page.locator(".curve .guess, .curve .measured-point").evaluate_all(
        "nodes => nodes.flatMap((n) => [n.getBBox().y, n.getBBox().y + n.getBBox().height])"
    )
    assert min(tops) >= 0 and max(tops) <= 180
    heights = [
        float(y or "")
        for y in page.locator(".curve circle").evaluate_all("all => all.map((x) => x.getAttribute('cy'))")
    ]
    slope = (heights[1] - heights[0]) / (measured - before)
    line = page.locator(".curve .guess").get_attribute("d") or ""
    end = float(line.split()[-1])
    assert end == pytest.approx(heights[0] + slope * (predicted - before)) and end < 154  # inside the axis, not clipped
