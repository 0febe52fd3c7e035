"""The page of a mixture of experts: its stations, and every number followed to what it was computed from."""

from typing import Any

import pytest
import torch
from test_proof import check_all, failed_stations
from tiny_session import TEXT, make_traced

from handgrad.errors import HandgradError
from handgrad.explain_page.export import answers
from handgrad.explain_page.follow.follow import follow
from handgrad.explain_page.views import station as station_view
from handgrad.explain_page.views.neurons import neurons
from handgrad.families import FAMILIES

PLAIN = {"preset": "nano-llama", "n_heads": 4, "n_kv_heads": 2, "d_hidden": 10, "n_blocks": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"n_experts": 4, "experts_per_token": 2},
    "qwen2_moe": {"n_experts": 3, "experts_per_token": 2, "normalized_gates": False, "d_shared": 6},
    "dots1": {"n_experts": 4, "experts_per_token": 2, "gate_scale": 2.5, "d_shared": 8, "n_kv_heads": 4},
}


def traced(family: str) -> Any:
    return make_traced(
        **{**PLAIN, "dtype": torch.float64, "family": family, **FAMILIES[family].fixed, **SHAPES[family]}
    )


@pytest.mark.parametrize("family", SHAPES)
def test_stations_say_which_experts_a_token_went_to(family: str) -> None:
    session, sentence = traced(family)
    router = session.by_id["blocks.0.a_gates"]
    assert "experts for each token" in router.summary and router.derived_in == ("experts",)
    view = station_view.at_station(session, sentence, router)
    assert [m["name"] for m in view["maps"]] == ["blocks.0.a_gates", "blocks.0.delta_gates"]
    chosen = sentence.trace["blocks.0.chosen"]
    assert chosen.shape == (len(TEXT), 2) and int(chosen.max()) < SHAPES[family]["n_experts"]


@pytest.mark.parametrize("family", SHAPES)
def test_every_number_follows(family: str) -> None:
    session, sentence = traced(family)
    names = ["scores", "gates", "experts", *(["shared"] if "d_shared" in SHAPES[family] else []), "9", "6"]
    names += ["shared_gate"] if family == "qwen2_moe" else []
    for name in [f"blocks.0.{kind}_{x}" for x in names for kind in ("a", "delta")]:
        x = sentence.trace[name]
        for i, j in ((0, 0), (5, x.shape[1] - 1), (len(TEXT) - 2, x.shape[1] // 2)):
            found = follow(session, sentence, name, None, i, j)
            assert found["value"] == pytest.approx(x[i, j].item(), rel=1e-9, abs=1e-14)
            assert found["sum"] == pytest.approx(x[i, j].item(), rel=1e-6, abs=1e-12), name


@pytest.mark.parametrize(("family", "with_neurons"), [("mixtral", []), ("qwen2_moe", [0])])
def test_a_file_has_the_neurons_that_all_tokens_pass(
    family: str, with_neurons: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handgrad.explain_page.export._steps", lambda *_: [])
    monkeypatch.setattr("handgrad.explain_page.export.course_view", lambda *_, **options: {})
    session, sentence = traced(family)
    found = answers(session, sentence, lambda _: ())
    assert [key for key in found if key.startswith("neurons")] == [f"neurons?block={b}" for b in with_neurons]
    if not with_neurons:
        with pytest.raises(HandgradError, match="block 0 has no neurons that all tokens pass"):
            neurons(session, sentence, 0)


def test_the_page_proves_its_stations() -> None:
    session, _ = traced("qwen2_moe")
    assert not failed_stations(check_all(session))
