"""What the page is told: every formula can be drawn, every name exists, every number is the trace's."""

import base64
import json
import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from looking import TEXT, make_session

import handgrad as hg
from handgrad.explain import views, words
from handgrad.explain.pictures import picture

SHAPES = [
    {},
    {"tied": False, "logits_bias": True},
    {"lora": 2},
    {"key_bias": False, "causal": False},
    {"activation": "relu"},
    {"activation": "relu2"},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_table_is_complete(shape: dict[str, object]) -> None:
    session = make_session(**shape)  # type: ignore[arg-type]
    table = views.table(session)
    json.dumps(table)
    assert [s["id"] for s in table["stations"]][:4] == ["a_0", "a_1", "blocks.0.a_2", "blocks.0.a_3"]
    assert len(table["stations"]) == 5 + 9 * 2
    for station in table["stations"]:
        assert station["forward"] and station["backward"] and station["words"] and station["title"]
        for formula in [*station["forward"], *station["backward"]]:
            assert formula["equation"]
            for part in formula["math"]:
                assert ElementTree.fromstring(part["mathml"]).tag.endswith("math")
        assert {way for way, _ in station["sources"]} == {"forward", "backward"}
        assert all("def " in table["code"][name] for _, name in station["sources"])
        assert all(id in table["errata"] for id in station["errata"])


@pytest.mark.parametrize("shape", SHAPES)
def test_every_station_and_every_parameter_is_shown(shape: dict[str, object]) -> None:
    session = make_session(**shape)  # type: ignore[arg-type]
    look = session.look(TEXT)
    shown: set[str] = set()
    for station in session.stations:
        view = views.at_station(session, look, station)
        json.dumps(view)
        assert view["maps"]
        for given in view["maps"]:
            x = views.matrix(session, look, given["name"], None)
            if given["name"] != "delta_0":
                assert given["shape"] == list(x.shape)
                assert given["statistics"]["norm"] == pytest.approx(x.double().norm().item())
        for parameter, given in zip(station.parameters, view["parameters"], strict=True):
            shown |= set(parameter.names)
            if not given["frozen"]:
                assert given["grad_norm"] == look.trace[given["name"]].norm().item()
    assert shown == {name for name, _ in session.model.named_parameters()}
    assert (not session.model.transformer.wte.weight.requires_grad) == bool(shape.get("lora"))


def test_a_head_sends_back_exactly_what_arrives_below() -> None:
    session = make_session(dtype=torch.float64)
    look = session.look(TEXT)
    t, block = look.trace, session.model.blocks[1]
    head, n = 1, len(look.ids)
    view = views.at_head(session, look, 1, head)
    w_q, w_k, w_v = (part.chunk(3, 1)[head] for part in block.attn.c_attn.weight.data.chunk(3, 1))
    rho, raw, q = t["blocks.1.rho"][head], t["blocks.1.delta_raw"][head], t["blocks.1.q"][head]
    signal = t["blocks.1.delta_3"][:, 8:16]
    sent = torch.stack(
        [torch.stack([rho[i, j] * signal[i] @ w_v.T + raw[i, j] * q[i] @ w_k.T for j in range(n)]) for i in range(n)]
    )
    given = view["maps"]["sent"]["picture"]
    assert given["largest"] == pytest.approx(sent.norm(dim=2).max().item())
    saturated = sent.norm(dim=2).clamp(max=given["scale"])  # as the colours are
    assert _cells(given) == pytest.approx(saturated.numpy(), abs=given["scale"] / 250)
    own = raw @ t["blocks.1.k"][head] @ w_q.T
    assert view["joined"] == pytest.approx((sent.sum(0) + own).norm().item())
    whole = sum(
        (
            t["blocks.1.rho"][h].T @ t["blocks.1.delta_3"][:, 8 * h : 8 * h + 8] @ parts[2].T
            + t["blocks.1.delta_raw"][h] @ t["blocks.1.k"][h] @ parts[0].T
            + t["blocks.1.delta_raw"][h].T @ t["blocks.1.q"][h] @ parts[1].T
        )
        for h in range(3)
        for parts in [[part.chunk(3, 1)[h] for part in block.attn.c_attn.weight.data.chunk(3, 1)]]
    )
    assert torch.allclose(whole, t["blocks.1.delta_2"])
    assert view["all_heads"] == pytest.approx(whole.norm().item())


def _cells(given: dict) -> np.ndarray:  # type: ignore[type-arg]
    cells = np.frombuffer(base64.b64decode(given["q"]), np.int8).reshape(given["cells"])
    return cells.astype(float) * given["scale"] / 127


def test_the_lens_pushes_where_the_logits_go() -> None:
    session = make_session(dtype=torch.float64)
    look = session.look(TEXT)
    station = session.by_id["blocks.0.a_10"]
    rows = views.lens(session, look, station)["rows"]
    a, delta = look.trace["blocks.0.a_10"], look.trace["blocks.0.delta_10"]
    model, step = session.model, 1e-5

    def logits(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.lm_head.forward(model.transformer.ln_f.forward(x)[0])

    measured = (logits(a - step * delta) - logits(a + step * delta)) / (2 * step)
    best = measured.topk(3, 1)
    for t, row in enumerate(rows[:-1]):
        assert [x["word"] for x in row["towards"][:3]] == [session.word(int(i)) for i in best.indices[t]]
        assert [x["change"] for x in row["towards"][:3]] == pytest.approx(best.values[t].tolist(), rel=1e-6)
        assert all(x["change"] < 0 for x in row["away"])
    assert rows[-1]["towards"] == rows[-1]["away"] == [] and rows[-1]["target"] is None
    said = torch.softmax(logits(a), 1)
    assert rows[2]["says"][0]["p"] == pytest.approx(said[2].max().item())
    with pytest.raises(hg.HandgradError, match="stream"):
        views.lens(session, look, session.by_id["blocks.0.a_7"])


def test_another_word_in_a_tokens_place() -> None:
    """Δ_0 is the derivative along the relaxed one-hot input."""
    session = make_session(dtype=torch.float64, tied=False)
    look = session.look(TEXT)
    t = 3
    swap = views.at_station(session, look, session.by_id["a_0"])["swaps"][t]["swaps"][0]
    other, step = ord(swap["word"]) if len(swap["word"]) == 1 else int(swap["word"][1:-1]), 1e-6
    w = session.model.transformer.wte.weight.data
    row = look.ids[t]
    assert look.ids.count(row) == 1
    kept = w[row].clone()
    w[row] += step * (w[other] - w[row])
    changed = session.model.loss(look.tokens, look.targets)
    w[row] = kept
    assert (changed - look.trace.loss) / step == pytest.approx(swap["change"], rel=1e-3)


def test_the_loss_station() -> None:
    session = make_session()
    look = session.look(TEXT)
    rows = views.at_station(session, look, session.by_id["loss"])["positions"]
    assert rows[-1]["target"] is None and rows[-1]["push"] == []
    for t, row in enumerate(rows[:-1]):
        target = look.ids[t + 1]
        assert row["target"] == session.word(target)
        assert row["probability"] == look.trace["y_pred"][t, target].item()
        (own,) = [x for x in row["push"] if x["target"]]
        assert own["delta"] == look.trace["delta_12"][t, target].item() < 0


def test_a_picture_shows_the_furthest_of_each_cell() -> None:
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


def test_parts_and_single_values() -> None:
    session = make_session()
    look = session.look(TEXT)
    x = look.trace["blocks.1.a_7"]
    part = views.slice_of(session, look, "blocks.1.a_7", None, (2, 5), (10, 20))
    assert part["cells"] == [3, 10] and part["largest"] == x[2:5, 10:20].abs().max().item()
    found = views.value_of(session, look, "blocks.1.a_7", None, (2, 5), (10, 20))
    assert found["value"] == x[found["row"], found["column"]].item()
    assert abs(found["value"]) == part["largest"]
    rho = views.value_of(session, look, "blocks.0.rho", 2, (4, 5), (1, 2))
    assert rho["value"] == look.trace["blocks.0.rho"][2, 4, 1].item()
    for name, head, rows in (("nonsense", None, (0, 1)), ("blocks.0.rho", None, (0, 1)), ("a_11", None, (5, 99))):
        with pytest.raises(hg.HandgradError):
            views.slice_of(session, look, name, head, rows, (0, 2))
    with pytest.raises(hg.HandgradError, match="nothing at this place"):
        views.value_of(session, look, "a_11", None, (90, 99), (0, 2))
    with pytest.raises(hg.HandgradError, match="3 heads"):
        views.at_head(session, look, 0, 3)
    with pytest.raises(hg.HandgradError, match="no station"):
        views.find_station(session, "a_99")


def test_sentences_say_what_is_in_the_data() -> None:
    x = torch.zeros(4, 5)
    x[2, 3] = -7
    assert "‘c’ at place 3" in words.about_activations(x, "abcd") and "3, which reaches −7" in words.about_activations(
        x, "abcd"
    )
    assert "‘c’, place 3: 100%" in words.about_error(x, "abcd")
    assert "No error arrives" in words.about_error(torch.zeros(4, 5), "abcd")
    assert words.number(1.5e-7) == "1.50·10⁻⁷" and words.number(0) == "0" and words.quote(" \n") == "‘␣⏎’"


def test_a_head_of_a_bfloat16_model() -> None:
    session = make_session(dtype=torch.bfloat16)
    head = views.at_head(session, session.look(TEXT), 0, 1)
    assert head["branches"]["value"] > 0 and math.isfinite(head["joined"])
