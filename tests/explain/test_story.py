"""The story of one word, from the first view to the steps and to what they did elsewhere: every sentence of the page is
recomputed here."""

import re

import pytest
import torch
from page_helpers import Open, check_accessibility, go
from playwright.sync_api import Page, expect
from test_page_sentences import share
from tiny_session import TEXT, make_session

import handgrad as hg
from handgrad.explain_page.presentation.captions import quote as said
from handgrad.explain_page.presentation.captions import visible
from handgrad.explain_page.session.session import Session, TracedSentence
from handgrad.explain_page.views import attention, what_if
from handgrad.explain_page.views import overview as overview_view
from handgrad.formatting import typeset

pytest_plugins = ["page_fixtures"]

ORDER = ["prologue", "start", "station", "attribution", "flow", "heads", "whatif", "step", "compare", "exercises"]


def line(page: Page) -> str:
    return page.locator("[role=tabpanel]:not([hidden]):not([aria-busy]) .story-line > p").inner_text()


def follow(page: Page, where: str) -> str:
    """Press “next” and return the sentence of the view that it opens."""
    page.click("[role=tabpanel]:not([hidden]) .story-next")
    expect(page.locator(f"#view-{where} .story-line")).to_be_visible()
    expect(page.locator(f"#view-{where}")).not_to_have_attribute("aria-busy", "true")
    return line(page)


@pytest.fixture
def told(open_page: Open, session: Session) -> tuple[Page, Session, TracedSentence]:
    return open_page(), session, session.sentence(TEXT)


def test_every_view_continues_the_story(told: tuple[Page, Session, TracedSentence]) -> None:
    page, session, sentence = told
    words = [session.token_text(id) for id in sentence.ids]
    p = sentence.trace["y_pred"].double()
    n = len(TEXT) - 1
    t = 3 + int(p[range(n), sentence.ids[1:]][3:].argmin())
    came, rival = sentence.ids[t + 1], int(p[t].argmax())
    pair = said(session.token_text(rival)), said(words[t + 1])
    ratio = typeset((p[t, rival] / p[t, came]).item())
    assert line(page) == f"It expected {pair[0]}, with {share(p[t, rival].item())}: {ratio} times as probable."
    expect(page.locator("#view-start .story-next")).to_have_text(f"next: why {pair[0]} and not {pair[1]}? →")

    text = follow(page, "station")  # why this and not that
    expect(page.locator("#objective")).to_contain_text("minus that of")
    traced = session.sentence(TEXT, 0, hg.LogitDifference(t, rival, came))
    trace, lead = traced.trace, traced.trace.loss
    assert line(page) == (
        f"{pair[0]} has {share(p[t, rival].item())}, {pair[1]} has {share(p[t, came].item())}: the logit of the first is"
        f" {typeset(lead)} above that of the second, and this difference is explained now."
    ), text
    signal = f"signal that tells {pair[0]} from {pair[1]}"

    text = follow(page, "attribution")
    found = hg.attribute(session.model, [*sentence.ids[: t + 1], rival], against=came, steps=2, remove=24)
    assert found.removed is not None
    most = int(found.removed[: t + 1].nan_to_num().abs().argmax())
    left = lead - found.removed[most].item()
    first, second = pair if left >= 0 else pair[::-1]
    assert text == (
        f"Removed one at a time, {said(words[most])} (position {most + 1}) matters most. Without it, the model would have"
        f" {first} ahead of {second} by {typeset(abs(left))} logits; with it, it has {pair[0]} ahead of {pair[1]} by"
        f" {typeset(lead)} logits."
    )

    text = follow(page, "flow")
    delta = trace["blocks.0.delta_1"].double()
    shares = delta.square().sum(1) / delta.square().sum()
    most = int(shares.argmax())
    here = share(shares[t].item())
    rest = ", more than at any other token" if most == t else (
        f", and most, {share(shares[most].item())}, at {said(words[most])} (position {most + 1})"
    )  # fmt: skip
    assert (trace["delta_11"][[i for i in range(len(TEXT)) if i != t]] == 0).all()
    assert (
        text
        == f"The {signal} enters at Δ₁₁, 100 % of it at {said(words[t])}, before {pair[1]}. At Δ₁ {here} is there{rest}."
    )

    text = follow(page, "heads")
    sizes = torch.stack([trace[f"blocks.{b}.delta_3"].view(len(TEXT), 3, -1).norm(dim=(0, 2)).double() for b in (0, 1)])
    b, h = divmod(int(sizes.argmax()), 3)
    part = share((sizes[b, h] ** 2 / (sizes**2).sum()).item())
    assert text == (
        f"Of the {signal}, head {h + 1} of block {b + 1} receives the most: length {typeset(sizes[b, h].item())}, {part}"
        " of the squares of all 6 heads."
    )

    text = follow(page, "whatif")
    effects = torch.tensor(what_if.effects(session, traced)["heads"])
    b, h = divmod(int(effects.abs().argmax()), 3)
    change = effects[b, h].item()
    verb = "fall" if change < 0 else "rise"
    quantity = f"the lead of {pair[0]} over {pair[1]}"
    name = f"head {h + 1} of block {b + 1}"
    assert text == (
        f"Of all heads, the gradient expects most of {name}: without it, {quantity} would {verb} by {typeset(abs(change))}."
    )
    page.click(".story-line .what-if")
    expect(page.locator("#change-measured")).to_be_visible()

    def zero(x: torch.Tensor) -> torch.Tensor:
        x[:, 8 * h : 8 * (h + 1)] = 0
        return x

    objective = hg.LogitDifference(t, rival, came)
    changed = hg.trace(
        session.model, sentence.tokens, sentence.targets, objective=objective, edit={f"blocks.{b}.a_3": zero}
    )
    assert (
        line(page) == f"Without {name}, {quantity} is {typeset(changed.loss)} instead of {typeset(lead)}, as measured."
    )

    text = follow(page, "step")
    expect(page.locator("#objective")).to_contain_text("the loss of")  # of the word alone
    now = f"{pair[1]} has {share(p[t, came].item())} after {said(words[t])}"
    assert text == f"{now}. How many steps does it take until it is the first choice?"
    assert page.locator("[role=tab]").evaluate_all("tabs => tabs.map((tab) => tab.id.slice(4))") == ORDER
    check_elsewhere(page, session, t, came)
    text = follow(page, "compare")
    expect(page.locator(".story-next").last).to_be_visible()
    assert text.endswith("Which activations did the steps change?") and text.startswith("After ")
    text = follow(page, "exercises")
    assert text.startswith(f"The error of {pair[1]} has passed {len(session.stations) - 1} stations. ")
    exercises = page.locator("[data-exercise]").count()
    offered = {name for station in overview_view.table(session)["stations"] for name in station["exercises"]}
    assert text.endswith(f"{len(offered)} exercises of {exercises} ask what they do with it.")


def check_elsewhere(page: Page, session: Session, t: int, came: int) -> None:
    """Take steps until the word is the first choice, and measure other prompts on the new weights."""
    page.fill("#rate", "-1")
    page.click("#step-until")
    expect(page.locator("#elsewhere-caption")).to_be_visible()
    until = page.locator("#until")
    expect(until).to_have_attribute("data-end", "reached")
    steps = int(until.get_attribute("data-steps") or "")
    here, objective = session.sentence(TEXT, 0, hg.PositionLoss(t)), hg.PositionLoss(t)
    original, model = make_session().model, make_session().model
    for i in range(steps):  # plain gradient descent, by hand
        p = torch.softmax(model.logits(here.tokens)[0].double(), 1)[t]
        assert int(p.argmax()) != came, f"the word was the first choice after {i} steps already"
        model.loss_and_grads(here.tokens, here.targets, objective=objective)
        for x in model.parameters():
            assert x.grad is not None
            x.data = x.data - 0.1 * x.grad
            x.grad = None
    p = torch.softmax(model.logits(here.tokens)[0].double(), 1)[t]
    assert int(p.argmax()) == came
    word, before = said(session.token_text(came)), said(TEXT[t])
    plural = "step" if steps == 1 else "steps"
    assert until.inner_text() == (
        f"After {steps} {plural}, {word} is the first choice after {before}, with {share(p[came].item())}."
    )
    assert line(page) == f"After {steps} {plural}, {word} has {share(p[came].item())} after {before}."
    rows = page.locator(".fates tbody tr")
    prompts = [rows.nth(i).locator("td").first.inner_text() for i in range(rows.count())]
    assert len(prompts) == 5
    moved, lost = [], []
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([session.tokenizer.encode(prompt)])
        old, now = (torch.softmax(one.logits(ids)[0, -1].double(), 0) for one in (original, model))
        a, b = int(old.argmax()), int(now.argmax())
        cells = rows.nth(i).locator("td").all_inner_texts()
        assert cells[1] == f"‘{visible(session.token_text(a))}’ {share(old[a].item())}"
        assert cells[2] == f"‘{visible(session.token_text(b))}’ {share(now[b].item())}"
        rank = int((now > now[a]).sum()) + 1
        left = share(now[a].item())
        if session.token_text(a).startswith("‹"):  # no text can be appended for it: known only among the most probable
            assert cells[3] == (left if a in now.topk(5).indices else "–")
        else:
            assert cells[3] == left + ("" if rank == 1 else f", rank {rank}")
        moved += [b] if a != b else []
        first = f"{said(session.token_text(a))} after ‘{prompt}’"
        if cells[3] != "–":
            lost.append(
                (old[a].item() - now[a].item(), f"{first}, from {share(old[a].item())} to {share(now[a].item())}.")
            )
    times = moved.count(came)
    always = "" if times == 1 else "each time "
    often = "once " if times == 1 else f"{times} times "
    said_times = f", {always if times == len(moved) else often}{word}" if times else ""
    has = "has" if len(moved) == 1 else "have"
    summary = page.locator("#elsewhere-caption").inner_text()
    assert (
        moved
        and summary
        == f"Of 5 other prompts, {len(moved)} now {has} another first choice{said_times}. Hit hardest: {max(lost)[1]}"
    )
    check_accessibility(page)


def test_a_goal_can_be_stopped_or_is_given_up(open_page: Open) -> None:
    page = open_page("#/step?objective=position-3&token=3", viewport={"width": 320, "height": 700})
    page.fill("#rate", "-4")  # too small to get there
    page.click("#step-until")
    expect(page.locator("#until")).to_contain_text(re.compile(r"^After \d+ steps?, the first choice after"))
    expect(page.locator("#step-until")).to_have_text("stop")
    page.click("#step-until")
    expect(page.locator("#until")).to_have_attribute("data-end", "stopped")
    expect(page.locator("#until")).to_contain_text("Stopped. After")
    expect(page.locator("#step-until")).to_contain_text("take steps until it says")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    page.click("#step-reset")
    expect(page.locator("#until")).to_have_count(0)


def test_the_story_at_a_station_and_of_the_whole_sentence(open_page: Open, session: Session) -> None:
    page = open_page("#/station/blocks.1.a_6/backward?token=5")
    trace = session.sentence(TEXT).trace
    squares = trace["blocks.1.delta_6"].double().square().sum(1)
    most, here = int(squares.argmax()), share((squares[5] / squares.sum()).item())
    place = f"most, {share((squares[most] / squares.sum()).item())}, is at {said(TEXT[most])} (position {most + 1}); "
    word = f"{here} is at {said(TEXT[5])}, from which {said(TEXT[6])} is predicted."
    assert line(page) == f"Of the error of the whole sentence that arrives here, {'' if most == 5 else place}{word}"
    go(page, "station/blocks.1.a_6/forward?token=5")
    lengths = trace["blocks.1.a_6"].double().norm(dim=1)
    assert line(page) == (
        f"{said(TEXT[6])} is predicted from the row of {said(TEXT[5])}. Here this row has length"
        f" {typeset(lengths[5].item())}; the mean of all 13 rows is {typeset(lengths.mean().item())}."
    )
    go(page, "station/a_0/forward?token=5")
    p = trace["y_pred"][5, ord(TEXT[6])].item()
    assert line(page) == f"{said(TEXT[6])} was predicted from the 6 tokens up to {said(TEXT[5])}, with {share(p)}."
    go(page, "station/loss/backward?token=5")
    losses = -trace["y_pred"].double()[range(12), session.sentence(TEXT).ids[1:]].log()
    part = share((losses[5] / losses.sum()).item())
    assert line(page) == (
        f"{said(TEXT[6])} had {share(p)}: its loss of {typeset(losses[5].item())} is {part} of the sum over the sentence."
    )
    go(page, "station/loss/backward?token=5&objective=position-5")
    traced = session.sentence(TEXT, 0, hg.PositionLoss(5))
    expect(page.locator("#view-station")).to_have_attribute("data-sentence", traced.id)
    times = typeset((losses[5] / losses.mean()).item())
    assert line(page) == (
        f"The loss of {said(TEXT[6])} is −log p = {typeset(losses[5].item())}: {times} times the mean of the sentence."
    )
    assert attention.at_head(session, session.sentence(TEXT), 0, 1)["heads"][1]["length"] == pytest.approx(
        trace["blocks.0.a_3"][:, 8:16].norm().item()
    )
