"""Norms and inner products of single examples' gradients, against gradients computed one example at a time (float64)."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import handgrad as hg
from conftest import make_batch, make_model, perturb
from handgrad.model.passes.example_gradients import ExampleNorms, ExamplePairs, ExamplesAgainst
from handgrad.ops import loss, per_example
from handgrad.proof.oracles import relative_error

LENGTHS = [9, 2, 13, 1, 7, 5]
LLAMA = {
    "family": "llama", "norm": "rms", "positions": "rotary", "gated": True, "activation": "silu", "d_hidden": 10,
    "n_kv_heads": 1, "qkv_bias": False, "out_bias": False, "mlp_bias": False, "n_heads": 3, "d_rho": 4, "d_head": 4,
}  # fmt: skip
QWEN = {**LLAMA, "family": "qwen3", "qk_norm": True, "n_kv_heads": 3}
SHAPES = {
    "gpt2, tied": {}, "gpt2, untied": {"tied": False, "logits_bias": True}, "gpt2, no key bias": {"key_bias": False},
    "llama, tied": LLAMA, "llama, untied": {**LLAMA, "tied": False}, "qwen3": {**QWEN, "qkv_bias": False},
    "lfm2": {**QWEN, "family": "lfm2", "qkv_bias": False, "conv_blocks": (1,), "conv_bias": True},
    "sinks": {**LLAMA, "attention_scale": 0.9, "score_cap": 1.5, "sinks": True},
}  # fmt: skip
ADAPTERS = {
    "full": None, "lora": {"rank": 2, "alpha": 3.0}, "dora": {"rank": 2, "dora": True},
    "lora and norms": {"rank": 2, "modules_to_save": ("embed", "norm")},
}  # fmt: skip
Gradient = dict[nn.Parameter, Tensor]


def model_of(shape: str, adapter: str = "full", **changes: object) -> hg.GPT:
    model = make_model(n_blocks=2, **{**SHAPES[shape], **changes})
    if ADAPTERS[adapter] is not None:
        options = {**ADAPTERS[adapter]}
        if "modules_to_save" in options:
            options["modules_to_save"] = ("wte", "ln_f") if "gpt2" in shape else ("embed_tokens", "norm")
        hg.lora.inject(model, targets=["all-linear", "lm_head"], **options)
        perturb(model)
    return model


def batch_of(model: hg.GPT, masked: bool = True) -> tuple[Tensor, Tensor]:
    """Masked prompts; the last but one example has no target at all."""
    tokens, targets = make_batch(model, LENGTHS, ignored=0.2 if masked else 0.0)
    if masked:
        targets[:4] = -100
        targets[sum(LENGTHS[:4]) : sum(LENGTHS[:5])] = -100
    return tokens, targets


def one_by_one(model: hg.GPT, tokens: Tensor, targets: Tensor) -> list[Gradient]:
    """The gradient of each example alone; 0 without a target."""
    found = []
    for ids, wanted in zip(tokens.split(LENGTHS), targets.split(LENGTHS), strict=True):
        model.zero_grad()
        if (wanted != -100).any():
            model.loss_and_grads(ids, wanted, [len(ids)], seed=1)
        found.append({p: torch.zeros_like(p) if p.grad is None else p.grad for p in trained(model)})
        model.zero_grad()
    return found


def trained(model: hg.GPT) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def inner(xs: list[Gradient], ys: list[Gradient]) -> Tensor:
    flat_x, flat_y = (torch.stack([torch.cat([g.reshape(-1) for g in x.values()]) for x in z]) for z in (xs, ys))
    return flat_x @ flat_y.t()


@pytest.fixture(params=["chosen", "formed", "gram"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The cheaper of the two ways, and each of them."""
    if request.param != "chosen":
        monkeypatch.setattr(per_example, "forming", lambda *arguments: request.param == "formed")
    yield request.param


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.some_cases(10)
def test_norms_and_products_equal_those_of_one_example_at_a_time(shape: str, adapter: str, way: str) -> None:
    model = model_of(shape, adapter)
    tokens, targets = batch_of(model)
    alone = one_by_one(model, tokens, targets)
    expected = inner(alone, alone)
    for at_once in (10, 1000):
        norms = ExampleNorms()
        model.loss_and_grads(tokens, targets, LENGTHS, tokens_at_once=at_once, examples=norms)
        assert all(p.grad is None for p in model.parameters())
        assert relative_error(norms.result(), expected.diagonal().sqrt()) <= 1e-10
        assert norms.result()[4] == 0.0
        if way != "formed":
            continue
        pairs = ExamplePairs()
        model.loss_and_grads(tokens, targets, LENGTHS, tokens_at_once=at_once, examples=pairs)
        assert relative_error(pairs.result(), expected) <= 1e-10
        for k in (1, 3):
            chosen = {p: torch.stack([grads[p] for grads in alone[:k]]) for p in trained(model)}
            against = ExamplesAgainst(chosen)
            model.loss_and_grads(tokens, targets, LENGTHS, tokens_at_once=at_once, examples=against)
            assert relative_error(against.result(), expected[:, :k]) <= 1e-10


@pytest.mark.parametrize("adapter", ["full", "dora"])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_norms_with_gradients_change_neither(adapter: str, recompute: str, way: str) -> None:
    model = model_of("gpt2, tied", adapter)
    tokens, targets = batch_of(model)
    expected = ExampleNorms()
    model.loss_and_grads(tokens, targets, LENGTHS, examples=expected)
    value = model.loss_and_grads(tokens, targets, LENGTHS)
    plain = {p: p.grad for p in trained(model)}
    for at_once in (10, 1000):
        model.zero_grad()
        norms = ExampleNorms(grads=True)
        found = model.loss_and_grads(
            tokens, targets, LENGTHS, tokens_at_once=at_once, recompute=recompute, examples=norms
        )
        assert found == pytest.approx(value, rel=1e-13)
        assert relative_error(norms.result(), expected.result()) <= 1e-12
        assert max(relative_error(p.grad, plain[p], floor=1e-3) for p in plain) <= 1e-12


@pytest.mark.parametrize("dora", [False, True])
def test_norms_under_dropout_belong_to_the_masks_of_the_step(dora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One example's gradient under the batch's masks: the other examples' rows of Δ_12 are set to 0."""
    model = model_of("llama, tied")
    hg.lora.inject(model, rank=2, dora=dora, dropout=0.4, targets=["all-linear", "lm_head"])
    perturb(model)
    model.train()
    tokens, targets = batch_of(model, masked=False)
    norms = ExampleNorms(grads=True)
    model.loss_and_grads(tokens, targets, LENGTHS, seed=5, examples=norms)
    original: Callable[..., tuple[Tensor, Tensor]] = loss.forward_and_delta
    for i, length in enumerate(LENGTHS):
        kept = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)) == i

        def of_one(*arguments: object, kept: Tensor = kept) -> tuple[Tensor, Tensor]:
            total, delta = original(*arguments)
            return total, delta * kept[:, None]

        monkeypatch.setattr(loss, "forward_and_delta", of_one)
        model.zero_grad()
        model.loss_and_grads(tokens, targets, LENGTHS, seed=5)
        grad = torch.cat([p.grad.reshape(-1) for p in trained(model)]) * sum(LENGTHS) / length
        assert norms.result()[i].item() == pytest.approx(grad.norm().item(), rel=1e-10)


def test_a_tied_head_in_groups_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups hold complete examples; one that is longer than a group is processed at once."""
    model = model_of("gpt2, tied")
    tokens, targets = batch_of(model)
    expected = ExampleNorms()
    model.loss_and_grads(tokens, targets, LENGTHS, examples=expected)
    for rows in (1, 3, 8):
        monkeypatch.setattr("handgrad.model.passes.readout.LOGITS_AT_ONCE", rows * model.config.n_vocab)
        for kind in (ExampleNorms(), ExamplePairs()):
            model.loss_and_grads(tokens, targets, LENGTHS, examples=kind)
            found = kind.result() if isinstance(kind, ExampleNorms) else kind.result().diagonal().sqrt()
            assert relative_error(found, expected.result()) <= 1e-10


def test_sequences_of_a_rectangular_batch_are_examples() -> None:
    model = model_of("gpt2, untied")
    tokens, targets = torch.randint(11, (2, 3, 6))
    norms = ExampleNorms()
    model.loss_and_grads(tokens, targets, examples=norms)
    for i in range(3):
        model.zero_grad()
        model.loss_and_grads(tokens[i : i + 1], targets[i : i + 1])
        alone = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm().item()
        assert norms.result()[i].item() == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_in_other_dtypes(dtype: torch.dtype, way: str) -> None:
    model = model_of("llama, tied").to(dtype)
    wide = model_of("llama, tied")
    wide.load_state_dict(model.state_dict())
    tokens, targets = batch_of(model)
    found, expected = ExampleNorms(), ExampleNorms()
    model.loss_and_grads(tokens, targets, LENGTHS, examples=found)
    wide.loss_and_grads(tokens, targets, LENGTHS, examples=expected)
    assert relative_error(found.result(), expected.result()) <= (1e-4 if dtype == torch.float32 else 0.05)


def test_a_measurement_can_be_used_again_after_an_interrupted_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt2, tied")
    tokens, targets = batch_of(model)
    norms, expected = ExampleNorms(), ExampleNorms()
    with monkeypatch.context() as interrupted, pytest.raises(ZeroDivisionError):
        interrupted.setattr(model.embed, "backward", lambda *_: 1 // 0)
        model.loss_and_grads(tokens, targets, LENGTHS, examples=norms)
    for measured in (norms, expected):
        model.loss_and_grads(tokens, targets, LENGTHS, examples=measured)
    assert torch.equal(norms.result(), expected.result())
