"""The page reads a block's order from `Block.steps()`: a step of an unknown kind is refused by its name, and a block with
other steps gets its stations and its sums without a change of the page."""

import pytest
from tiny_session import LLAMA, TEXT, make_session

from handgrad.errors import HandgradError
from handgrad.explain_page.follow import forward, signals
from handgrad.explain_page.session.session import Session
from handgrad.explain_page.stations import table
from handgrad.explain_page.stations.network import KINDS, Network
from handgrad.explain_page.views.attention import attention_head
from handgrad.explain_page.views.overview import table as table_of
from handgrad.model.block import Block
from handgrad.model.steps import Step

STEPS = Block.steps


def test_a_step_of_an_unknown_kind_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(n_blocks=1)
    trace = session.sentence(TEXT).trace
    dummy = Step("mixing", "recurrence", ("a_10",), ("a_10_mixed",))
    monkeypatch.setattr(Block, "steps", lambda self: [*STEPS(self), dummy])
    for read in (
        lambda: make_session(n_blocks=1),  # its stations
        lambda: Network(session.model),  # what is followed
        lambda: attention_head(session.model, trace, 0, 0),
    ):
        with pytest.raises(HandgradError, match=r"the explain page cannot read the step 'mixing'.*'recurrence'"):
            read()


def test_every_rule_knows_every_kind() -> None:
    outside = {"embedding", "loss"}
    assert set(table._ABOUT) == set(KINDS) | outside
    assert set(forward.RULES) == set(signals.RULES) == set(KINDS) | outside | {"next"}


GEMMA = {
    **LLAMA, "family": "gemma3_text", "gain_offset": 1.0, "qk_norm": True, "activation": "gelu_tanh", "window": 4,
    "windowed": (0,), "local_rope_base": 50.0, "embedding_scale": 3.0, "logit_cap": 2.0,
}  # fmt: skip
COHERE = {
    **LLAMA, "family": "cohere", "norm": "layer", "norm_bias": False, "parallel": True, "rotary_neighbors": True,
    "residual_scale": 0.5, "logit_scale": 0.25,
}  # fmt: skip


def formulas_of(session: Session, id: str) -> list[str]:
    station = session.by_id[id]
    return [f.latex for f in (*station.forward, *station.backward)]


def test_norms_after_branches_gains_of_1_plus_w_and_capped_logits() -> None:
    session = make_session(**GEMMA)
    norm = session.by_id["blocks.1.a_4_norm"]
    assert (norm.kind, norm.incoming, norm.outgoing) == ("norm", ("blocks.1.delta_4_norm",), ("blocks.1.delta_4",))
    assert norm.parameters[0].gradient == "blocks.1.grad_w_4"
    formulas = formulas_of(session, "blocks.1.a_4_norm")
    assert r"a_{4, \, \mathrm{norm}} = \bar a_{4} \, \mathrm{diag}(1 + w_{4})" in formulas
    assert any(x.startswith(r"\Delta_{4} = \frac") for x in formulas)
    assert formulas_of(session, "blocks.1.a_5")[0] == r"a_{5} = a_{1} + a_{4, \, \mathrm{norm}}"
    assert formulas_of(session, "a_1")[0] == r"a_1 = 3 \, \mathrm{ohe}(a_0) \, w_{\mathrm{tok}}"
    loss = " ".join(formulas_of(session, "loss"))
    assert r"y = 2 \tanh(\frac{a_{12}}{2})" in loss and r"\circ \Delta_y" in loss and r"\mathrm{softmax}(y)" in loss
    rotations = [" ".join(formulas_of(session, f"blocks.{i}.a_3")) for i in (0, 1)]
    assert "= 50^" in rotations[0] and "= 10000^" in rotations[1]
    entries = {entry["id"]: entry for entry in table_of(session)["stations"]}
    assert entries["blocks.1.a_10"]["reads"] == ["blocks.1.a_5", "blocks.1.a_9_norm"]
    assert entries["blocks.1.a_5"]["reads"] == [None, "blocks.1.a_4_norm"]
    assert entries["blocks.1.a_4_norm"]["symbol"] == "a₄_norm" and entries["blocks.1.a_9"]["more"] == ["neurons"]


def test_parallel_branches_read_one_norm_and_join_in_one_addition() -> None:
    session = make_session(**COHERE)
    assert formulas_of(session, "blocks.1.a_10") == [
        r"a_{10} = a_{1} + 0.5 \, (a_{4} + a_{9})", r"\Delta_{4} = \Delta_{9} = 0.5 \, \Delta_{10}",
        r"\Delta_{1} = \Delta_{10} + (\text{through the branches})",
    ]  # fmt: skip
    expand = session.by_id["blocks.1.a_7"]
    assert expand.inputs == ("blocks.1.a_2",) and expand.outgoing == ()
    other = r"\Delta_{2} = (\text{through the other branch}) + "
    assert all(any(other in x for x in formulas_of(session, f"blocks.1.{a}")) for a in ("a_3", "a_7"))
    assert r"\tilde b" not in " ".join(formulas_of(session, "blocks.1.a_2"))
    assert "features } 2i, 2i + 1" in " ".join(formulas_of(session, "blocks.1.a_3"))
    entries = {entry["id"]: entry for entry in table_of(session)["stations"]}
    assert entries["blocks.1.a_10"]["reads"] == [None, "blocks.1.a_4", "blocks.1.a_9"]
    assert entries["blocks.1.a_7"]["reads"] == ["blocks.1.a_2"]
