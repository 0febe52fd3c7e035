"""Patches from another trace: predicted is the derivative along the patch, measured what an independent network computes."""

import copy
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_objectives_and_edits import LIMIT, LLAMA, by_autograd
from torch import Tensor

import handgrad as hg
from conftest import perturb
from handgrad.model.inspect.heat_maps import Grid, heat_maps
from handgrad.model.inspect.trace import edited_forward
from handgrad.proof.oracles import relative_error
from handgrad.proof.reference_model import ReferenceModel

SMALL = {"n_vocab": 13, "n_context": 16, "d_model": 12, "n_heads": 3, "n_blocks": 3}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "scores": {**LLAMA, "attention_scale": 0.4, "score_cap": 2.0, "sinks": True},
    "qwen3": {**LLAMA, "family": "qwen3", "qk_norm": True},
    "gpt_neox": {"family": "gpt_neox", "positions": "rotary", "parallel": True, "tied": False, "rotary_width": 2},
}
TOKENS, OTHER = [3, 1, 7, 2, 9, 4], [3, 1, 5, 2, 8, 4]
WHY = hg.LogitDifference(5, 6, 11)


def with_targets(ids: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor([ids]), torch.tensor([[*ids[1:], -100]])


def make(name: str = "gpt2", **shape: Any) -> hg.GPT:
    given = {**SMALL, **MODELS[name], **shape}
    model = hg.GPT(hg.preset(given.pop("preset", "nano"), **given), seed=0, dtype="float64")
    perturb(model)
    return model


def both(name: str = "gpt2") -> tuple[hg.GPT, hg.Trace, hg.Trace]:
    """A model, and its traces of both prompts, with what only an edited trace has."""
    model = make(name)
    own = hg.trace(model, *with_targets(TOKENS), objective=WHY, edit={})
    return model, own, hg.trace(model, *with_targets(OTHER), edit={})


def slope(measured: Callable[[float], float]) -> float:
    """The derivative at 0, by differences."""
    return (measured(1e-4) - measured(-1e-4)) / 2e-4


# ── one patch ───────────────────────────────────────────────────────────────────────────────────────────────────────

PLACES: list[tuple[str, dict[str, Any]]] = [
    ("blocks.1.a_3", {"position": 4, "head": 1}),
    ("blocks.0.a_1", {"position": [2, 4]}),
    ("blocks.2.a_5", {}),
    ("blocks.1.a_8", {"column": 5}),
    ("blocks.1.q", {"head": 2, "position": 5}),
    ("blocks.1.k", {"head": 0}),
    ("blocks.1.v", {"head": 1, "position": 2, "column": 3}),
    ("blocks.2.rho", {"head": 0, "position": 5}),
    ("blocks.0.skip_5", {"position": 4}),
    ("a_11", {"position": 5}),
]


@pytest.mark.parametrize("name", ["gpt2", "scores"])
def test_predicted_is_the_derivative_along_the_patch(name: str) -> None:
    model, own, other = both(name)
    for place, where in PLACES:
        patch = hg.patch_from(other, place, **where)

        def moved(t: float, patch: hg.Patch = patch) -> float:
            edit = {x: lambda a, x=x: a + t * (patch[x](a.clone()) - a) for x in patch}
            return edited_forward(model, *with_targets(TOKENS), edit, WHY)[0]

        predicted = patch.predicted(own)
        assert predicted == pytest.approx(slope(moved), rel=1e-6, abs=1e-9), place
        assert predicted != 0, place


def test_two_patches_at_once_move_together() -> None:
    _, own, other = both()
    one, two = hg.patch_from(other, "blocks.0.a_3", head=0), hg.patch_from(other, "blocks.2.a_3", position=5)
    same = hg.patch_from(other, "blocks.0.a_3", head=2)
    patch = one | two | same
    assert [*patch] == ["blocks.0.a_3", "blocks.2.a_3"] and len(patch) == 2
    assert patch.predicted(own) == pytest.approx(sum(x.predicted(own) for x in (one, two, same)), rel=1e-12)
    x = patch["blocks.0.a_3"](own["blocks.0.a_3"].clone())
    assert torch.equal(x[:, :4], other["blocks.0.a_3"][:, :4]) and torch.equal(x[:, 8:], other["blocks.0.a_3"][:, 8:])
    assert torch.equal(x[:, 4:8], own["blocks.0.a_3"][:, 4:8])


def test_prompts_of_other_lengths_are_aligned() -> None:
    model, own, _ = both()
    longer = [3, 1, 5, 6, 2, 9, 4]
    rows = hg.align(*map(torch.tensor, (TOKENS, longer)))
    assert rows == {0: 0, 1: 1, 2: 3, 3: 4, 4: 5, 5: 6}  # 5 6 in the place of 7: paired from the end
    assert hg.align(torch.tensor([longer]), torch.tensor([TOKENS])) == {there: here for here, there in rows.items()}
    other = hg.trace(model, *with_targets(longer))
    patch = hg.patch_from(other, "blocks.1.a_5", position=2, align=rows)
    changed = hg.trace(model, *with_targets(TOKENS), edit=patch)["blocks.1.a_5"]
    assert torch.equal(changed[2], other["blocks.1.a_5"][3]) and torch.equal(changed[:2], own["blocks.1.a_5"][:2])
    found = hg.patch_map(
        model, *with_targets(TOKENS), other, "a_5", "position", objective=WHY, align={t: rows[t] for t in (0, 1, 2, 5)}
    )
    assert found.predicted[1, 2] == pytest.approx(patch.predicted(own), rel=1e-12)
    assert not found.predicted[:, 3:5].any() and not found.measure([(1, 3)])[1, 3]  # no partner: unchanged


# ── all patches at once ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_maps_equal_autograd(name: str) -> None:
    model, own, other = both(name)
    value, expected = by_autograd((model, *with_targets(TOKENS), None), WHY)
    for of, heads in (("a_1", 1), ("a_3", model.config.n_heads), ("a_5", 1), ("a_8", 1), ("a_9", 1)):
        products = torch.stack([
            (expected[f"blocks.{b}.delta_{of[2:]}"] * (other[f"blocks.{b}.{of}"] - own[f"blocks.{b}.{of}"]))
            .view(6, heads, -1) for b in range(3)
        ])  # fmt: skip
        sums = {
            ("position",): products.sum((2, 3)), ("column",): products.sum((1, 2)),
            ("head", "position"): products.sum(3).mT, ("position", "head"): products.sum(3),
            ("head", "column"): products.sum(1),
        }  # fmt: skip
        for by, wanted in sums.items():
            if "head" not in by or heads > 1:
                if by == ("column",) and heads > 1:
                    continue  # a column of the whole row, not of each head
                found = hg.patch_map(model, *with_targets(TOKENS), other, of, by, objective=WHY)
                assert relative_error(found.predicted, wanted) <= LIMIT, (of, by)
                assert found.value == pytest.approx(value, rel=1e-12)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_measured_is_what_an_independent_network_computes(name: str) -> None:
    """proof's reference, in torch's functions, with the same entries replaced in its own tensors."""
    model, own, other = both(name)
    width = own["blocks.0.a_3"].shape[1] // model.config.n_heads
    found = hg.patch_map(model, *with_targets(TOKENS), other, objective=WHY)
    cells = [(0, 1, 2), (1, 2, 4), (2, 0, 5)]
    found.measure(cells)
    seen = independent(model, OTHER, lambda name, x: x)[1]
    for block, head, t in cells:

        def visit(name: str, x: Tensor, block: int = block, head: int = head, t: int = t) -> Tensor:
            if name == f"blocks.{block}.a_3":
                x = x.clone()
                x[t, head * width : (head + 1) * width] = seen[name][t, head * width : (head + 1) * width]
            return x

        change = independent(model, TOKENS, visit)[0] - own.loss
        assert found.measured[block, head, t] == pytest.approx(change, rel=1e-9)
    assert int((~found.measured.isnan()).sum()) == len(cells)


def independent(
    model: hg.GPT, ids: list[int], visit: Callable[[str, Tensor], Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """The objective and the activations of the reference network, with tensors replaced."""
    seen: dict[str, Tensor] = {}

    def watched(start: int, name: str, x: Tensor) -> Tensor:
        seen[name] = visit(name, x)
        return seen[name]

    with torch.no_grad():
        return ReferenceModel(model, *with_targets(ids), None, WHY).loss(watched).item(), seen


def test_a_map_tells_how_well_it_predicts() -> None:
    model, _, other = both()
    found = hg.patch_map(model, *with_targets(TOKENS), other, by="head", objective=WHY)
    assert found.predicted.shape == (3, 3) and found.blocks == [0, 1, 2]
    assert "measured" not in repr(found) and found.measured.isnan().all() and found.misses() == []
    with pytest.raises(hg.HandgradError, match="measure at least two cells"):
        found.correlation  # noqa: B018
    x = found.predicted.abs().flatten()
    first = found.largest(2)
    assert [3 * b + h for b, h in first] == x.argsort(descending=True)[:2].tolist()
    found.measure(first)
    assert int((~found.measured.isnan()).sum()) == 2
    found.measure()
    one, two = found.predicted.flatten(), found.measured.flatten()
    centered = one - one.mean(), two - two.mean()
    cosine = (centered[0] @ centered[1]) / (centered[0].norm() * centered[1].norm())
    assert found.correlation == pytest.approx(cosine.item(), rel=1e-12)
    (cell, predicted, measured), *_ = found.misses()
    assert abs(measured - predicted) == pytest.approx((one - two).abs().max().item())
    assert found.predicted[cell] == predicted and found.measured[cell] == measured
    assert "9 patches of a_3 by block, head" in repr(
        found
    ) and f"correlation of predicted and measured {found.correlation:.4f}" in repr(found)
    assert "each by 1 forward pass in" in repr(found) and "times as long" in repr(found)


def test_blocks_without_the_activation_are_left_out() -> None:
    shape = {**LLAMA, "family": "lfm2", "qk_norm": True, "conv_blocks": (0,), "conv_bias": True}
    MODELS["lfm2"] = shape
    model, own, other = both("lfm2")
    found = hg.patch_map(model, *with_targets(TOKENS), other, objective=WHY)
    assert found.blocks == [1, 2] and found.predicted.shape == (2, 4, 6)
    where = {"position": 4, "head": 3}
    assert found.predicted[0, 3, 4] == pytest.approx(hg.patch_from(other, "blocks.1.a_3", **where).predicted(own))
    with pytest.raises(hg.HandgradError, match=r"no a_3 to patch in block 0"):
        found.measure([(0, 0, 0)])
    assert hg.patch_map(model, *with_targets(TOKENS), other, by="position", objective=WHY).blocks == [0, 1, 2]


# ── paths ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_paths_to_all_receivers_add_up_to_the_patch(name: str) -> None:
    """Every error that reaches a sender came back through one receiver and then by skip connections alone."""
    model, _, other = both(name)
    given = (model, *with_targets(TOKENS), other)
    parallel = model.config.parallel
    receivers = [f"blocks.{b}.{x}" for b in (1, 2) for x in ("a_2", "a_6")] + ["a_11"]
    receivers = receivers if parallel else ["blocks.0.a_6", *receivers]
    total = sum(hg.path_map(*given, receiver, objective=WHY).predicted[0] for receiver in receivers)
    whole = hg.patch_map(*given, objective=WHY).predicted[0]
    assert relative_error(total, whole) <= LIMIT
    heads = {"q": model.config.n_heads, "k": model.config.kv_heads, "v": model.config.kv_heads}
    parts = [
        hg.path_map(*given, f"blocks.2.{x}", objective=WHY, head=head).predicted
        for x, count in heads.items() for head in range(count)
    ]  # fmt: skip
    branch = hg.path_map(*given, "blocks.2.a_2", objective=WHY).predicted
    assert relative_error(sum(parts), branch) <= LIMIT
    rows = [hg.path_map(*given, "blocks.2.a_2", objective=WHY, position=t).predicted for t in range(6)]
    assert relative_error(sum(rows), branch) <= LIMIT
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


class Between(dict[str, Tensor]):
    """A trace on the way from one to another."""

    def __init__(self, one: hg.Trace, other: hg.Trace, t: float):
        super().__init__({name: x + t * (other[name] - x) for name, x in one.items() if name in other})


@pytest.mark.parametrize(
    "receiver, of, where",
    [
        ("blocks.2.q", "a_3", {"head": 1, "position": 5}),
        ("blocks.1.v", "a_9", {"head": 0}),
        ("blocks.2.a_6", "a_3", {}),
        ("a_11", "a_8", {"position": 5}),
        ("blocks.2.k", "v", {}),
        ("blocks.2.a_6", "a_5", {"position": 5}),
    ],
)
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_path_is_predicted_by_its_derivative(name: str, receiver: str, of: str, where: dict[str, Any]) -> None:
    model, own, other = both(name)
    by = "position"
    found = hg.path_map(model, *with_targets(TOKENS), other, receiver, of, by, objective=WHY, **where)
    cell = found.largest(1)[0]

    def moved(t: float) -> float:
        little = Between(own, other, t)
        its = hg.path_map(model, *with_targets(TOKENS), little, receiver, of, by, objective=WHY, **where)
        return its.measure([cell])[found.blocks.index(cell[0]), cell[1]].item()

    assert found.predicted[found.blocks.index(cell[0]), cell[1]] == pytest.approx(slope(moved), rel=1e-6)


def test_a_measured_path_equals_an_independent_network() -> None:
    """Everything but the path frozen in proof's reference: head 1 of block 0 → the feed-forward layer of block 2."""
    model, own, other = both()
    found = hg.path_map(model, *with_targets(TOKENS), other, "blocks.2.a_6", by="head", objective=WHY)
    found.measure([(0, 1)])
    clean, theirs = (independent(model, ids, lambda name, x: x)[1] for ids in (TOKENS, OTHER))
    frozen = {"blocks.0.a_9", "blocks.1.a_4", "blocks.1.a_9", "blocks.2.a_4"}

    def sent(name: str, x: Tensor) -> Tensor:
        if name == "blocks.0.a_3":
            return torch.cat([x[:, :4], theirs[name][:, 4:8], x[:, 8:]], 1)
        return clean[name] if name in frozen else x

    arrived = independent(model, TOKENS, sent)[1]["blocks.2.a_6"]
    value, _ = independent(model, TOKENS, lambda name, x: arrived if name == "blocks.2.a_6" else x)
    assert found.measured[0, 1] == pytest.approx(value - own.loss, rel=1e-9)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name, where, message",
    [
        ("blocks.1.a_3", {"position": 6}, "position must be a number from 0 to 5, not 6"),
        ("blocks.1.a_3", {"position": -1}, "not -1"),
        ("blocks.1.a_3", {"head": 3}, "head must be a number from 0 to 2, not 3"),
        ("blocks.1.a_3", {"column": 12}, "column must be a number from 0 to 11, not 12"),
        ("blocks.1.a_5", {"head": 0}, r"blocks\.1\.a_5 has no heads"),
        ("blocks.7.a_5", {}, r"no activation 'blocks\.7\.a_5'.*closest are blocks"),
        ("blocks.1.delta_5", {}, "no activation"),
        ("blocks.1.grad_w_q", {}, "no activation"),
        ("a_0", {}, "no activation"),
        ("blocks.1.a_5", {"align": {0: 9}}, "align: the other's row must be a number from 0 to 5, not 9"),
        ("blocks.1.a_5", {"align": {9: 0}}, "align: the row must be a number from 0 to 5, not 9"),
        ("blocks.1.a_5", {"align": {0: 0}, "position": 1}, "position 1 has no row in the other trace: add it to align"),
    ],
)
def test_bad_patches(name: str, where: dict[str, Any], message: str) -> None:
    model, _, other = both()
    with pytest.raises(hg.HandgradError, match=message):
        hg.trace(model, *with_targets(TOKENS), edit=hg.patch_from(other, name, **where))
    assert all(p.grad is None for p in model.parameters())


def test_traces_of_other_models_and_prompts_are_refused() -> None:
    model, _, other = both()
    shorter = hg.trace(model, *with_targets(OTHER[:4]))
    narrower = hg.trace(make(d_model=9), *with_targets(OTHER))
    more_words = hg.trace(make(n_vocab=17), *with_targets(OTHER))
    deeper = hg.trace(make(n_blocks=4), *with_targets(OTHER))
    cases: list[tuple[Any, str]] = [
        (shorter, "has 6 rows here and 4 in the other trace.*hg.align"),
        (narrower, r"has the shape \(6, 12\) here and \(6, 9\)"),
        (more_words, "a vocabulary of 17 tokens, this one has 13"),
        (torch.zeros(3), "other must be the hg.trace of another prompt"),
    ]
    for wrong, message in cases:
        with pytest.raises(hg.HandgradError, match=message):
            hg.trace(model, *with_targets(TOKENS), edit=hg.patch_from(wrong, "blocks.0.a_5"))
        with pytest.raises(hg.HandgradError, match=message):
            hg.patch_map(model, *with_targets(TOKENS), wrong, "a_5", "position")
    with pytest.raises(hg.HandgradError, match=r"nothing to edit at 'blocks\.3\.a_5'"):
        hg.trace(model, *with_targets(TOKENS), edit=hg.patch_from(deeper, "blocks.3.a_5"))
    with pytest.raises(hg.HandgradError, match="a map between the tokens of a prompt: the other has 4, this 6"):
        hg.trace(model, *with_targets(TOKENS), edit=hg.patch_from(shorter, "blocks.0.rho", align={0: 0}))
    with pytest.raises(hg.HandgradError, match=r"no blocks\.0\.delta_rho.*edit=\{\}"):
        hg.patch_from(other, "blocks.0.rho").predicted(hg.trace(model, *with_targets(TOKENS)))
    with pytest.raises(hg.HandgradError, match="of 13 tokens, this one has 17"):
        hg.patch_from(other, "blocks.0.a_5") | hg.patch_from(more_words, "blocks.0.a_5")


@pytest.mark.parametrize(
    "given, message",
    [
        ({"by": "token"}, 'by must be one or several of position, head, column, not "token"'),
        ({"by": ()}, "by must be"),
        ({"of": "a_5"}, r"a_5 has no heads"),
        ({"of": "a_33", "by": "position"}, "no activation"),
        ({"objective": hg.PositionLoss(5)}, "position 5 has no target"),
        ({"objective": hg.PositionLoss(6)}, "row from 0 to 5"),
    ],
)
def test_bad_maps(given: dict[str, Any], message: str) -> None:
    model, _, other = both()
    with pytest.raises(hg.HandgradError, match=message):
        hg.patch_map(model, *with_targets(TOKENS), other, **given)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "receiver, given, message",
    [
        ("blocks.3.q", {}, "is no receiver.*blocks go from 0 to 2"),
        ("blocks.1.a_3", {}, "is no receiver"),
        ("blocks.1.q", {"head": 3}, "head must be a number from 0 to 2"),
        ("blocks.1.a_2", {"head": 1}, "has no heads: the receivers q, k and v"),
        ("blocks.1.q", {"position": 6}, "position must be a number from 0 to 5"),
        ("blocks.0.q", {}, "no a_3 is before blocks.0.q"),
        ("blocks.1.q", {"of": "a_2", "by": "position"}, "a_2 is where paths are cut"),
        ("blocks.1.q", {"of": "a_40", "by": "position"}, "no a_40 is before blocks.1.q"),
    ],
)
def test_bad_paths(receiver: str, given: dict[str, Any], message: str) -> None:
    model, _, other = both()
    with pytest.raises(hg.HandgradError, match=message):
        hg.path_map(model, *with_targets(TOKENS), other, receiver, **given)


def test_blocks_without_a_norm_before_the_branch_have_no_paths() -> None:
    model = make(**LLAMA, family="olmo2", qk_norm=True, qk_norm_joint=True)
    other = hg.trace(model, *with_targets(OTHER))
    with pytest.raises(hg.HandgradError, match=r"this model has none there: use hg\.patch_map"):
        hg.path_map(model, *with_targets(TOKENS), other, "a_11")


def test_a_cell_must_be_one_of_the_map() -> None:
    model, _, other = both()
    found = hg.patch_map(model, *with_targets(TOKENS), other)
    for cell, message in (
        ((0, 1), r"a cell of this map is \(block, head, position\)"),
        ((3, 0, 0), "no a_3 to patch in block 3"),
        ((0, 3, 0), "head must be a number from 0 to 2"),
        ((0, 0, 6), "position must be a number from 0 to 5"),
    ):
        with pytest.raises(hg.HandgradError, match=message):
            found.measure([cell])
    assert found.measured.isnan().all()


# ── in a notebook ───────────────────────────────────────────────────────────────────────────────────────────────────


def shown(html: str) -> Any:
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html, re.S)[1])  # type: ignore[index]


def test_tensors_of_a_trace_display_themselves(tmp_path: Path) -> None:
    _, own, _ = both()
    rho, words = own["blocks.1.rho"], list("abcd<f")
    page = rho.show(words)
    maps = shown(page.html)["maps"]
    assert [m["title"] for m in maps] == ["head 0", "head 1", "head 2"]
    assert maps[0]["rows"] == maps[0]["columns"] == [f"{t} {word}" for t, word in enumerate(words)]
    assert torch.tensor([m["values"] for m in maps], dtype=torch.float64).allclose(rho, rtol=1e-4, atol=0)
    assert not re.search(r"https?:|src=|href=|url\(", page.html) and "default-src 'none'" in page.html
    assert "4 <f" not in page.html
    page.save(tmp_path / "rho.html")
    assert (tmp_path / "rho.html").read_text() == page.html
    assert rho._repr_html_().startswith("<iframe srcdoc=") and 'sandbox="allow-scripts"' in rho._repr_html_()
    assert shown(rho.show().html)["maps"][0]["rows"][2] == "2 7"  # no tokenizer: the id
    (one,) = shown(own["blocks.0.grad_w_q"].show().html)["maps"]
    assert one["rows"] == [] and one["shape"] == [12, 12] and one["pool"] == [1, 1]
    for name in own:
        own[name].show()
    with pytest.raises(hg.HandgradError, match="words has 2 texts, and the trace 6 tokens"):
        rho.show(["a", "b"])


def test_large_tensors_are_reduced_to_their_largest_entries() -> None:
    x = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    (one,) = shown(heat_maps("x", [Grid("", x)], "a").html)["maps"]
    high, wide = one["pool"]
    values = torch.tensor(one["values"])
    assert values.numel() <= 60_000 and wide == 4 and values.shape[1] == 250
    for i, j in ((0, 0), (7, 100), (len(values) - 1, 249)):
        part = x[i * high : (i + 1) * high, j * wide : (j + 1) * wide].flatten()
        assert values[i, j] == pytest.approx(part[part.abs().argmax()].item(), rel=1e-4)


def test_computing_with_a_tensor_of_a_trace_gives_an_ordinary_one() -> None:
    _, own, _ = both()
    x = own["blocks.1.a_5"]
    for y in (x * 2, x[0], x.sum(), x @ x.T, copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert type(y) is Tensor
    assert repr(x) == repr(x.clone()) and torch.equal(x, x.clone())


def test_a_map_displays_predicted_and_measured() -> None:
    model, _, other = both()
    found = hg.patch_map(model, *with_targets(TOKENS), other, objective=WHY)
    before = shown(found.show().html)
    assert [m["title"] for m in before["maps"]] == [f"predicted, block {b}" for b in range(3)]
    found.measure([(2, 1, 5)])
    maps = shown(found.show().html)["maps"]
    assert [m["title"] for m in maps][3:] == [f"measured, block {b}" for b in range(3)]
    value = found.measured[2, 1, 5].item()
    assert maps[5]["values"][1][5] == pytest.approx(value, rel=1e-4) and maps[5]["values"][1][4] is None
    assert maps[0]["rows"] == ["head 0", "head 1", "head 2"] and maps[0]["columns"][2] == "2 7"
    assert before["scale"] == pytest.approx(found.predicted.abs().max().item()) and math.isfinite(value)
    assert "PatchMap" not in found._repr_html_() and "<iframe" in found._repr_html_()
