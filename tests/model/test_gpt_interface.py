"""Invalid input to GPT and its configuration, and what a model returns to code written for torch."""

import contextlib
import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import handgrad as hg
from conftest import make_batch, make_model
from handgrad.kernels import library
from handgrad.model.passes.objective import PositionLoss
from handgrad.optim import OptimizerInBackward

# ── invalid input ─────────────────────────────────────────────────────────────────────────────────────────────────────


def raises(message: str) -> pytest.RaisesExc[hg.HandgradError]:
    return pytest.raises(hg.HandgradError, match=message)


def test_invalid_tokens_are_rejected() -> None:
    model = make_model()
    good = torch.zeros(4, dtype=torch.int64)
    with raises("token id 11 is outside the vocabulary: ids go from 0 to 10"):
        model.logits(torch.tensor([0, 11]))
    with raises("token id -1"):
        model.logits(torch.tensor([0, -1]))
    with raises("17 tokens does not fit into a context of 16"):
        model.logits(torch.zeros(17, dtype=torch.int64))
    with raises("must be integers"):
        model.logits(torch.zeros(4))
    with raises("not empty"):
        model.logits(torch.zeros(0, dtype=torch.int64))
    for wrong, why in (
        (good.to_sparse(), "sparse"),
        (good.to("meta"), "on the meta device"),
        (good.bool(), "integers"),
    ):
        for call in (
            lambda wrong=wrong: model.logits(wrong), lambda wrong=wrong: model.loss_and_grads(wrong, good),
            lambda wrong=wrong: model.loss_and_grads(good, wrong), lambda wrong=wrong: hg.generate(model, wrong[None]),
            lambda wrong=wrong: model.loss_and_grads(good, wrong, objective=PositionLoss(1)),
        ):  # fmt: skip
            with raises(why):
                call()
    for lengths in ([float("nan"), 4], ["a"], [1.5, 2.5], 4):
        with raises("lengths must be a list of integers"):
            model.logits(good, lengths)  # type: ignore[arg-type]
    with raises("shape"):
        model.logits(torch.zeros(1, 1, 1, dtype=torch.int64))
    with raises("add up to the 4 tokens"):
        model.logits(good, [1, 2])
    with raises("at least 1"):
        model.logits(good, [4, 0])
    with raises("lengths go with"):
        model.logits(good.view(2, 2), [2, 2])


def test_invalid_targets_are_rejected() -> None:
    model = make_model()
    tokens = torch.zeros(4, dtype=torch.int64)
    with raises("every target is ignored"):
        model.loss_and_grads(tokens, torch.full((4,), -100))
    with raises("must have the shape"):
        model.loss_and_grads(tokens, tokens[:3])
    with raises("target 99 is outside"):
        model.loss_and_grads(tokens, torch.tensor([0, 1, 2, 99]))
    with raises("tokens must be a tensor"):
        model.loss_and_grads([1, 2], tokens)
    with raises("targets must be a tensor"):
        model.loss_and_grads(tokens, [1, 2, 3, 4])
    for wrong in (0, -1, float("nan"), float("inf"), 4.0, "4"):
        with raises("n_targets is the number of targets"):
            model.loss_and_grads(tokens, tokens, n_targets=wrong)  # type: ignore[arg-type]
        with raises("n_targets is the number of targets"):
            OptimizerInBackward(model, torch.optim.SGD).step(tokens, tokens, n_targets=wrong)  # type: ignore[arg-type]
    with raises("n_targets is the number of targets"):
        hg.nn.linear_cross_entropy(torch.randn(4, 3), torch.randn(5, 3), tokens, n_targets=float("nan"))  # type: ignore[arg-type]
    for wrong in (0, -1, float("nan"), "4"):
        with raises("tokens_at_once must be an integer of at least 1"):
            model.loss_and_grads(tokens, tokens, tokens_at_once=wrong)  # type: ignore[arg-type]
    with raises("targets must be integers"):
        model.loss_and_grads(tokens, torch.zeros(4))
    assert all(p.grad is None for p in model.parameters()), "a rejected batch must leave no gradients"


@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.parametrize("adapters", [False, True])
def test_micro_batch_without_targets_adds_zero_gradient(recompute: str, adapters: bool) -> None:
    model = make_model(n_blocks=2)
    if adapters:
        hg.lora.inject(model, 2, targets="h.1.mlp.c_fc")
    tokens, targets = make_batch(model, [9, 4])
    none = torch.full_like(targets, -100)
    finished_parameters: list[torch.nn.Parameter] = []
    options = {"n_targets": 7, "recompute": recompute, "finished": finished_parameters.extend}
    assert model.loss_and_grads(tokens, none, [9, 4], **options) == 0.0
    assert all((p.grad == 0).all() if p.requires_grad else p.grad is None for p in model.parameters())
    expected, finished_parameters[:] = list(finished_parameters), []
    model.zero_grad()
    model.loss_and_grads(tokens, targets, [9, 4], **options)
    assert [id(p) for p in finished_parameters] == [id(p) for p in expected], (
        "ranks must reduce gradients in the same order"
    )
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.loss_and_grads(tokens, none, [9, 4], **options)
    assert all(q is None or torch.equal(p.grad, q) for p, q in zip(model.parameters(), before, strict=True))
    with raises("every target is ignored"):
        model.loss(tokens, none, [9, 4])
    with raises("every target is ignored"):
        hg.trace(model, tokens, none, [9, 4])


def test_nan_weight_is_named() -> None:
    model = make_model()
    tokens, targets = make_batch(model, [9])
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = float("nan")
    for call in (model.logits, lambda t: model.loss_and_grads(t, targets), lambda t: hg.verify(model, t, targets)):
        with pytest.raises(hg.NonFiniteError, match=r"h\.0\.mlp\.c_fc\.weight"):
            call(tokens)


@pytest.mark.parametrize("tied", [True, False])
def test_nan_in_head_is_named_and_leaves_no_gradient(tied: bool) -> None:
    model = make_model(tied=tied)
    tokens, targets = torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")  # a token that is neither an input nor a target
    for call in (model.logits, lambda t: model.loss(t, targets), lambda t: model.loss_and_grads(t, targets)):
        with pytest.raises(hg.NonFiniteError, match="wte.weight" if tied else "lm_head.weight"):
            call(tokens)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_partial_gradients_are_discarded_on_error(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handgrad.model.network.TOKENS_AT_ONCE", 8)
    model = make_model(n_blocks=2)
    tokens, targets = make_batch(model, [8, 8, 16], ignored=0)
    with torch.no_grad():
        model.transformer.wpe.weight[15] = float("nan")  # only the last chunk reads it
    with pytest.raises(hg.NonFiniteError, match="wpe"):
        model.loss_and_grads(tokens, targets, [8, 8, 16], recompute=recompute)
    with pytest.raises(hg.NonFiniteError, match="wpe"):
        OptimizerInBackward(model, lambda p: torch.optim.SGD(p, lr=1.0)).step(tokens, targets, [8, 8, 16])
    assert all(p.grad is None for p in model.parameters())


def test_overflow_is_reported_as_overflow() -> None:
    model = make_model(dtype=torch.float32)
    with torch.no_grad():
        model.transformer.wte.weight.fill_(3e38)
        model.transformer.wpe.weight.fill_(3e38)
    with pytest.raises(hg.NonFiniteError, match="overflowed"):
        model.logits(torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("preset", ["nano", "nano-llama"])
@pytest.mark.parametrize("kernels", [True, False])
def test_weights_that_overflow_a_norm_are_no_uniform_distribution(preset: str, kernels: bool) -> None:
    """An infinite variance made the output of a norm 0, all logits equal and the loss ln 65."""
    model = hg.GPT(hg.preset(preset, n_vocab=65, d_model=32, n_heads=2, n_blocks=1))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e30)
    tokens = torch.arange(16)[None]
    with contextlib.nullcontext() if kernels else library.disabled():
        for call in (model.loss_and_grads, model.loss, OptimizerInBackward(model, torch.optim.SGD).step):
            with pytest.raises(hg.NonFiniteError, match="overflowed"):
                call(tokens, tokens)
        with pytest.raises(hg.NonFiniteError, match="overflowed"):
            model.logits(tokens)
        with pytest.raises(hg.NonFiniteError, match="overflowed"):
            hg.generate(model, [1, 2, 3], max_new_tokens=3)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda model: model.blocks[0].double(), "ln_1.weight is torch.float64, and the model torch.float32"),
        (lambda model: model.blocks[0].mlp.bfloat16(), "c_fc.weight is torch.bfloat16, and the model torch.float32"),
        (lambda model: nn.Module._apply(model, Tensor.half), "wte.weight is torch.float16: a model has one dtype"),
        (lambda model: model.to("meta"), "wte.weight is on the meta device"),
        (lambda model: model.blocks[0].to("meta"), "ln_1.weight is on the meta device"),
    ],
    ids=["a block", "a layer", "float16", "meta", "a block on meta"],
)
def test_mixed_and_unknown_dtypes_are_rejected(convert: Callable[[hg.GPT], object], message: str) -> None:
    model = make_model(dtype=torch.float32)
    convert(model)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for call in (
        lambda: model.logits(tokens), lambda: model.loss(tokens, tokens), lambda: model.loss_and_grads(tokens, tokens),
        lambda: hg.generate(model, [1], max_new_tokens=1),
        lambda: OptimizerInBackward(model, torch.optim.SGD).step(tokens, tokens),
    ):  # fmt: skip
        with raises(message):
            call()


def test_invalid_configurations_are_rejected() -> None:
    with raises("d_model=10 is not divisible by n_heads=3"):
        hg.ModelConfig(d_model=10, n_heads=3)
    with raises("unknown preset 'gpt5'"):
        hg.preset("gpt5")
    with raises("a model has no 'n_layers'"):
        hg.preset("nano", n_layers=3)
    with raises("unknown activation 'swish'"):
        hg.ModelConfig(activation="swish")
    with raises("n_blocks must be an integer"):
        hg.ModelConfig(n_blocks=0)
    with raises("eps"):
        hg.ModelConfig(eps=-1.0)
    with raises("d_model must be an integer"):
        hg.preset("nano", d_model=None)
    with raises("d_model must be at least 2"):
        hg.preset("nano", d_model=1, n_heads=1)
    with raises("tied must be true or false"):
        hg.preset("nano", tied="no")
    if not torch.cuda.is_available():
        with raises("cannot use device cuda"):
            hg.GPT(hg.preset("nano"), device="cuda")
    with raises("dtype must be"):
        hg.GPT(hg.preset("nano"), dtype=torch.int32)


# ── interface, as in torch ────────────────────────────────────────────────────────────────────────────────────────────


def test_device_and_dtype_of_a_new_model() -> None:
    for dtype in ("float64", "float32", "bfloat16"):
        model = hg.GPT(hg.preset("nano"), dtype=dtype)
        assert model.dtype == getattr(torch, dtype) == next(model.parameters()).dtype
        assert model.device == torch.device("cpu")
    assert hg.GPT(hg.preset("nano"), device="meta").device.type == "meta"
    for wrong in ("float16", "int32", "double precision", ""):
        with raises("dtype must be float64, float32 or bfloat16, not"):
            hg.GPT(hg.preset("nano"), dtype=wrong)


def test_a_dtype_that_a_model_cannot_compute_in_is_refused_everywhere() -> None:
    model = make_model(dtype=torch.float32)
    for change in (model.half, lambda: model.to(torch.float16), lambda: model.type(torch.float16)):
        with pytest.raises(hg.HandgradError, match="dtype must be float64, float32 or bfloat16"):
            change()
    assert model.dtype == torch.float32
    assert model.double().dtype == torch.float64 and model.to("meta").device.type == "meta"


def test_repr_shows_shapes() -> None:
    model = make_model(n_vocab=11, d_model=8, n_heads=2)
    shown = repr(model)
    assert f"{model.size:,} parameters, float64" in shown and "Embedding(weight 11 × 8)" in shown
    assert "LayerNorm(weight 8, bias 8)" in shown and "Head(weight 11 × 8)" in shown
    hg.lora.inject(model, rank=2)
    assert "down 8 × 2, up 2 × " in repr(model)


def test_save_and_load_accept_dtype_names(tmp_path: Path) -> None:
    hg.save(make_model(), tmp_path / "model", dtype="bfloat16")
    assert hg.load(tmp_path / "model").dtype == torch.bfloat16
    assert hg.load(tmp_path / "model", dtype="float32").dtype == torch.float32
    with raises("dtype must be .* not single"):
        hg.load(tmp_path / "model", dtype="single")
    with raises("dtype must be float64, float32, bfloat16 or float16, not int8"):
        hg.save(make_model(), tmp_path / "other", dtype="int8")
    assert not (tmp_path / "other").exists()


def test_gpt_rejects_a_preset_name() -> None:
    with raises(r'GPT takes a ModelConfig, not "nano": hg.GPT\(hg.preset\("nano"\)\)'):
        hg.GPT("nano")
    with raises("GPT takes a ModelConfig, not 3"):
        hg.GPT(3)


def test_backward_on_logits_points_to_loss_and_grads() -> None:
    model = make_model()
    tokens, targets = make_batch(model, [9], ignored=0)
    logits = model(tokens)
    cases = (
        logits.sum(), torch.nn.functional.cross_entropy(logits, targets), logits.log_softmax(-1)[0, 0],
    )  # fmt: skip
    for value in cases:
        with raises("no graph to differentiate: model.loss_and_grads"):
            value.backward()
    assert type(model.loss(tokens, targets)) is float, "torch.load rejects a subclass of float"
    weight = torch.ones(11, dtype=torch.float64, requires_grad=True)
    (logits * weight).sum().backward()  # a graph of other tensors still works
    assert torch.equal(weight.grad, logits.sum(0))


def test_loss_is_a_float_and_logits_are_a_serializable_tensor(tmp_path: Path) -> None:
    model = make_model()
    tokens, targets = make_batch(model, [9])
    loss, logits = model.loss(tokens, targets), model.logits(tokens)
    assert (
        isinstance(loss, float) and json.loads(json.dumps({"loss": loss})) == {"loss": loss} and type(loss + 1) is float
    )
    assert (
        not logits.requires_grad and logits.numpy().shape == (9, 11) and torch.equal(logits.argmax(1), logits.max(1)[1])
    )
    torch.save({"loss": loss, "logits": logits}, tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert loaded["loss"] == loss and torch.equal(loaded["logits"], logits)
    assert type(pickle.loads(pickle.dumps(logits))) is torch.Tensor and copy.deepcopy(logits).equal(logits)
    save_file({"logits": logits}, tmp_path / "saved.safetensors")


@pytest.mark.parametrize("call", ["logits", "loss", "loss_and_grads", "trace", "generate", "optimizer"])
def test_autocast_is_rejected(call: str) -> None:
    model = make_model(dtype=torch.float32)
    tokens, targets = make_batch(model, [9])
    calls = {
        "logits": lambda: model.logits(tokens),
        "loss": lambda: model.loss(tokens, targets),
        "loss_and_grads": lambda: model.loss_and_grads(tokens, targets),
        "trace": lambda: hg.trace(model, tokens, targets),
        "generate": lambda: hg.generate(model, tokens[None]),
        "optimizer": lambda: OptimizerInBackward(model, torch.optim.SGD).step(tokens, targets),
    }
    with torch.autocast("cpu", torch.bfloat16), raises("torch.autocast is not supported: it changes"):
        calls[call]()
    assert all(p.grad is None for p in model.parameters())
