"""The neuron lens, all heads at a glance, comparisons, gradient flow and token swaps."""

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_session import LLAMA, QWEN3, TEXT, evaluate, make_session, make_traced

import handgrad as hg
from handgrad.explain_page.presentation.pictures import picture
from handgrad.explain_page.session.session import BASE, Session
from handgrad.explain_page.views import attention as attention_view
from handgrad.explain_page.views import compare as compare_view
from handgrad.explain_page.views import neurons as neuron_view
from handgrad.explain_page.views import overview as overview_view
from handgrad.explain_page.views import station as station_view
from handgrad.explain_page.views import swaps as swaps_view
from handgrad.explain_page.views import values
from handgrad.explain_page.views.step import take_step


def small(**shape: Any) -> Session:
    return make_session(dtype=torch.float64, **shape)


@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["plain", "gated"])
def test_neurons_with_the_largest_blame(shape: dict[str, Any]) -> None:
    session, sentence = make_traced(dtype=torch.float64, **shape)
    found = neuron_view.neurons(session, sentence, 1)
    json.dumps(found)
    t, model = sentence.trace, session.model
    blame = (t["blocks.1.a_8"] * t["blocks.1.delta_8"]).sum(0)
    assert torch.equal(eval(found["python"], {"trace": t}), blame)
    first = found["neurons"][0]
    j = int(blame.abs().argmax())
    assert first["neuron"] == j and first["blame"] == pytest.approx(blame[j].item())
    for key, row in (("writes", model.blocks[1].mlp.contract.effective_weight()[j]),
                     ("would_write", -t["blocks.1.grad_w_8"][j])):  # fmt: skip
        bias = model.final_norm.forward(torch.zeros(1, 24, dtype=row.dtype))[0]
        scaled = row[None] * 24**0.5 / row.norm()
        logits = ((model.final_norm.forward(scaled)[0] - bias) @ model.head.effective_weight())[0].detach()
        assert [x["word"] for x in first[key]["more"]] == [session.token_text(int(i)) for i in logits.topk(6).indices]
        assert first[key]["less"][0]["logit"] == pytest.approx(logits.min().item(), rel=1e-6)
    letters = ("gate", "up") if shape else ("7",)
    assert tuple(first["inputs"]) == letters
    assert first["inputs"][letters[0]]["push"] == (-t[f"blocks.1.delta_{letters[0]}"][:, j]).tolist()
    at = neuron_view.neurons(session, sentence, 0, 3)
    assert eval(at["python"], {"trace": t}).abs().max().item() == pytest.approx(abs(at["neurons"][0]["blame"]))
    for block, position, message in ((2, None, "no block 2"), (0, 99, "no position 99")):
        with pytest.raises(hg.HandgradError, match=message):
            neuron_view.neurons(session, sentence, block, position)


@pytest.mark.parametrize("shape", [{}, QWEN3], ids=["gpt2", "qwen3"])
def test_all_heads_are_each_head_in_small(shape: dict[str, Any]) -> None:
    session, sentence = make_traced(dtype=torch.float64, **shape)
    found = attention_view.all_heads(session, sentence, limit=5)
    for block, heads in enumerate(found["blocks"]):
        for head, shown in enumerate(heads):
            whole = attention_view.at_head(session, sentence, block, head)
            assert (
                shown["rho"]["cells"] == [5, 5]
                and shown["rho"]["largest"] == whole["maps"]["rho"]["picture"]["largest"]
            )
            assert shown["sent_largest"] == pytest.approx(whole["maps"]["sent"]["picture"]["largest"])
            assert shown["incoming"] == pytest.approx(whole["incoming"])


def test_two_sentences_side_by_side() -> None:
    session = small()
    one, other = session.sentence(TEXT), session.sentence("to be, or xyz!?")
    found = compare_view.compare(session, one, other)
    assert found["rows"] == 13
    by_id = {row["station"]: row for row in found["stations"]}
    a, b = (x.trace["blocks.1.a_5"] for x in (one, other))
    assert by_id["blocks.1.a_5"]["a"] == pytest.approx(((b[:13] - a).norm() / a.norm()).item())
    assert "The first 10 tokens are equal" in found["caption"]
    at = compare_view.compare_station(session, one, other, session.by_id["blocks.1.a_5"])
    shown = at["maps"][0]
    difference = eval(shown["python"], {"trace": one.trace, "other": other.trace})
    assert shown["lengths"] == pytest.approx(difference.norm(dim=1).tolist())
    assert not any(shown["lengths"][:10]) and shown["lengths"][10] > 0
    assert shown["one"]["scale"] == shown["other"]["scale"]
    assert shown["difference"]["q"] == picture(difference)["q"]


def test_no_share_of_a_row_that_is_0() -> None:
    session = small()
    one, other = (session.sentence(TEXT, 0, hg.PositionLoss(t)) for t in (2, 6))
    at = compare_view.compare_station(session, one, other, session.by_id["a_12"])
    caption = next(m["caption"] for m in at["maps"] if m["kind"] == "delta")
    delta = [x.trace["delta_12"].norm(dim=1) for x in (one, other)]
    t = 6 if delta[1][6] > delta[0][2] else 2
    assert f"(position {t + 1})" in caption and caption.endswith(
        "where the row is 0 here." if t == 6 else "of the row."
    )
    assert "%" not in compare_view._about(session, one, torch.zeros(3, 2), torch.ones(3, 2))


def test_before_and_after_a_step_and_without_adapters() -> None:
    session = small(lora=2)
    first = session.sentence(TEXT)
    after = session.find(take_step(session, first, 1.0, "SGD")["id"])
    base = session.sentence(TEXT, BASE)
    assert torch.equal(base.trace["a_12"], first.trace["a_12"])  # u starts at 0
    found = compare_view.compare(session, base, after)
    assert found["one"]["version"] == BASE and found["other"]["steps"] == 1
    assert found["stations"][-1]["a"] > 0
    trained = session.find(after.id)
    assert torch.equal(trained.trace["a_12"], after.trace["a_12"])
    with pytest.raises(hg.HandgradError, match="no adapters"):
        small().sentence(TEXT, BASE)


def test_the_first_gradient_of_an_adapter_is_explained() -> None:
    session = small(lora=2)
    view = station_view.at_station(session, session.sentence(TEXT), session.by_id["blocks.0.a_4"])
    assert [x["symbol"] for x in view["parameters"]] == ["d_3", "u_3"]
    assert "∂d_3 is 0 because u_3 starts at 0" in view["parameters_caption"]


def test_gradient_flow_compares_rows_with_themselves() -> None:
    session, sentence = make_traced(dtype=torch.float64)
    flow = overview_view.flow(session, sentence)
    rows = flow["rows"]
    assert rows[0]["label"] == "Δ₁" and rows[-1]["label"] == "Δ₁₁"
    assert [r["label"] for r in rows if "=" in r["label"]] == [
        f"{pair} of block {b}" for b in (1, 2) for pair in ("Δ₄ = Δ₅", "Δ₉ = Δ₁₀")
    ]
    for row in rows:
        assert sum(row["share"]) == pytest.approx(1)
        assert eval(row["python"], {"trace": sentence.trace}).tolist() == pytest.approx(row["delta"])
    for mode in ("share", "delta", "a"):
        made = evaluate(flow["python"][mode], trace=sentence.trace, torch=torch)
        assert torch.allclose(made.double(), torch.tensor([row[mode] for row in rows], dtype=torch.float64))


def test_swaps_are_estimated_and_measured() -> None:
    session, sentence = make_traced(dtype=torch.float64)
    view = station_view.at_station(session, sentence, session.by_id["a_0"])
    measured = [(t, s) for t, row in enumerate(view["swaps"]) for s in row["swaps"] if s["measured"] is not None]
    assert len({t for t, _ in measured}) == 1
    for t, swap in [*measured, *((5, s) for s in swaps_view.swaps_at(session, sentence, 5)["swaps"])]:
        ids = sentence.tokens
        ids[0, t] = swap["id"]
        assert swap["measured"] == pytest.approx(session.model.loss(ids, sentence.targets) - sentence.trace.loss)
        delta_0 = sentence.trace["blocks.0.delta_1"][t] @ session.model.embed.weight.T
        assert swap["change"] == pytest.approx((delta_0[swap["id"]] - delta_0[sentence.ids[t]]).item())
    assert "an estimate can be wrong" in view["swaps_caption"]
    assert not values.matrix(session, sentence, "swaps", None)[3, sentence.ids[3]]
    with pytest.raises(hg.HandgradError, match="no position 99"):
        swaps_view.swaps_at(session, sentence, 99)


def test_maps_over_the_vocabulary_show_targets_first() -> None:
    session, sentence = make_traced(dtype=torch.float64)
    (shown, _) = station_view.at_station(session, sentence, session.by_id["a_12"])["maps"]
    targets = list(dict.fromkeys(sentence.ids[1:]))
    assert shown["vocabulary"]["ids"][: len(targets)] == targets and len(set(shown["vocabulary"]["ids"])) == 64
    assert shown["vocabulary"]["words"][0] == session.token_text(targets[0])
    assert shown["shape"] == [13, 256] and shown["picture"]["shape"] == [13, 64]


def test_a_notebook_shows_the_page_offline(tmp_path: Path) -> None:
    session = small(n_blocks=1)
    before = {name: p.clone() for name, p in session.model.named_parameters()}
    page = hg.explain(session.model, "to be", tokenizer=session.tokenizer)
    html = page._repr_html_()
    assert html.startswith("<iframe srcdoc=") and 'sandbox="allow-scripts' in html
    assert unescape(html.split('srcdoc="')[1].split('" title')[0]) == page.html
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == page.html and "embedded-answers" in page.html
    assert all(torch.equal(p, before[name]) for name, p in session.model.named_parameters())
    with pytest.raises(hg.HandgradError, match="no tokenizer"):
        hg.explain(session.model, "to be")


def test_the_readable_code_comes_first() -> None:
    for station in overview_view.table(small())["stations"]:
        for way in ("forward", "backward"):
            names = [name for w, name in station["sources"] if w == way]
            assert not any(n.startswith("paper/") for n in names[1:] if not names[0].startswith("paper/")), names
