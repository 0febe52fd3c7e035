"""A block lists its steps; a pass follows the list, and an observer that returns what it gets changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import handgrad as hg
from conftest import make_batch, perturb
from handgrad.families import FAMILIES
from handgrad.inference import token_block
from handgrad.model.block import Block
from handgrad.model.inspect.trace import edited_forward
from handgrad.model.passes.arguments import Observer
from handgrad.model.passes.example_gradients import ExampleGradients, ExampleNorms, ExamplePairs, Several
from handgrad.model.passes.objective import Objective, TargetRows
from handgrad.model.steps import Step, UnknownStep, require, require_block, signal
from handgrad.nn.wrapped_logits import GivenSignal
from handgrad.ops import loss
from handgrad.plan.estimate import make_plan

LENGTHS = [6, 4]


def make(family: str, dtype: torch.dtype = torch.float64) -> tuple[hg.GPT, Tensor, Tensor]:
    shape = {"n_vocab": 11, "n_context": 16, "d_model": 16, "n_heads": 4, "n_blocks": 2}
    name = "nano" if family == "gpt2" else "nano-llama"
    table = FAMILIES[family]
    more = {} if family == "gpt2" else {"family": family, "n_kv_heads": 2, "d_hidden": 20, **table.fixed}
    more |= {"embedding_scale": 3.0} if "embedding_scale" in more else {}
    more |= {"n_kv_heads": 4} if more.get("qkv_by_head") else {}
    if family != "gpt2" and not (table.has("mlp.gate") or table.has("mlp.gate_expand") or table.has("expert.gate")):
        more |= {"gated": False, "activation": "gelu"}
    more |= {"positions": "learned"} if table.has("positions") else {}
    more |= {"conv_blocks": (1,), "conv_bias": True} if FAMILIES[family].has("conv") else {}
    if FAMILIES[family].has("mlp.experts"):
        more |= {"n_experts": 4, "experts_per_token": 2, "d_expert": 7}
        more |= {"d_shared": 9} if FAMILIES[family].has("mlp.shared") else {}
    more |= {"qk_norm": True} if FAMILIES[family].has("attn.q_norm") else {}
    model = hg.GPT(hg.preset(name, **shape, **more), seed=0, dtype=dtype)
    perturb(model)
    return model, *make_batch(model, LENGTHS)


class Names(Observer):
    """The names of what can be replaced, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def at(self, name: str, x: Tensor) -> Tensor:
        self.names.append(name)
        return x


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some_cases(3)
def test_a_pass_computes_the_steps_in_their_order(family: str) -> None:
    model, tokens, targets = make(family)
    seen = Names()
    model.loss_and_grads(tokens, targets, LENGTHS, record=seen)
    for i, block in enumerate(model.blocks):
        here = [name.removeprefix(f"blocks.{i}.") for name in seen.names if name.startswith(f"blocks.{i}.")]
        steps = block.steps()
        outputs = [name for step in steps for name in step.outputs]
        forward = ["a_1", *outputs]
        assert [name for name in here if name.startswith("a_")] == forward
        backward = [name for name in here if name.startswith("delta_")]
        assert set(backward) == {signal(name) for name in forward} and len(backward) == len(forward)
        # a step's input signal comes after that of its output
        assert all(
            backward.index(signal(out)) < backward.index(signal(x))
            for step in steps for out in step.outputs for x in step.inputs
        )  # fmt: skip
        known = {"a_1"}
        for step in steps:
            assert set(step.inputs) <= known, f"{step.name} reads what was not computed"
            known |= set(step.outputs)
        layers = [layer for step in steps for layer in step.layers.values()]
        held = {id(p) for x in layers for p in x.named_symbols().values() if p is not None}
        assert held == {id(p) for p in block.parameters() if p.requires_grad}


class Unchanged(Observer):
    def at(self, name: str, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.some_cases(6)
def test_an_observer_that_returns_what_it_gets_changes_no_bit(family: str, dtype: torch.dtype) -> None:
    model, tokens, targets = make(family, dtype)

    def compute(**options: Any) -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        value = model.loss_and_grads(tokens, targets, LENGTHS, **options)
        return value, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    for options in ({}, {"tokens_at_once": 5}, {"recompute": "blocks"}):
        value, grads = compute(**options)
        found, observed = compute(record=Unchanged(), **options)
        assert found == value and grads and all(torch.equal(grads[name], observed[name]) for name in grads)


def test_an_observer_that_replaces_must_say_so() -> None:
    class Silent(Observer):
        def at(self, name: str, x: Tensor) -> Tensor:
            return 2 * x

    model, tokens, targets = make("gpt2")
    with pytest.raises(hg.HandgradError, match=r"such as a_1, must say so: edits = True"):
        model.loss_and_grads(tokens, targets, LENGTHS, record=Silent())


@pytest.mark.parametrize("name", ["blocks.0.a_4", "blocks.1.sigma_5", "a_12", "blocks.0.delta_5"])
def test_a_record_that_changes_a_tensor_in_place_is_refused(name: str) -> None:
    model, tokens, targets = make("gpt2")
    with pytest.raises(hg.HandgradError, match=f"{name} was changed in place"):
        model.loss_and_grads(tokens, targets, LENGTHS, record=lambda here, x: x.mul_(2) if here == name else None)


def test_edits_belong_to_a_complete_pass() -> None:
    class Editing(Observer):
        edits = True

    model, tokens, targets = make("gpt2")
    for options in ({}, {"recompute": "blocks"}):
        with pytest.raises(hg.HandgradError, match=r"use hg\.trace\(edit=…\)"):
            model.loss_and_grads(tokens, targets, LENGTHS, record=Editing(), **options)
    with pytest.raises(hg.HandgradError, match=r"nothing to edit at 'blocks\.0\.a_33'"):
        edited_forward(model, tokens[None, :6], targets[None, :6], {"blocks.0.a_33": lambda a: a})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some_cases(3)
def test_edits_that_return_what_they_get_change_no_bit(family: str) -> None:
    model, tokens, targets = make(family, torch.float32)
    plain = hg.trace(model, tokens, targets, LENGTHS, edit={})
    names = [name for name in plain if "grad" not in name and not name.endswith(("a_0", "y_pred"))]
    editable = [x for x in names if not x.rpartition(".")[2].startswith(("mu_", "sigma_", "rms_", "a_bar_", "chosen"))]
    edited = hg.trace(model, tokens, targets, LENGTHS, edit=dict.fromkeys(editable, lambda x: x))
    assert list(edited) == list(plain) and edited.loss == plain.loss
    assert all(torch.equal(edited[name], plain[name]) for name in plain)


def test_an_empty_edit_computes_what_the_model_computes() -> None:
    model, tokens, targets = make("llama")
    plain, edited = hg.trace(model, tokens, targets, LENGTHS), hg.trace(model, tokens, targets, LENGTHS, edit={})
    assert set(plain) <= set(edited) and edited.loss == pytest.approx(plain.loss, rel=1e-14)
    for name in plain:
        torch.testing.assert_close(edited[name], plain[name], rtol=1e-10, atol=1e-13)


# ── steps that a reader does not know ───────────────────────────────────────────────────────────────────────────────


def with_dummy(block: Block) -> list[Step]:
    *steps, last = STEPS_OF(block)
    return [*steps, Step("dummy", "dummy", ("a_9",), ("a_dummy",)), last]


STEPS_OF = Block.steps


@pytest.mark.parametrize("name", ["q", "beta_1", "blocks.0.mu_1"])
def test_only_activations_have_a_signal(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of an activation"):
        signal(name)


def test_unknown_steps_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, *_ = make("gpt2", torch.float32)
    prompt = torch.tensor([[1, 2, 3]])
    expected = hg.generate(model, prompt, max_new_tokens=5, temperature=0)
    assert token_block.describe(model) is not None
    monkeypatch.setattr(Block, "steps", with_dummy)
    steps = model.blocks[0].steps()
    with pytest.raises(UnknownStep, match="the reader cannot read the step 'dummy'"):
        require(steps, {"norm", "attention", "linear", "add", "activation"}, "the reader")
    with pytest.raises(UnknownStep, match="the reader does not know the step 'dummy'"):
        require_block(steps, "the reader")
    with pytest.raises(UnknownStep, match="expects the step 'skip_10: add of a_5, a_9 → a_10'"):
        require_block(STEPS_OF(model.blocks[0])[:-1], "the reader")
    with pytest.raises(UnknownStep, match="the plan cannot read the step 'dummy'"):
        make_plan(model.config, batch=1)
    with pytest.raises(UnknownStep, match="the reference cannot read the step 'dummy'"):
        hg.verify(model, prompt, prompt)
    assert token_block.describe(model) is None  # the blocks run one by one
    assert torch.equal(hg.generate(model, prompt, max_new_tokens=5, temperature=0), expected)


CHANGES: dict[str, Callable[[Step], Step]] = {
    "another kind": lambda step: step._replace(kind="linear"),
    "another input": lambda step: step._replace(inputs=("a_2",)),
    "another output": lambda step: step._replace(outputs=("a_2", "a_3")),
    "one more layer": lambda step: step._replace(layers={**step.layers, "new": next(iter(step.layers.values()))}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_known_step_that_does_something_else_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm hidden inside a step of a known name would be computed by the blocks, and ignored by the kernel."""
    model, *_ = make("gpt2", torch.float32)

    def changed(block: Block) -> list[Step]:
        first, *others = STEPS_OF(block)
        return [CHANGES[change](first), *others]

    monkeypatch.setattr(Block, "steps", changed)
    with pytest.raises(UnknownStep, match="does not know the step 'norm_1'"):
        require_block(model.blocks[0].steps(), "the reader")
    assert token_block.describe(model) is None


# ── objectives know their rows ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Weighted(Objective):
    """The loss with a weight for every token of the batch."""

    weights: Tensor  # (n)

    def forward(self, logits: Tensor, at: TargetRows) -> Tensor:
        return torch.dot(self.weights[at.rows], -torch.log_softmax(logits, 1)[torch.arange(len(logits)), at.targets])

    def forward_and_delta(self, logits: Tensor, at: TargetRows, weight: float) -> tuple[Tensor, Tensor]:
        value = self.forward(logits, at)
        return value, self.weights[at.rows, None] * loss.forward_and_delta(logits, at.targets, weight)[1]


@pytest.mark.parametrize("options", [{}, {"tokens_at_once": 4}, {"recompute": "blocks", "tokens_at_once": 4}])
def test_a_weighted_loss_finds_its_weights(options: dict[str, Any]) -> None:
    """Σ_t w_t ∂loss_t, one target at a time."""
    model, tokens, targets = make("gpt2")
    targets[7], n = -100, int((targets[:7] >= 0).sum() + (targets[8:] >= 0).sum())
    weights = torch.randn(len(tokens), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    objective = Weighted(weights)
    value = model.loss_and_grads(tokens, targets, LENGTHS, objective=objective, **options)
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total = 0.0
    for t in (targets >= 0).nonzero()[:, 0].tolist():
        model_before = {name: 0 if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        total += weights[t].item() * model.loss_and_grads(tokens, targets, LENGTHS, objective=hg.PositionLoss(t)) / n
        for name, p in model.named_parameters():
            p.grad = model_before[name] + weights[t] / n * p.grad
    assert value == pytest.approx(total, rel=1e-12)
    assert model.loss(tokens, targets, LENGTHS, objective=objective) == pytest.approx(total, rel=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-10, atol=1e-13)


def test_a_given_signal_is_recorded_with_its_logits() -> None:
    model, tokens, targets = make("gpt2")
    objective, seen = GivenSignal(torch.zeros(len(tokens), 11, dtype=torch.float64)), dict[str, Tensor]()
    model.loss_and_grads(tokens, targets.clamp(min=0), LENGTHS, objective=objective, record=seen.__setitem__)
    torch.testing.assert_close(seen["a_12"], model.logits(tokens, LENGTHS).as_subclass(Tensor))


@pytest.mark.parametrize("measure", [ExampleNorms(), Several(ExampleNorms())])
def test_norms_of_examples_know_only_losses(measure: ExampleGradients) -> None:
    model, tokens, targets = make("gpt2")
    for objective in (hg.LogitDifference(2, 3, 7), GivenSignal(torch.zeros(len(tokens), 11))):
        with pytest.raises(hg.HandgradError, match=f"of examples are of losses, not of {type(objective).__name__}"):
            model.loss_and_grads(tokens, targets, LENGTHS, objective=objective, examples=measure)
    model.loss_and_grads(tokens, targets, LENGTHS, objective=hg.LogitDifference(2, 3, 7), examples=ExamplePairs())


def test_the_optimizer_in_the_backward_pass_cuts_the_batch_as_the_model_does() -> None:
    from handgrad.optim import OptimizerInBackward

    model = hg.GPT(hg.preset("nano", n_vocab=11, d_model=8, n_heads=2, n_blocks=1), seed=0)
    hg.lora.inject(model, 2)
    cut: list[list[int]] = []
    prepare = hg.GPT.prepare

    class Watched(hg.GPT):
        def prepare(self, *arguments: Any, **options: Any) -> Any:
            work = prepare(self, *arguments, **options)
            cut.append([len(piece.ids) for piece in work.pieces])
            return work

    model.__class__ = Watched
    tokens = torch.randint(11, (32, 64))
    model.loss_and_grads(tokens, tokens)
    OptimizerInBackward(model, lambda p: torch.optim.SGD(p, lr=0.1)).step(tokens, tokens)
    assert cut == [[512] * 4] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"record": 3}, "record and finished"),
        ({"finished": None}, "record and finished"),
        ({"recompute": "all"}, "recompute must be"),
        ({"tokens_at_once": 0}, "tokens_at_once must be"),
        ({"tokens_at_once": True}, "tokens_at_once must be"),
        ({"examples": 3}, "examples must be .* not 3"),
        ({"checkpoint": True}, "unknown option checkpoint: loss_and_grads has objective, .*recompute"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], message: str) -> None:
    model, *batch = make("gpt2")
    with pytest.raises(hg.HandgradError, match=message):
        model.loss_and_grads(*batch, LENGTHS, **wrong)
