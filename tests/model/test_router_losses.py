"""The losses of routers in every way that a batch is computed: pieces, calls, recomputed blocks, adapters, examples."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_mixtures import LENGTHS, gradients
from test_mixtures import make as make_mixture
from torch import Tensor

import handgrad as hg
from conftest import perturb
from handgrad.model.passes.example_gradients import ExampleNorms
from handgrad.model.passes.router_losses import RouterLosses
from handgrad.model.precision import why_not_mixed
from handgrad.ops import experts
from handgrad.optim import OptimizerInBackward
from handgrad.proof.checker import Checker
from handgrad.text.tokenizer import make as make_tokenizer

FAMILIES = ("mixtral", "qwen2_moe", "gpt_oss")
LOSSES = {"balance_loss": 0.7, "z_loss": 0.3}
Batch = tuple[Tensor, Tensor]


def make(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[hg.GPT, Tensor, Tensor]:
    """The model of test_mixtures.py, where a token does not use all experts: then f is even, and the gradient 0."""
    own = {"experts_per_token": 2} if family == "gpt_oss" else {}
    return make_mixture(family, dtype, **own, **changes)


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("losses", [{"balance_loss": 0.7}, {"z_loss": 0.3}, LOSSES], ids=str)
@pytest.mark.some_cases(9)
def test_verify_covers_them(family: str, losses: dict[str, float]) -> None:
    model, *batch = make(family, **losses)
    report = hg.verify(model, *batch, LENGTHS)
    assert report.passed, report.failed or report.missing
    ids = {check.id for check in report.checks}
    assert {"losses of the routers", "gradients, routers counted first", "gradients, in pieces"} <= ids
    text = replace(model.config, balance_loss=0.0, z_loss=0.0)
    with_them = gradients(model, *batch)
    model.config = text
    name = next(n for n in with_them if n.endswith(("gate.weight", "router.weight")))
    assert not torch.allclose(with_them[name], gradients(model, *batch)[name], rtol=1e-3)


def sabotaged(self: RouterLosses, scores: Tensor, mistake: str) -> Tensor:
    """Δ_s with a mistake."""
    p = torch.softmax(scores, 1)
    rows, f, chosen = self.rows, self.tokens / self.rows, torch.topk(p, 2)[1]
    if mistake == "1/n":
        rows = len(scores)
    elif mistake == "f of each block alone":
        f = experts.tokens_of_experts(chosen, p.shape[1], p.dtype) / len(p)
    elif mistake == "f is even":
        f = torch.full_like(f, 2 / len(f))
    elif mistake == "f has a derivative of 1":
        return p / rows
    slope = p if mistake == "P is of the scores" else p * (f - (p * f).sum(1, keepdim=True))
    return (-1 if mistake == "sign" else 1) * self.balance_weight * p.shape[1] / rows * slope


MISTAKES = ("sign", "1/n", "f of each block alone", "f is even", "f has a derivative of 1", "P is of the scores")


def judged(name: str, *batch: Any) -> tuple[bool, bool]:
    """Whether autograd and finite differences find the gradient of a parameter right."""
    checker = Checker(*batch, lengths=LENGTHS)
    return checker.errors[name] <= checker.limit, checker.difference_of([name]) <= checker.difference_limit


@pytest.mark.parametrize("mistake", ["none", *MISTAKES])
@pytest.mark.some_cases(3)
def test_a_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouterLosses, "delta", lambda self, scores: sabotaged(self, scores, mistake))
    right = mistake == "none"
    assert judged("model.layers.1.block_sparse_moe.gate.weight", *make("mixtral", balance_loss=0.7)) == (right, right)


def test_a_z_loss_without_its_factor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of_ops = experts.delta_z_loss
    for factor in (1, 2):
        monkeypatch.setattr(experts, "delta_z_loss", lambda s, n, factor=factor: of_ops(s, n) / factor)
        found = judged("model.layers.0.block_sparse_moe.gate.weight", *make("mixtral", z_loss=0.3))
        assert found == (factor == 1, factor == 1)


def test_a_wrong_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token counted for the first expert: the reference has its own counts."""
    of_ops = experts.router_sums
    monkeypatch.setattr(experts, "router_sums", lambda s, chosen: of_ops(s, 0 * chosen))
    model, *batch = make("mixtral", balance_loss=0.7)
    checker = Checker(model, *batch, lengths=LENGTHS)
    assert checker.errors["losses of the routers"] > checker.limit


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_sum_by_finite_differences(family: str) -> None:
    """Of the numbers that a run reports, on the path that it takes: in pieces, of all weights together."""
    model, *batch = make(family, **LOSSES)

    def value() -> float:
        routers = RouterLosses(model.config)
        model.zero_grad()
        return model.loss_and_grads(*batch, LENGTHS, tokens_at_once=3, routers=routers) + routers.total

    value()
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = [p.grad.clone() for p in trained if p.grad is not None]
    direction = [torch.randn_like(p) for p in trained]
    slope = sum((g * d).sum().item() for g, d in zip(grads, direction, strict=True))
    values = []
    for step in (1e-6, -2e-6):
        for p, d in zip(trained, direction, strict=True):
            p.data.add_(d, alpha=step)
        values.append(value())
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-6)


CUTS: dict[str, dict[str, Any]] = {
    "blocks": {"recompute": "blocks"}, "pieces": {"tokens_at_once": 1},
    "both": {"tokens_at_once": 1, "recompute": "blocks"}, "counted": {},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("frozen", ["", "router", "all but the first block"])
@pytest.mark.some_cases(3)
def test_cut_or_not(family: str, cut: str, frozen: str) -> None:
    """Also of sequences without a target, and where the router trains nothing but lets Δ pass."""
    model, tokens, targets = make(family, **LOSSES)
    targets[-LENGTHS[-1] :] = -100
    names = model.config.table.names
    for name, p in model.named_parameters():
        if frozen == "router" and f".{names['mlp.router']}." in name and "experts" not in name:
            p.requires_grad_(False)
        if frozen.startswith("all") and f"{names['blocks']}.0." not in name:
            p.requires_grad_(False)
    expected = gradients(model, tokens, targets)
    text = gradients_of_text(model, tokens, targets)
    assert any(not torch.allclose(expected[name], text[name], rtol=1e-3) for name in expected)
    counted = model.count_routers(tokens, LENGTHS) if cut == "counted" else None
    close(gradients(model, tokens, targets, **CUTS[cut], routers=counted), expected)


def gradients_of_text(model: hg.GPT, *batch: Tensor, **options: Any) -> dict[str, Tensor]:
    return gradients(model, *batch, objective=hg.MeanLoss(routers=False), **options)


def parts_of(tokens: Tensor, targets: Tensor) -> list[Batch]:
    return [*zip(tokens.split(LENGTHS), targets.split(LENGTHS), strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_several_calls_add_up_to_one(family: str) -> None:
    model, *batch = make(family, **LOSSES)
    expected = gradients(model, *batch)
    n_targets = int((batch[1] != -100).sum())
    whole, *others = (model.count_routers(tokens[None]) for tokens, _ in parts_of(*batch))
    for other in others:
        whole = whole + other
    model.zero_grad()
    for tokens, targets in parts_of(*batch):
        model.loss_and_grads(tokens[None], targets[None], n_targets=n_targets, routers=whole)
    close({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)
    counted = model.count_routers(batch[0], LENGTHS)
    assert (whole.balance, whole.z) == pytest.approx((counted.balance, counted.z), rel=1e-12)
    with pytest.raises(hg.HandgradError, match="count every batch anew"):
        model.loss_and_grads(*batch, LENGTHS, routers=whole)


def test_a_part_of_a_batch_is_refused_unless_all_is_counted() -> None:
    model, tokens, targets = make("mixtral", balance_loss=0.1)
    with pytest.raises(hg.HandgradError, match=r"give routers= the sum of model\.count_routers"):
        model.loss_and_grads(tokens, targets, LENGTHS, n_targets=100)
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(hg.HandgradError, match=r"routers must be what model\.count_routers returns"):
        model.loss_and_grads(tokens, targets, LENGTHS, routers=3)  # type: ignore[arg-type]
    model.config = replace(model.config, balance_loss=0.0)
    with pytest.raises(hg.HandgradError, match="nothing to count"):
        model.count_routers(tokens, LENGTHS)


def test_an_object_that_counts_counts_every_call_anew() -> None:
    model, tokens, targets = make("mixtral", **LOSSES)
    first, own = RouterLosses(model.config), RouterLosses(model.config)
    for options in ({}, {"tokens_at_once": 1}):
        gradients(model, tokens.flip(0), targets, routers=first, **options)
        found = gradients(model, tokens, targets, routers=first, **options)
        close(found, gradients(model, tokens, targets, routers=own, **options))
        assert first.balance == pytest.approx(own.balance, rel=1e-12)
        assert first.rows == 2 * len(tokens)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_the_optimizer_inside_the_backward_pass(clip: float | None) -> None:
    (first, *batch), (second, *_) = (make("qwen2_moe", **LOSSES) for _ in range(2))
    gradients(first, *batch)
    trained = [p for p in first.parameters() if p.requires_grad]
    if clip:
        torch.nn.utils.clip_grad_norm_(trained, clip)
    torch.optim.SGD(trained, lr=0.1).step()
    inside = OptimizerInBackward(second, lambda p: torch.optim.SGD(p, lr=0.1), clip=clip)
    routers = RouterLosses(second.config)
    inside.step(*batch, LENGTHS, routers=routers)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6 if clip else 1e-10, atol=1e-12)
    assert routers.balance > 0


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.some_cases(3)
def test_adapters_and_their_dropout(dropout: float) -> None:
    model, *batch = make("mixtral", **LOSSES)
    hg.lora.inject(model, 2, dropout=dropout)
    perturb(model, scale=0.1)
    if not dropout:
        assert hg.verify(model, *batch, LENGTHS).passed
    for options in ({"tokens_at_once": 3}, {}):
        expected = gradients(model, *batch, seed=5, **options)
        counted = model.count_routers(batch[0], LENGTHS, seed=5, **options)
        close(gradients(model, *batch, seed=5, routers=counted, **options), expected)


def test_examples_are_measured_by_the_text_alone() -> None:
    model, tokens, targets = make("mixtral", **LOSSES)
    with pytest.raises(hg.HandgradError, match="no part for each example"):
        model.loss_and_grads(tokens, targets, LENGTHS, examples=ExampleNorms())
    model, *_ = make("mixtral", n_vocab=256, n_context=64, **LOSSES)
    model.tokenizer = make_tokenizer("bytes", [])
    hg.lora.inject(model, 2)
    perturb(model, scale=0.1)
    facts = [{"prompt": f"{i} plus {i} is", "completion": f" {2 * i}"} for i in range(3)]
    found = [hg.example_norms(model, facts), hg.example_products(model, facts)]
    found.append(hg.influence(model, facts[:1], facts).scores)
    model.config = replace(model.config, balance_loss=0.0, z_loss=0.0)
    torch.testing.assert_close(hg.example_norms(model, facts), found[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(hg.example_products(model, facts), found[1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(hg.influence(model, facts[:1], facts).scores, found[2], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "objective", [hg.PositionLoss(2), hg.LogitDifference(2, 3, 4), hg.MeanLoss(routers=False)], ids=str
)
def test_other_objectives_are_those_of_the_text(objective: Any) -> None:
    model, tokens, targets = make("mixtral", **LOSSES)
    targets[2] = 1
    found = gradients(model, tokens, targets, objective=objective)
    model.config = replace(model.config, balance_loss=0.0, z_loss=0.0)
    close(found, gradients(model, tokens, targets, objective=objective))


def test_logits_of_a_wrapped_model_carry_the_given_signal_alone() -> None:
    found = []
    for losses in (LOSSES, {}):
        model, tokens, _ = make("mixtral", **losses)
        hg.nn.wrap(model)(tokens[None]).logits.square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    close(found[0], found[1])


@pytest.mark.parametrize("kind", ["bfloat16", "mixed"])
def test_narrow_numbers(kind: str) -> None:
    if kind == "mixed" and why_not_mixed() is not None:
        pytest.skip("this processor multiplies no bfloat16")
    model, *batch = make("mixtral", torch.float32, **LOSSES)
    expected = gradients(model, *batch)
    if kind == "mixed":
        model.precision = "mixed"
    else:
        model.to(torch.bfloat16)
    found, pieces = gradients(model, *batch), gradients(model, *batch, tokens_at_once=1)
    name = "model.layers.0.block_sparse_moe.gate.weight"
    for grads in (found, pieces):
        assert (grads[name].float() - expected[name]).norm() < 0.2 * expected[name].norm()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"balance_loss": -1.0}, "balance_loss must be at least 0"),
        ("mixtral", {"z_loss": float("nan")}, "z_loss must be at least 0"),
        ("mixtral", {"z_loss": "1"}, "z_loss must be at least 0"),
        ("dots1", {"balance_loss": 0.1}, "this model has a router with sigmoids"),
        ("dots1", {"z_loss": 0.1}, "this model has a router with sigmoids"),
    ],
)
def test_coefficients_that_do_not_fit_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(hg.HandgradError, match=message):
        make(family, **changes)


def test_a_dense_model_has_no_routers() -> None:
    with pytest.raises(hg.HandgradError, match=r"z_loss=0.1 is a loss of a router .* this model has no experts"):
        hg.preset("nano", z_loss=0.1)
    model, *batch = make("qwen2_moe", dense=(0, 1), **LOSSES)
    assert all(grad.isfinite().all() for grad in gradients(model, *batch).values())


def test_the_balance_loss_is_k_where_experts_are_chosen_equally_often() -> None:
    model, *_ = make("mixtral", balance_loss=1.0, n_experts=4)
    scores = torch.eye(4, dtype=torch.float64)
    losses = RouterLosses(model.config)
    losses.begin()
    losses.count(scores, torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]]))
    assert losses.balance == pytest.approx(2.0)
    assert losses.z == pytest.approx(torch.logsumexp(scores, 1).square().mean().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_at_a_time(family: str) -> None:
    """As a model is proved that does not fit into the memory in float64."""
    model, *batch = make(family, torch.float32, **LOSSES)
    checker = Checker(model, *batch, lengths=LENGTHS)
    assert not checker.whole
    assert max(checker.errors.values()) <= checker.limit
    name = next(n for n in checker.trained if n.endswith(("gate.weight", "router.weight")))
    assert checker.difference_of([name]) <= checker.difference_limit


@pytest.mark.long
def test_verify_in_mixed_precision() -> None:
    if why_not_mixed() is not None:
        pytest.skip("this processor multiplies no bfloat16")
    model, *batch = make("mixtral", torch.float32, n_experts=4, **LOSSES)
    model.precision = "mixed"
    plain = replace(model.config, balance_loss=0.0, z_loss=0.0)
    wrong = {check.id for check in hg.verify(model, *batch, LENGTHS).failed}
    assert not any("scores" in id or "gate.weight" in id for id in wrong), wrong
    model.config = plain
    assert wrong <= {check.id for check in hg.verify(model, *batch, LENGTHS).failed}, "the losses add a failure"
