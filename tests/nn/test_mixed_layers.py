"""Mixed precision in hg.nn: functions and modules with rounded operands, and a replaced model of transformers. Wrapped
models are in test_wrap.py.

Every operand has a relative error of at most 2⁻⁸, and what is compared is the norm of the error: a wrong factor of 1.1
anywhere is more than rounding explains.
"""

import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from changes import KINDS, model_of, with_adapter
from torch import Tensor, nn
from torch.nn import functional as F

import handgrad as hg
from conftest import perturb
from handgrad.errors import HandgradError, HandgradWarning
from handgrad.kernels import library
from handgrad.lora.layer import LoRA
from handgrad.model.layers.linear import Linear
from handgrad.model.passes.arguments import PLAIN
from handgrad.model.precision import why_not_mixed
from handgrad.ops import attention as heads_op
from handgrad.ops import gated, layernorm, rmsnorm
from handgrad.ops import linear as affine
from handgrad.ops import loss as softmax_loss
from handgrad.proof import bridge

mixes = pytest.mark.skipif(why_not_mixed() is not None, reason=f"no mixed precision: {why_not_mixed()}")
HALF_STEP = 2.0**-8  # the largest relative error of rounding to bfloat16
NETWORK = 4 * HALF_STEP  # of all gradients of two blocks together
SUMS = 1e-6  # of float32
REASON = "this processor does not multiply bfloat16"
LINE = f"mixed precision needs products of bfloat16, and {REASON}; computing in float32"


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    """‖found − exact‖/‖exact‖ of all tensors together."""
    x, y = (torch.cat([z.detach().double().flatten() for z in tensors]) for tensors in (found, exact))
    return ((x - y).norm() / y.norm()).item()


# ── functions and modules ───────────────────────────────────────────────────────────────────────────────────────────


def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """6 query heads on 2 key heads, by torch."""
    q, k, v = (x.unflatten(2, (n, -1)).transpose(1, 2) for x, n in ((q, 6), (k, 2), (v, 2)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


def dora(a: Tensor, w: Tensor, d: Tensor, u: Tensor, m: Tensor) -> Tensor:
    c = (w + 0.7 * u @ d).norm(dim=1).detach()
    return F.linear(a, w + 0.7 * u @ d) * (m / c)


TARGETS = torch.tensor([[3, -100, 10, 0, 1], [2, 2, -100, 9, 4]])
Function = Callable[..., Tensor]
# ours, torch's, the shapes of the inputs, and the largest error: of sums where nothing but given numbers is rounded
CASES: dict[str, tuple[Function, Function, tuple[tuple[int, ...], ...], float]] = {
    "linear": (hg.nn.linear, F.linear, ((2, 5, 6), (7, 6), (7,)), SUMS),
    "linear, one dimension": (hg.nn.linear, F.linear, ((6,), (7, 6)), SUMS),
    "linear, (f_in, f_out)": (lambda a, w, **p: hg.nn.linear(a, w, in_out=True, **p), torch.matmul, ((3, 6), (6, 7)), SUMS),
    "linear, long": (hg.nn.linear, F.linear, ((67, 2051), (33, 2051)), SUMS),
    "linear after a norm, rebuilt": (
        lambda a, w, x, **p: hg.nn.linear(hg.nn.rms_norm(a, w), x, **p),
        lambda a, w, x: F.linear(F.rms_norm(a, (6,), w, 1e-6), x), ((2, 5, 6), (6,), (7, 6)), HALF_STEP,
    ),
    "LoRA": (
        lambda a, w, b, d, u, **p: hg.nn.linear(a, w, b, down=d, up=u, scale=0.7, **p),
        lambda a, w, b, d, u: F.linear(a, w, b) + 0.7 * (a @ d.T @ u.T),
        ((2, 5, 6), (7, 6), (7,), (3, 6), (7, 3)), HALF_STEP,
    ),
    "DoRA": (
        lambda a, w, d, u, m, **p: hg.nn.linear(a, w, down=d, up=u, magnitude=m, scale=0.7, **p), dora,
        ((2, 5, 6), (7, 6), (3, 6), (7, 3), (7,)), 2 * HALF_STEP,
    ),
    "attention": (
        lambda *x, **p: hg.nn.attention(*x, 6, 2, **p), heads, ((2, 5, 24), (2, 5, 8), (2, 5, 8)), 2 * HALF_STEP,
    ),
    "attention, fused": (
        lambda x, **p: hg.nn.attention(x, None, None, 6, 2, **p), lambda x: heads(*x.split([24, 8, 8], 2)), ((2, 37, 40),),
        2 * HALF_STEP,
    ),
    "loss": (
        lambda a, w, b, **p: hg.nn.linear_cross_entropy(a, w, TARGETS, b, **p),
        lambda a, w, b: F.cross_entropy(F.linear(a, w, b).flatten(0, 1), TARGETS.flatten()), ((2, 5, 6), (11, 6), (11,)),
        HALF_STEP,
    ),
}  # fmt: skip


def inputs_of(shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Numbers that bfloat16 represents."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).bfloat16().float() for shape in shapes]


def gradients(f: Function, inputs: list[Tensor], trained: Callable[[int], bool] = lambda i: True) -> list[Tensor]:
    """The output and every gradient, for an error signal that bfloat16 represents."""
    leaves = [x.detach().clone().requires_grad_(trained(i)) for i, x in enumerate(inputs)]
    out = f(*leaves)
    out.backward(torch.linspace(-1, 2, out.numel()).bfloat16().to(out.dtype).view(out.shape))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@mixes
@pytest.mark.parametrize("name", CASES)
def test_functions_round_operands_and_nothing_else(name: str) -> None:
    ours, torchs, shapes, limit = CASES[name]
    inputs = inputs_of(shapes)
    expected = gradients(torchs, [x.double() for x in inputs])

    def mixed(*given: Tensor) -> Tensor:
        return ours(*given, precision="mixed")

    found = gradients(mixed, inputs)
    assert all(x.dtype == torch.float32 and x.shape == y.shape for x, y in zip(found, expected, strict=True))
    assert max(distance([x], [y]) for x, y in zip(found, expected, strict=True)) <= limit
    assert all(torch.equal(x, y) for x, y in zip(gradients(mixed, [_strided(x) for x in inputs]), found, strict=True))
    for i in range(len(inputs)):  # frozen inputs
        alone = gradients(mixed, inputs, lambda j, i=i: j == i)  # type: ignore[misc]
        assert torch.equal(alone[0], found[0]) and torch.equal(alone[1], found[1 + i])
    unrounded = [x * (1 + 3 * HALF_STEP / 2) for x in inputs]
    assert not torch.equal(gradients(mixed, unrounded)[0], gradients(ours, unrounded)[0]), "nothing was rounded"
    with library.disabled():
        by_torch = gradients(mixed, inputs)
    assert max(distance([x], [y]) for x, y in zip(by_torch, expected, strict=True)) <= limit


def _strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]  # no stride is 1


@mixes
@pytest.mark.parametrize("in_out", [True, False])
@pytest.mark.parametrize("adapted", [None, "lora", "dora"])
def test_a_linear_layer_has_the_bits_of_a_handgrad_model(in_out: bool, adapted: str | None) -> None:
    torch.manual_seed(0)
    layer: Any = Linear(37, 29, stored="in_out" if in_out else "out_in")
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    a, delta, run = torch.randn(11, 37), torch.randn(11, 29), PLAIN._replace(operand=torch.bfloat16)
    given: dict[str, Tensor] = {}
    if adapted:
        layer = LoRA(layer, 3, 0.7, magnitude=adapted == "dora")
        perturb(layer)
        given = {"down": layer.down.detach().t(), "up": layer.up.detach().t()}
        given |= {} if layer.magnitude is None else {"magnitude": layer.magnitude.detach()}
    base = layer.plain()
    leaves = [x.detach().clone().requires_grad_() for x in (a, base.weight, base.bias, *given.values())]
    named = dict(zip(given, leaves[3:], strict=True))
    out = hg.nn.linear(*leaves[:3], **named, scale=0.7, in_out=in_out, precision="mixed")
    out.backward(delta)
    with torch.no_grad():
        narrow = a.bfloat16()
        expected = [layer.forward(narrow, run), layer.backward(delta, run)]
        layer.accumulate(delta, narrow, run)
    found = [out.detach(), *(x.grad for x in leaves[:2])]
    assert all(torch.equal(x, y) for x, y in zip(found, [*expected, base.weight.grad], strict=True))
    for name in ("down", "up", "magnitude")[: len(given)]:
        theirs = getattr(layer, name).grad
        assert distance([named[name].grad], [theirs.t() if theirs.ndim == 2 else theirs]) <= SUMS, name  # type: ignore[list-item]


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(hg.nn.RMSNorm(d, eps=1e-6) for _ in range(2))
        self.attn = hg.nn.Attention(d, 3, 1, rope_base=100.0)
        self.mlp = nn.Sequential(hg.nn.GatedMLP(d, 20), hg.nn.MLP(d, 16), hg.nn.LoRALinear(d, d, rank=2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


@mixes
def test_modules() -> None:
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Embedding(5, 12), Block(12)), hg.nn.LinearCrossEntropy(12, 5)
    perturb(body)
    network, ids = nn.ModuleList([body, head]), torch.tensor([[0, 1, 2, 3, 4] * 3])
    found = []
    for precision in (None, "mixed"):
        for module in (body[1].attn, *body[1].mlp, head):
            module.precision = precision
            assert all(x.precision == precision for x in module.modules() if isinstance(x, hg.nn.Linear))
        network.zero_grad()
        head(body(ids[:, :-1]), ids[:, 1:]).backward()
        found.append([p.grad.clone() for p in network.parameters() if p.grad is not None])
    assert 1e-4 < distance(found[1], found[0]) <= NETWORK
    assert all(x.dtype == torch.float32 for x in found[1])
    with pytest.raises(HandgradError, match="precision must be float32 or mixed, not"):
        head.precision = "half"


# ── a model of transformers ─────────────────────────────────────────────────────────────────────────────────────────


def batch(side: str = "") -> dict[str, Tensor]:
    """Three sequences of 12, 7 and 3 tokens, with padding on one side or, for "", none."""
    ids = torch.randint(35, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if side:
        mask[1, 7:] = mask[2, 3:] = 0
    mask = mask if side == "right" else mask.flip(1)
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def error(found: bridge.Gradients, exact: bridge.Gradients) -> float:
    assert list(found.grads) == list(exact.grads) and abs(found.loss - exact.loss) <= HALF_STEP * exact.loss
    return distance(list(found.grads.values()), list(exact.grads.values()))


@mixes
@pytest.mark.filterwarnings("ignore")  # of PEFT, and where padding does not fit into a window
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.some_cases(6)
def test_a_replaced_model_is_nearer_to_float32_than_autocast(kind: str, adapted: bool) -> None:
    ours, peers = [], []
    for side in ("", "right", "left"):
        model = with_adapter(model_of(kind), 0) if adapted else model_of(kind)
        given = batch(side)
        exact = bridge.gradients_of(model, given)
        with torch.autocast("cpu", torch.bfloat16):
            theirs = bridge.gradients_of(model, given)
        result = hg.nn.replace(model, loss=True, precision="mixed", audit=given)
        assert result.precision == "mixed" and "precision  mixed" in str(result) and str(result.audit) in str(result)
        found = bridge.gradients_of(model, given)
        assert all(x.dtype == torch.float32 for x in found.grads.values())
        ours.append(error(found, exact))
        peers.append(error(theirs, exact))
        assert 1e-4 < ours[-1] <= NETWORK
        assert not any("differs" in reason for reason in result.checked.values())
        model.activation_checkpointing_enable()
        again = bridge.gradients_of(model, given)
        assert all(torch.equal(again.grads[name], x) for name, x in found.grads.items())
    assert math.hypot(*ours) <= math.hypot(
        *peers
    )  # of one batch of so small a model, either may be the nearer by chance


@mixes
def test_a_replaced_model_is_near_to_a_handgrad_model(tmp_path: Any) -> None:
    for kind in ("llama", "gpt2"):
        model, given = model_of(kind), batch()
        model.save_pretrained(tmp_path / kind)
        exact = bridge.gradients_of(model, given)
        hg.nn.replace(model, loss=True, precision="mixed")
        ours = hg.load(tmp_path / kind, dtype="float32", precision="mixed")
        loss = ours.loss_and_grads(given["input_ids"], F.pad(given["labels"], (0, 1), value=-100)[:, 1:])
        names = list(exact.grads)
        expected = bridge.Gradients(loss, {name: dict(ours.named_parameters())[name].grad for name in names})
        found = bridge.gradients_of(model, given)
        assert error(expected, exact) <= NETWORK and error(found, expected) <= NETWORK


@mixes
def test_parts_round_without_each_other() -> None:
    """The loss, attention and linear layers each change the result."""
    given, found = batch(), []
    for change in ("none", "loss", "attention", "linear"):
        model = model_of("llama")
        result = hg.nn.replace(model, loss=change == "loss", precision="mixed")
        for name, module in model.named_modules():
            if result.replaced.get(name) not in (change, None):
                module.__dict__["_handgrad_precision"] = None
        found.append(model(**given).loss.item())
    assert len(set(found)) == 4


@mixes
def test_frozen_parameters_and_undo() -> None:
    model = model_of("llama")
    attributes = [set(module.__dict__) for module in model.modules()]
    everything = bridge.gradients_of(model, batch())
    result = hg.nn.replace(model, precision="mixed")
    mixed = bridge.gradients_of(model, batch())
    model.requires_grad_(False)
    for layer in (model.model.layers[1].mlp.down_proj, model.model.layers[0].input_layernorm):
        layer.requires_grad_(True)
    found = bridge.gradients_of(model, batch())
    assert len(found.grads) == 2 and all(torch.equal(mixed.grads[name], x) for name, x in found.grads.items())
    result.undo()
    assert [set(module.__dict__) for module in model.modules()] == attributes
    model.requires_grad_(True)
    assert all(torch.equal(x, everything.grads[name]) for name, x in bridge.gradients_of(model, batch()).grads.items())


def _times(op: Any, name: str, factor: float) -> tuple[Any, str, Any]:
    right = getattr(op, name)

    def wrong(delta: Tensor, *rest: Any, **options: Any) -> Any:
        return right(factor * delta, *rest, **options)

    return op, name, wrong


def _without_mean(delta: Tensor, a_bar: Tensor, inverse: Tensor, w: Tensor) -> Tensor:
    return delta * w * inverse


WRONG = {
    "gate": ("llama", *_times(gated, "backward", 1.2)),
    "gradient of a matrix": ("gpt2", *_times(affine, "grad_w", 1.1)),
    "error signal of a linear layer": ("gpt2", *_times(affine, "backward", -1.0)),
    "RMSNorm without the mean": ("llama", rmsnorm, "backward", _without_mean),
    "LayerNorm without the means": ("gpt2", layernorm, "backward", _without_mean),
    "targets": ("llama", softmax_loss, "forward_and_delta", lambda x, t, w: (softmax_loss.forward(x, t), x.softmax(1) * w)),
}  # fmt: skip


@mixes
@pytest.mark.parametrize("name", WRONG)
def test_the_audit_finds_a_wrong_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, op, function, wrong = WRONG[name]
    model = model_of(kind)
    monkeypatch.setattr(op, function, wrong)
    with pytest.raises(HandgradError, match=r"gradient of .* differs from the original's"):
        hg.nn.replace(model, loss=True, precision="mixed", audit=batch())
    assert "handgrad" not in str(model)


@mixes
def test_wrong_attention_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    result, right = hg.nn.replace(model, precision="mixed"), heads_op.backward

    def wrong(delta: Tensor, saved: Any, spans: Any, into: Any, scores: Any) -> None:
        right(delta, saved, spans, into, scores)
        into[1].mul_(1.1)

    monkeypatch.setattr(heads_op, "backward", wrong)
    with pytest.warns(UserWarning, match="its result for this kind of mask differs"):
        model(**batch()).loss.backward()
    assert sum(result.fallbacks.values()) == 2


@mixes
@pytest.mark.filterwarnings("ignore")
def test_a_tolerance_of_your_own_is_against_float32() -> None:
    with pytest.raises(HandgradError, match=r"differs from the original's by .* \(allowed 1e-04\)"):
        hg.nn.replace(model_of("llama"), precision="mixed", audit=batch(), tolerance=1e-4)
    assert hg.nn.replace(model_of("llama"), precision="mixed", audit=batch(), tolerance=0.1).audit.tolerance == 0.1


@mixes
def test_hg_audit_of_a_replaced_model() -> None:
    model = model_of("llama")
    hg.nn.replace(model, precision="mixed")
    report = hg.audit(model, batch(), setup=False)
    assert report.passed and "bfloat16" in str(report)


def test_what_mixed_precision_needs() -> None:
    for model in (model_of("llama").bfloat16(), model_of("gpt2").double()):
        with pytest.raises(HandgradError, match="mixed precision needs a float32 model, and this one is"):
            hg.nn.replace(model, precision="mixed")
        assert "handgrad" not in str(model)
    with pytest.raises(HandgradError, match="precision must be float32 or mixed, not"):
        hg.nn.replace(model_of("llama"), precision="half")
    a, w = torch.randn(2, 3), torch.randn(4, 3)
    with pytest.raises(HandgradError, match="precision must be float32 or mixed, not"):
        hg.nn.linear(a, w, precision="bfloat16")
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(HandgradError, match=r"mixed precision needs float32 tensors, and a is torch\."):
            hg.nn.linear(a.to(dtype), w.to(dtype), precision="mixed")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(HandgradError, match="leave out precision='mixed', or autoc"),
    ):
        hg.nn.linear(a, w, precision="mixed")


@mixes
def test_a_replaced_model_that_is_changed() -> None:
    """Under autocast it says so; in another dtype it is left to torch."""
    model = model_of("llama")
    result = hg.nn.replace(model, precision="mixed")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(HandgradError, match="both choose what is rounded"):
        model(**batch())
    plain = model_of("llama").double()
    with pytest.warns(UserWarning, match=r"mixed precision needs float32, and a tensor is in torch\.float64"):
        found = model.double()(**batch()).loss
    assert found.item() == plain(**batch()).loss.item() and result.fallbacks


# ── machines without products of bfloat16 ───────────────────────────────────────────────────────────────────────────


def test_a_machine_without_it_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_not", lambda dtype: REASON if dtype is torch.bfloat16 else None)
    plain, model = model_of("llama"), model_of("llama")
    hg.nn.replace(plain, loss=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = hg.nn.replace(model, loss=True, precision="mixed", audit=batch())
        found = bridge.gradients_of(model, batch())
    assert [str(x.message) for x in said] == [LINE] and said[0].filename == __file__
    assert result.precision is None and f"precision  {LINE}" in str(result) and result.audit.tolerance == 1e-4
    expected = bridge.gradients_of(plain, batch())
    assert all(torch.equal(x, found.grads[name]) for name, x in expected.grads.items())
    a, w = torch.randn(2, 3), torch.randn(4, 3)
    with pytest.warns(HandgradWarning, match=LINE) as line:
        out = hg.nn.linear(a, w, precision="mixed")
    assert torch.equal(out, hg.nn.linear(a, w)) and line[0].filename == __file__


def test_without_kernels() -> None:
    script = (
        "import torch, handgrad as hg; model = torch.nn.Sequential(torch.nn.Linear(3, 4));"
        " print(hg.nn.replace(model, precision='mixed')); x = torch.randn(2, 3);"
        " print(torch.equal(model(x), hg.nn.linear(x, model[0].weight, model[0].bias)))"
    )
    given = {**os.environ, "HANDGRAD_KERNELS": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, text=True, check=True)
    reason = "HANDGRAD_KERNELS=0 switches kernels off; computing in float32"
    assert done.stderr.count(reason) == 1 and f"{reason}\nTrue" in done.stdout, (done.stdout, done.stderr)


@mixes
@pytest.mark.parametrize("dropout", [0.05, 0.15])
def test_both_passes_drop_and_scale_alike(dropout: float) -> None:
    """y is linear in a: ⟨Δ, y⟩ = ⟨Δ_a, a⟩, up to rounding, which is without bias. A factor 1/(1 − p) that one pass rounds to
    bfloat16 is wrong by 0.2 % in every entry."""
    torch.manual_seed(0)
    a, d, u = torch.rand(400, 64).requires_grad_(), torch.rand(8, 64), torch.rand(48, 8)
    y = hg.nn.linear(a, torch.zeros(48, 64), down=d, up=u, dropout=dropout, precision="mixed")
    delta = torch.rand(400, 48)
    y.backward(delta)
    assert a.grad is not None
    left, right = (delta.double() * y.detach().double()).sum(), (a.grad.double() * a.detach().double()).sum()
    assert abs(left / right - 1) < 4e-4
