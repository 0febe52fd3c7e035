"""The page of models of other families: what it shows follows from the layers, and every number is the trace's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_proof import check_all, failed_stations
from tiny_session import LFM2, LLAMA, QWEN3, SCORES, SMOLLM3, TEXT, evaluate, make_session, make_traced, session_of

import handgrad as hg
from conftest import perturb
from handgrad.explain_page.session.session import Session
from handgrad.explain_page.stations.table import Station
from handgrad.explain_page.views import attention as attention_view
from handgrad.explain_page.views import overview as overview_view
from handgrad.explain_page.views import station as station_view
from handgrad.explain_page.views import values, what_if
from handgrad.explain_page.views.step import take_step
from handgrad.families import FAMILIES
from handgrad.model.layers.linear import Embedding, Linear
from handgrad.model.storage.packed import Packed
from handgrad.ops import rmsnorm

LAYERS = Path(__file__).parents[2] / "docs" / "layers"


def formulas_of(station: Station) -> str:
    return " ".join(f.latex for f in [*station.forward, *station.backward])


def symbols_of(session: Session) -> set[str]:
    return {parameter.symbol for station in session.stations for parameter in station.parameters}


def test_a_llama_block_shows_its_own_layers() -> None:
    session = make_session(**LLAMA)
    norm, attn, gate, activation = (session.by_id[f"blocks.0.a_{i}"] for i in (2, 3, 7, 8))
    assert symbols_of(session) == {
        "w_tok", "w_1", "w_q", "w_k", "w_v", "w_3", "w_5", "w_gate", "w_up", "w_8", "w_10", "w_11 = w_tokᵗ",
    }  # fmt: skip
    everything = " ".join(formulas_of(station) for station in session.stations)
    assert r"\tilde b" not in everything and r"\partial b" not in everything and "pos" not in everything
    assert r"\mathrm{rms}_{1}" in formulas_of(norm) and r"\mu" not in everything
    assert ("backward", "ops/rmsnorm.py backward") in norm.sources
    assert "R(t)" in formulas_of(attn) and "R(-t)" in formulas_of(attn) and r"\frac{4}{2}" in formulas_of(attn)
    assert "norm" not in formulas_of(attn) and "unless" not in formulas_of(attn)
    assert gate.a == ("blocks.0.a_gate", "blocks.0.a_up") and gate.outgoing == ("blocks.0.delta_6",)
    assert activation.outgoing == gate.incoming == ("blocks.0.delta_gate", "blocks.0.delta_up")
    assert r"a_{8} = g(\mathrm{gate}) \circ \mathrm{up}" in formulas_of(activation)
    entry = overview_view.table(session)["stations"][session.stations.index(gate)]
    assert (entry["symbol"], entry["delta_symbol"], entry["outgoing"]) == ("gate, up", "Δ_gate, Δ_up", "Δ₆")
    pages = {page for station in session.stations for page in station.derived_in}
    assert pages == {"rmsnorm", "rotary", "grouped_query", "gated"}
    assert all((LAYERS / f"{page}.md").is_file() for page in pages)


def test_norms_of_queries_and_keys_windows_and_unrotated_blocks_are_named() -> None:
    qwen3 = make_session(**QWEN3).by_id["blocks.1.a_3"]
    for part in (
        r"\hat q_t",
        r"\partial w_{q \, \mathrm{norm}}",
        r"\partial w_{k \, \mathrm{norm}}",
        r"\partial b_k = \sum",
    ):
        assert part in formulas_of(qwen3)
    assert "R32" not in qwen3.errata
    scores = make_session(**SCORES).by_id["blocks.1.a_3"]
    for part in (
        r"s = 0.4 \, q^h (k^g)^t",
        r"2 \tanh(s / 2)",
        r"\tilde b_{\mathrm{sink}}",
        "none exceeds 2",
    ):
        assert part in f"{formulas_of(scores)} {scores.summary}"
    assert "b_sink" in {p.symbol for p in scores.parameters} and "scores" in scores.derived_in
    session = make_session(**SMOLLM3)
    first, second = (session.by_id[f"blocks.{i}.a_3"] for i in (0, 1))
    assert "R(t)" in formulas_of(first) and "unless" not in formulas_of(first)
    assert "R(t)" not in formulas_of(second) and r"t - 4 \lt \beta" in formulas_of(second)
    assert "does not rotate" in second.summary and "the 3 before it" in second.summary


def test_a_block_with_a_convolution() -> None:
    session, sentence = make_traced(**LFM2)
    gates, convolution, projection = (session.by_id[f"blocks.0.a_{name}"] for name in ("B", "3", "4"))
    own = {"w_B", "w_C", "w_x", "b_B", "b_C", "b_x", "w_conv", "b_conv", "w_3", "b_3"}
    assert own < symbols_of(session)
    assert (gates.kind, convolution.kind) == ("linear", "convolution")
    assert gates.a == ("blocks.0.a_B", "blocks.0.a_C", "blocks.0.a_x") and gates.outgoing == ("blocks.0.delta_2",)
    assert convolution.incoming == ("blocks.0.delta_3",)
    assert set(convolution.outgoing) == {f"blocks.0.delta_{x}" for x in ("B", "C", "x", "z", "conv")}
    assert r"w_{2} = [w_{B} \; w_{C} \; w_{x}]" in formulas_of(gates) and "convolution" in projection.summary
    for part in (r"\sum_{j=0}^{2} w_j", r"\Delta_z(t)", r"\partial w_j", r"\partial b_{\mathrm{conv}}"):
        assert part in formulas_of(convolution)
    assert {"gates", "short_conv"} & set(convolution.derived_in) == {"short_conv"} == set(gates.derived_in)
    assert all((LAYERS / f"{page}.md").is_file() for x in session.stations for page in x.derived_in)
    for station in session.stations:
        view = station_view.at_station(session, sentence, station)
        for given in view["parameters"]:
            assert given["shape"] == list(sentence.trace[given["name"]].shape), given["name"]
    heads = attention_view.all_heads(session, sentence)
    assert [len(row) for row in heads["blocks"]] == [0, 4] and "for b in [1]" in heads["python"]["rho"]
    effects = what_if.effects(session, sentence)
    assert [len(row) for row in effects["heads"]] == [0, 4]
    assert effects["edges"][0]["past"] == "convolution or attention"
    found = evaluate(effects["python"]["heads"], trace=sentence.trace)
    assert found[1].tolist() == pytest.approx(effects["heads"][1], rel=1e-4) and list(found) == [1]
    with pytest.raises(hg.HandgradError, match="block 0 has no step of kind attention"):
        attention_view.at_head(session, sentence, 0, 0)


def test_rows_that_a_convolution_cannot_reach() -> None:
    """The error of one position reaches, before the last convolution, only the tokens that it reads."""
    session = make_session(**{**LFM2, "conv_blocks": (1,)})
    sentence = session.sentence(TEXT, 0, hg.PositionLoss(6))
    depends = station_view.depends_on(session, sentence, session.by_id["blocks.1.a_2"])
    reached = sentence.trace["blocks.1.delta_2"].any(1).tolist()
    assert reached == [depends(row) for row in range(len(reached))] == [4 <= row <= 6 for row in range(len(reached))]
    before = station_view.depends_on(session, sentence, session.by_id["blocks.0.a_2"])
    assert [before(row) for row in range(len(reached))] == [row <= 6 for row in range(len(reached))]


def test_the_gated_station_shows_both_branches() -> None:
    session, sentence = make_traced(**LLAMA)
    view = station_view.at_station(session, sentence, session.by_id["blocks.1.a_7"])
    names = [f"blocks.1.{name}" for name in ("a_gate", "delta_gate", "a_up", "delta_up")]
    assert [m["name"] for m in view["maps"]] == names
    assert [m["symbol"] for m in view["maps"]] == ["gate", "Δ_gate", "up", "Δ_up"]
    for given in view["maps"]:
        x = sentence.trace[given["name"]]
        assert given["shape"] == list(x.shape) and given["statistics"]["most"] == x.max().item()
    flow = next(f for f in overview_view.overview(session, sentence)["flows"] if f["id"] == "blocks.1.a_7")
    both = torch.cat([sentence.trace[name] for name in names[1::2]], 1)
    assert flow["delta"] == pytest.approx(both.norm(dim=1).tolist())


def rotated(x: torch.Tensor, session: Session) -> torch.Tensor:
    c = session.model.config
    theta = c.rope_base ** (-torch.arange(0, c.query_width, 2, dtype=x.dtype) / c.query_width)
    angle = torch.arange(len(x), dtype=x.dtype)[:, None] * theta
    turned = torch.complex(*x.chunk(2, 1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], 1)


@pytest.mark.parametrize(("shape", "block"), [(LLAMA, 1), (QWEN3, 0), (SMOLLM3, 1), (SCORES, 1)])
def test_the_errors_of_a_head(shape: dict[str, object], block: int) -> None:
    """Autograd through one head, written with torch's functions: all it sends back, and what each token sends to each."""
    session = make_session(dtype=torch.float64, **shape)  # type: ignore[arg-type]
    sentence, head = session.sentence(TEXT), 1
    view = attention_view.at_head(session, sentence, block, head)
    t, attn, c = sentence.trace, session.model.blocks[block].attn, session.model.config
    group = head // (c.n_heads // c.kv_heads)
    a_2 = t[f"blocks.{block}.a_2"].clone().requires_grad_()

    def made(letter: str, i: int, heads: int) -> torch.Tensor:
        layer = getattr(attn, letter)
        x = F.linear(a_2, layer.weight, layer.bias).chunk(heads, 1)[i]
        if attn.normed and letter != "v":
            x = F.rms_norm(x, x.shape[1:], getattr(attn, f"{letter}_norm").weight, c.eps)
        return rotated(x, session) if attn.rotated and letter != "v" else x

    with torch.enable_grad():
        q, k, v = made("q", head, c.n_heads), made("k", group, c.kv_heads), made("v", group, c.kv_heads)
        ones = torch.ones(len(q), len(q), dtype=torch.bool)
        of, sinks = attn.scores, attn.sinks
        hidden = ones.triu(1) | (ones.tril(-of.window) if of.window else ~ones)

        def weights(x: torch.Tensor) -> torch.Tensor:
            s = x @ k.T * (k.shape[1] ** -0.5 if of.scale is None else of.scale)
            s = (s if of.cap is None else of.cap * torch.tanh(s / of.cap)).masked_fill(hidden, -torch.inf)
            s = s if sinks is None else torch.cat([s, sinks[head].expand(len(s), 1)], 1)
            return F.softmax(s, 1)[:, : len(k)]

        out, keys_only = (weights(x) @ v for x in (q, q.detach()))
        signal = t[f"blocks.{block}.delta_3"].chunk(c.n_heads, 1)[head]
        joined = torch.autograd.grad((out * signal).sum(), a_2, retain_graph=True)[0]
        rows = (keys_only * signal).sum(1)
        sent = torch.stack([torch.autograd.grad(row, a_2, retain_graph=True)[0].norm(dim=1) for row in rows])
    assert view["joined"] == pytest.approx(joined.norm().item(), rel=1e-9)
    assert view["maps"]["sent"]["picture"]["largest"] == pytest.approx(sent.max().item(), rel=1e-9)
    copied = evaluate(view["maps"]["sent"]["python"], model=session.model, trace=t)
    assert torch.allclose(copied, sent, rtol=1e-7, atol=1e-12)
    assert torch.equal(values.matrix(session, sentence, f"blocks.{block}.sent", head), copied)
    for name, x, i in (("q", q, head), ("k", k, group), ("v", v, group)):
        given = view["vectors"][name]
        assert given["head"] == i
        assert torch.allclose(values.matrix(session, sentence, given["name"], given["head"]), x)
    first = group * (c.n_heads // c.kv_heads)
    assert view["group"] == list(range(first, first + c.n_heads // c.kv_heads))
    assert ("rotated back" in view["sent_caption"]) == attn.rotated
    assert all(p.grad is None for p in session.model.parameters())


def test_the_identity_of_a_norm_without_mean_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rmsnorm, "backward", lambda delta, a_bar, inv_rms, w: delta * w * inv_rms)
    assert {"a_11", "blocks.0.a_2", "blocks.0.a_6"} <= failed_stations(check_all(make_session(**LLAMA)), "identity")


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_on_some_layers(dora: bool) -> None:
    model = make_session(**{**QWEN3, "n_blocks": 1}).model
    hg.lora.inject(model, 2, targets=("q_proj", "v_proj", "gate_proj"), dora=dora)
    perturb(model, scale=0.1)
    session = session_of(model)
    assert failed_stations(check_all(session)) == set()
    trained = {"d_q", "u_q", "d_v", "u_v", "d_gate", "u_gate", *(["m_q", "m_v", "m_gate"] if dora else [])}
    assert trained < symbols_of(session) and not {"d_k", "d_up"} & symbols_of(session)
    attn, gate = (formulas_of(session.by_id[f"blocks.0.a_{i}"]) for i in (3, 7))
    assert r"(w_q + s \, d_q u_q)" in attn and r"d_{\mathrm{gate}}" in gate and r"d_{\mathrm{up}}" not in gate


@pytest.mark.parametrize("lora", [0, 2])
def test_projections_side_by_side_in_one_matrix(monkeypatch: pytest.MonkeyPatch, lora: int) -> None:
    """A family that stores q, k and v, and gate and up, each as one transposed matrix needs no special case."""
    llama = FAMILIES["llama"]
    separate = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.expand")
    names = {name: path for name, path in llama.names.items() if name not in separate}
    names |= {"attn.qkv": "qkv_proj", "mlp.gate_expand": "gate_up_proj"}
    monkeypatch.setitem(FAMILIES, "fused", replace(llama, name="fused", names=names))
    session = make_session(**{**LLAMA, "family": "fused", "n_blocks": 1, "lora": lora})
    assert failed_stations(check_all(session)) == set()
    sentence = session.sentence(TEXT)
    for station in session.stations:
        for given in station_view.at_station(session, sentence, station)["parameters"]:
            assert given["shape"] == list(sentence.trace[given["name"]].shape)
    expected = {"w_q", "w_k", "w_v", "w_gate", "w_up", *(["d_2", "u_2", "d_6", "u_6"] if lora else [])}
    assert expected < symbols_of(session)
    assert r"w_{6} = [w_{\mathrm{gate}} \; w_{\mathrm{up}}]" in formulas_of(session.by_id["blocks.0.a_7"])
    assert attention_view.at_head(session, sentence, 0, 3)["joined"] > 0


def test_a_packed_model_with_adapters() -> None:
    """Packed matrices are no parameters: the page shows the adapters, and every formula holds."""
    model = make_session(**{**LLAMA, "n_blocks": 1}).model

    def packed(layer: Linear | Embedding) -> None:
        layer.pack(Packed.of(layer.weight.detach().bfloat16()), torch.float32)  # type: ignore[union-attr]

    for layer in model.blocks[0].modules():
        if isinstance(layer, Linear):
            packed(layer)
    hg.lora.inject(model, 2)
    assert failed_stations(check_all(session_of(model))) == set()
    packed(model.head.plain())
    packed(model.embed)
    session = session_of(model)
    sentence = session.sentence(TEXT)
    for station in session.stations:
        assert station_view.at_station(session, sentence, station)["maps"]
    assert {"d_q", "u_gate", "w_1"} < symbols_of(session) and not {"w_q", "w_tok"} & symbols_of(session)
    assert attention_view.at_head(session, sentence, 0, 3)["joined"] > 0
    assert values.matrix(session, sentence, "delta_0", None).shape == (len(TEXT), 256)
    assert take_step(session, sentence, 1e-3, "SGD")["predicted"] < sentence.trace.loss
