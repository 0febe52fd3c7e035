"""The data of the page: every formula is valid MathML, every name exists, every number equals the trace."""

import base64
import json
import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from tiny_session import LLAMA, QWEN3, SCALED, SCORES, SMOLLM3, TEXT, make_session, make_traced

import handgrad as hg
from conftest import OTHER_ACTIVATIONS
from handgrad.explain_page.presentation import captions
from handgrad.explain_page.presentation.pictures import picture
from handgrad.explain_page.views import attention as attention_view
from handgrad.explain_page.views import lens as lens_view
from handgrad.explain_page.views import overview as overview_view
from handgrad.explain_page.views import station as station_view
from handgrad.explain_page.views import values
from handgrad.formatting import typeset

SHAPES = [
    {},
    {"tied": False, "logits_bias": True},
    {"lora": 2},
    {"key_bias": False, "causal": False},
    *({"activation": name} for name in OTHER_ACTIVATIONS),
    LLAMA,
    QWEN3,
    SMOLLM3,
    SCORES,
    {**SCALED, "n_blocks": 2},
    {**LLAMA, "lora": 2},
    {**QWEN3, "lora": 2},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_table_is_complete(shape: dict[str, object]) -> None:
    session = make_session(**shape)  # type: ignore[arg-type]
    table = overview_view.table(session)
    json.dumps(table)
    assert [s["id"] for s in table["stations"]][:4] == ["a_0", "a_1", "blocks.0.a_2", "blocks.0.a_3"]
    assert len(table["stations"]) == 5 + 9 * 2
    for station in table["stations"]:
        assert station["forward"] and station["backward"] and station["summary"] and station["title"]
        for formula in [*station["forward"], *station["backward"]]:
            assert formula["equation"]
            for part in formula["math"]:
                assert ElementTree.fromstring(part).tag.endswith("math")
        assert {way for way, _ in station["sources"]} == {"forward", "backward"}
        assert all("def " in table["code"][name] for _, name in station["sources"])
        assert all(id in table["errata"] for id in station["errata"])


@pytest.mark.parametrize("shape", SHAPES)
def test_every_station_and_every_parameter_is_shown(shape: dict[str, object]) -> None:
    session, sentence = make_traced(**shape)
    shown: set[str] = set()
    for station in session.stations:
        view = station_view.at_station(session, sentence, station)
        json.dumps(view)
        assert view["maps"]
        for given in view["maps"]:
            x = values.matrix(session, sentence, given["name"], None)
            assert given["shape"] == list(x.shape)
            assert given["statistics"]["norm"] == pytest.approx(x.double().norm().item())
            names = {"trace": sentence.trace, "model": session.model}
            copied = eval(given["python"], names)  # "copy as Python" makes the data of the picture
            assert list(copied.shape) == given["picture"]["shape"]
            assert copied.abs().max().item() == pytest.approx(given["picture"]["largest"], rel=1e-5)
        trained = [p for p in station.parameters if session.model.get_parameter(p.name).requires_grad]
        assert [x["symbol"] for x in view["frozen"]] == [p.symbol for p in station.parameters if p not in trained]
        shown |= {p.name for p in station.parameters}
        for parameter, given in zip(trained, view["parameters"], strict=True):
            grad = sentence.trace[given["name"]]
            copied = eval(given["python"], names)
            assert given["symbol"] == parameter.symbol
            tokens = given["vocabulary"]  # of a gradient over the vocabulary some tokens are shown
            part = grad if tokens is None else grad.index_select(tokens["axis"], torch.tensor(tokens["ids"]))
            assert torch.equal(copied, part)
            assert given["grad_norm"] == grad.norm().item() and given["shape"] == list(grad.shape)
    assert shown == {name for name, _ in session.model.named_parameters()}
    assert (not session.model.embed.weight.requires_grad) == bool(shape.get("lora"))


def test_the_errors_of_all_heads_sum_to_delta_2() -> None:
    session, sentence = make_traced(dtype=torch.float64)
    t, block = sentence.trace, session.model.blocks[1]
    head, n = 1, len(sentence.ids)
    view = attention_view.at_head(session, sentence, 1, head)
    w_q, w_k, w_v = (part.chunk(3, 1)[head] for part in block.attn.qkv.weight.data.chunk(3, 1))
    rho, raw, q = t["blocks.1.rho"][head], t["blocks.1.delta_raw"][head], t["blocks.1.q"][head]
    signal = t["blocks.1.delta_3"][:, 8:16]
    sent = torch.stack(
        [torch.stack([rho[i, j] * signal[i] @ w_v.T + raw[i, j] * q[i] @ w_k.T for j in range(n)]) for i in range(n)]
    )
    given = view["maps"]["sent"]["picture"]
    assert given["largest"] == pytest.approx(sent.norm(dim=2).max().item())
    saturated = sent.norm(dim=2).clamp(max=given["scale"])  # as the colors are
    assert _cells(given) == pytest.approx(saturated.numpy(), abs=given["scale"] / 250)
    own = raw @ t["blocks.1.k"][head] @ w_q.T
    assert view["joined"] == pytest.approx((sent.sum(0) + own).norm().item())
    total = sum(
        (
            t["blocks.1.rho"][h].T @ t["blocks.1.delta_3"][:, 8 * h : 8 * h + 8] @ parts[2].T
            + t["blocks.1.delta_raw"][h] @ t["blocks.1.k"][h] @ parts[0].T
            + t["blocks.1.delta_raw"][h].T @ t["blocks.1.q"][h] @ parts[1].T
        )
        for h in range(3)
        for parts in [[part.chunk(3, 1)[h] for part in block.attn.qkv.weight.data.chunk(3, 1)]]
    )
    assert torch.allclose(total, t["blocks.1.delta_2"])
    assert view["all_heads"] == pytest.approx(total.norm().item())


def _cells(given: dict) -> np.ndarray:  # type: ignore[type-arg]
    cells = np.frombuffer(base64.b64decode(given["q"]), np.int8).reshape(given["cells"])
    return cells.astype(float) * given["scale"] / 127


@pytest.mark.parametrize("shape", [{}, LLAMA])
def test_the_lens_predicts_the_change_of_the_logits(shape: dict[str, object]) -> None:
    session, sentence = make_traced(dtype=torch.float64, **shape)
    station = session.by_id["blocks.0.a_10"]
    rows = lens_view.lens(session, sentence, station)["rows"]
    a, delta = sentence.trace["blocks.0.a_10"], sentence.trace["blocks.0.delta_10"]
    model, step = session.model, 1e-5

    def logits(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.head.forward(model.final_norm.forward(x)[0])

    measured = (logits(a - step * delta) - logits(a + step * delta)) / (2 * step)
    best = measured.topk(3, 1)
    for t, row in enumerate(rows[:-1]):
        assert [x["word"] for x in row["towards"][:3]] == [session.token_text(int(i)) for i in best.indices[t]]
        assert [x["change"] for x in row["towards"][:3]] == pytest.approx(best.values[t].tolist(), rel=1e-6)
        assert all(x["change"] < 0 for x in row["away"])
    assert rows[-1]["towards"] == rows[-1]["away"] == [] and rows[-1]["target"] is None
    probabilities = torch.softmax(logits(a), 1)
    assert rows[2]["predictions"][0]["p"] == pytest.approx(probabilities[2].max().item())
    with pytest.raises(hg.HandgradError, match="residual stream"):
        lens_view.lens(session, sentence, session.by_id["blocks.0.a_7"])


def test_replacing_a_token() -> None:
    """Δ_0 is the derivative along the relaxed one-hot input."""
    session, sentence = make_traced(dtype=torch.float64, tied=False)
    t = 3
    swap = station_view.at_station(session, sentence, session.by_id["a_0"])["swaps"][t]["swaps"][0]
    other, step = ord(swap["word"]) if len(swap["word"]) == 1 else swap["id"], 1e-6
    w = session.model.embed.weight.data
    row = sentence.ids[t]
    assert sentence.ids.count(row) == 1
    original = w[row].clone()
    w[row] += step * (w[other] - w[row])
    changed = session.model.loss(sentence.tokens, sentence.targets)
    w[row] = original
    assert (changed - sentence.trace.loss) / step == pytest.approx(swap["change"], rel=1e-3)


def test_the_loss_station() -> None:
    session, sentence = make_traced()
    rows = station_view.at_station(session, sentence, session.by_id["loss"])["positions"]
    assert rows[-1]["target"] is None and rows[-1]["push"] == []
    for t, row in enumerate(rows[:-1]):
        target = sentence.ids[t + 1]
        assert row["target"] == session.token_text(target)
        assert row["probability"] == pytest.approx(sentence.trace["y_pred"][t, target].item(), rel=1e-6)
        (own,) = [x for x in row["push"] if x["target"]]
        assert own["delta"] == sentence.trace["delta_12"][t, target].item() < 0


def test_a_cell_shows_the_entry_furthest_from_0() -> None:
    x = torch.randn(300, 700, generator=torch.Generator().manual_seed(1))
    given = picture(x)
    assert given["pool"] == [3, 3] and given["cells"] == [100, 234]
    cells = _cells(given)
    for i, j in ((0, 0), (17, 200), (99, 233)):
        part = x[3 * i : 3 * i + 3, 3 * j : 3 * j + 3].flatten()
        furthest = part[part.abs().argmax()].item()
        assert abs(cells[i, j]) == pytest.approx(min(abs(furthest), given["scale"]), abs=given["scale"] / 250)
    assert given["largest"] == x.abs().max().item()
    assert picture(torch.zeros(3, 4))["scale"] == 0


def test_slices_and_single_values() -> None:
    session, sentence = make_traced()
    x = sentence.trace["blocks.1.a_7"]
    part = values.slice_of(session, sentence, "blocks.1.a_7", None, (2, 5), (10, 20))
    assert part["cells"] == [3, 10] and part["largest"] == x[2:5, 10:20].abs().max().item()
    found = values.value_of(session, sentence, "blocks.1.a_7", None, (2, 5), (10, 20))
    assert found["value"] == x[found["row"], found["column"]].item()
    assert abs(found["value"]) == part["largest"]
    rho = values.value_of(session, sentence, "blocks.0.rho", 2, (4, 5), (1, 2))
    assert rho["value"] == sentence.trace["blocks.0.rho"][2, 4, 1].item()
    for name, head, rows in (("nonsense", None, (0, 1)), ("blocks.0.rho", None, (0, 1)), ("a_11", None, (5, 99))):
        with pytest.raises(hg.HandgradError):
            values.slice_of(session, sentence, name, head, rows, (0, 2))
    with pytest.raises(hg.HandgradError, match="are outside it"):
        values.value_of(session, sentence, "a_11", None, (90, 99), (0, 2))
    with pytest.raises(hg.HandgradError, match="3 heads"):
        attention_view.at_head(session, sentence, 0, 3)
    with pytest.raises(hg.HandgradError, match="no station"):
        session.station("a_99")


def test_captions_describe_the_data() -> None:
    x = torch.zeros(4, 5)
    x[2, 3] = -7
    assert "‘c’ (position 3)" in captions.about_activations(
        x, "abcd"
    ) and "feature 3: ⟦-7.0⟧" in captions.about_activations(x, "abcd")
    assert "‘c’ (position 3): ⟦1.0%⟧" in captions.about_error(x, "abcd", lambda row: True)
    assert "No error arrives" in captions.about_error(torch.zeros(4, 5), "abcd", lambda row: True)
    assert (
        typeset(1.5e-7) == "1.50·10⁻⁷"
        and typeset(0) == "0"
        and captions.quote(" \n\x01\ue000\xa0é") == "‘⏎␁⟨e000⟩⟨a0⟩é’"
        and [captions.quote(x) for x in (" ", "\n", " be, or", "  ")] == ["a space", "a line break", "‘be, or’", "‘␣␣’"]
    )


def test_a_head_of_a_bfloat16_model() -> None:
    session = make_session(dtype=torch.bfloat16)
    head = attention_view.at_head(session, session.sentence(TEXT), 0, 1)
    assert head["branches"]["value"] > 0 and math.isfinite(head["joined"])
