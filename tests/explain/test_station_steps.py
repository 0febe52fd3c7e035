"""The page reads a block's order from `Block.steps()`: a step of an unknown kind is refused by its name, and a block with
other steps gets its stations and its sums without a change of the page."""

from typing import Any

import pytest
import torch
from tiny_session import LLAMA, TEXT, make_session
from torch import nn

from handgrad.errors import HandgradError
from handgrad.explain_page.follow import forward, signals
from handgrad.explain_page.follow.tensors import Cell, Tensors
from handgrad.explain_page.stations import table
from handgrad.explain_page.stations.network import KINDS, Network
from handgrad.explain_page.views.attention import attention_head
from handgrad.explain_page.views.overview import table as table_of
from handgrad.model.block import Block
from handgrad.model.inspect.trace import Trace
from handgrad.model.layers.norms import NORMS
from handgrad.model.steps import Step

STEPS = Block.steps


def test_a_step_of_an_unknown_kind_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(n_blocks=1)
    trace = session.sentence(TEXT).trace
    dummy = Step("short_conv", "convolution", ("a_10",), ("a_10_mixed",))
    monkeypatch.setattr(Block, "steps", lambda self: [*STEPS(self), dummy])
    for read in (
        lambda: make_session(n_blocks=1),  # its stations
        lambda: Network(session.model),  # what is followed
        lambda: attention_head(session.model, trace, 0, 0),
    ):
        with pytest.raises(HandgradError, match=r"the explain page cannot read the step 'short_conv'.*'convolution'"):
            read()


def test_every_rule_knows_every_kind() -> None:
    outside = {"embedding", "loss"}
    assert set(table._ABOUT) == set(KINDS) | outside
    assert set(forward.RULES) == set(signals.RULES) == set(KINDS) | outside | {"next"}


def after_each_branch(block: Block) -> list[Step]:
    """The block's steps with a norm after each branch."""
    found = []
    for step in STEPS(block):
        if step.kind == "add":
            stream, branch = step.inputs
            number = branch.removeprefix("a_")
            norm = Step(f"norm_after_{number}", "norm", (branch,), (f"{branch}_normed",), {number: block.after[number]})
            found += [norm, step._replace(inputs=(stream, f"{branch}_normed"))]
        else:
            found.append(step)
    return found


def with_norms(trace: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """The trace as such a block would record it, as far as the new steps and what is beside them."""
    made = dict(trace)
    for b, block in enumerate(model.blocks):
        here = f"blocks.{b}."
        for number, stream, output in (("4", "a_1", "5"), ("9", "a_5", "10")):
            norm = block.after[number]
            normed, saved = norm.forward(made[f"{here}a_{number}"])
            made[f"{here}a_{number}_normed"], made[f"{here}a_{output}"] = normed, made[here + stream] + normed
            made |= {f"{here}{name}_{number}": x for name, x in norm.statistics(saved).items()}
            delta = made[f"{here}delta_{output}"]
            made[f"{here}delta_{number}_normed"] = delta
            a_bar = norm.rebuild_output(saved)[0]
            made[f"{here}delta_{number}"] = norm.backward(delta, a_bar, saved)
            made[f"{here}grad_w_{number}"] = (a_bar * delta).sum(0)
    return made


@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt2", "llama"])
def test_a_norm_after_each_branch_has_a_station_and_its_cells_can_be_followed(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(dtype=torch.float64, **shape)
    sentence, model = session.sentence(TEXT), session.model
    config = model.config
    for block in model.blocks:
        block.after = nn.ModuleDict({number: NORMS[config.norm](config.d_model, config.eps, None) for number in "49"})
        for p in block.after.double().parameters():
            p.data = 1 + 0.1 * torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(Block, "steps", after_each_branch)
    values = with_norms({name: sentence.trace[name] for name in sentence.trace}, model)
    trace = Trace(values, sentence.trace.loss, sentence.trace.lengths)

    network = Network(model)
    stations = {s.id: s for s in table.stations_of(model, network)}
    station = stations["blocks.1.a_4_normed"]
    assert station.title == "Norm after 4" and station.kind == "norm"
    assert station.incoming == ("blocks.1.delta_4_normed",) and station.outgoing == ("blocks.1.delta_4",)
    assert station.parameters[0].gradient == "blocks.1.grad_w_4"
    formulas = " ".join(f.latex for f in [*station.forward, *station.backward])
    assert r"a_{4, \, \mathrm{normed}} = \bar a_{4}" in formulas and r"\Delta_{4} = \frac" in formulas
    assert stations["blocks.1.a_5"].inputs == ("blocks.1.a_1", "blocks.1.a_4_normed")
    assert stations["blocks.1.a_5"].outgoing == ("blocks.1.delta_4_normed",)
    session.network, session.stations = network, list(stations.values())
    entries = {entry["id"]: entry for entry in table_of(session)["stations"]}
    assert entries["blocks.1.a_10"]["reads"] == ["blocks.1.a_5", "blocks.1.a_9"]
    assert entries["blocks.1.a_5"]["reads"] == [None, "blocks.1.a_4"]
    assert entries["blocks.1.a_4_normed"]["symbol"] == "a₄_normed" and entries["blocks.1.a_9"]["more"] == ["neurons"]

    t = Tensors(model, trace, network)
    for name in (
        "a_4_normed",
        "a_5",
        "a_bar_4",
        "a_9_normed",
        "a_10",
        "delta_4",
        "delta_4_normed",
        "delta_9",
        "grad_w_4",
    ):
        cell = Cell(f"blocks.1.{name}", 0 if "grad" in name else 3, 5)
        formula, sums = (forward if name.startswith("a_") else signals).rule(t, sentence, cell)
        assert sums and sum(s.values().sum().item() for s in sums) == pytest.approx(t.value(cell), rel=1e-10), formula
    assert signals.rule(t, sentence, Cell("blocks.1.delta_4", 3, 5))[0] == "Δ through the norm"
