"""The functions and modules of hg.nn: values and gradients equal to torch's own, for any shape, memory layout and dtype, and
what autograd may and may not do with them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import handgrad as hg
from conftest import ROUNDING
from handgrad.errors import HandgradError
from handgrad.model.passes import readout

Function = Callable[..., Tensor]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def heads(q: Tensor, k: Tensor, v: Tensor, window: int | None = None, causal: bool = True) -> Tensor:
    """6 query heads on 2 key heads, by torch."""
    q, k, v = (x.unflatten(2, (n, -1)).transpose(1, 2) for x, n in ((q, 6), (k, 2), (v, 2)))
    n = q.shape[2]
    mask = torch.ones(n, n).tril().bool() if causal else torch.ones(n, n).bool()
    if window is not None:
        mask &= ~torch.ones(n, n).tril(-window).bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)


def other_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The same with scores that are scaled by 0.4 and capped to 1.5, and with sinks, by matrices."""
    q, k, v = (
        x.unflatten(2, (n, -1)).transpose(1, 2).repeat_interleave(6 // n, 1) for x, n in ((q, 6), (k, 2), (v, 2))
    )
    s = 1.5 * torch.tanh(0.4 * q @ k.mT / 1.5)
    s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    joined = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], 3)
    return (torch.softmax(joined, 3)[..., :-1] @ v).transpose(1, 2).flatten(2)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


QKV = ((2, 5, 24), (2, 5, 8), (2, 5, 8))
CASES: dict[str, tuple[Function, Function, tuple[tuple[int, ...], ...]]] = {
    "layer_norm": (hg.nn.layer_norm, lambda a, w, b: F.layer_norm(a, (6,), w, b), ((2, 5, 6), (6,), (6,))),
    "rms_norm": (hg.nn.rms_norm, lambda a, w: F.rms_norm(a, (6,), w, 1e-6), ((2, 5, 6), (6,))),
    "linear": (hg.nn.linear, F.linear, ((2, 5, 6), (7, 6), (7,))),
    "linear, one dimension": (hg.nn.linear, F.linear, ((6,), (7, 6))),
    "linear, (f_in, f_out)": (lambda a, w: hg.nn.linear(a, w, in_out=True), lambda a, w: a @ w, ((3, 6), (6, 7))),
    "LoRA": (
        lambda a, w, b, d, u: hg.nn.linear(a, w, b, down=d, up=u, scale=0.7),
        lambda a, w, b, d, u: F.linear(a, w, b) + 0.7 * (a @ d.T @ u.T),
        ((2, 5, 6), (7, 6), (7,), (3, 6), (7, 3)),
    ),
    "linear after a norm, rebuilt": (
        lambda a, w, x, y: hg.nn.linear(hg.nn.rms_norm(a, w), x) + hg.nn.linear(hg.nn.rms_norm(a, w), y),
        lambda a, w, x, y: F.linear(F.rms_norm(a, (6,), w, 1e-6), x + y),
        ((2, 5, 6), (6,), (7, 6), (7, 6)),
    ),
    "linear after a gate, rebuilt": (
        lambda g, u, w: hg.nn.linear(hg.nn.gate(g, u), w),
        lambda g, u, w: gated(g, u) @ w.T,
        ((2, 5, 6), (2, 5, 6), (3, 6)),
    ),
    "gate": (hg.nn.gate, gated, ((2, 5, 6), (2, 5, 6))),
    "gate, fused": (lambda x: hg.nn.gate(x, None), lambda x: gated(*x.chunk(2, -1)), ((2, 5, 6),)),
    "activation": (lambda x: hg.nn.activation(x, "relu2"), lambda x: F.relu(x).square(), ((2, 5, 6),)),
    "attention": (lambda *x: hg.nn.attention(*x, 6, 2), heads, QKV),
    "attention, window": (lambda *x: hg.nn.attention(*x, 6, 2, window=2), lambda *x: heads(*x, window=2), QKV),
    "attention, not causal": (lambda *x: hg.nn.attention(*x, 6, 2, causal=False), lambda *x: heads(*x, causal=False), QKV),
    "attention, fused": (
        lambda x: hg.nn.attention(x, None, None, 6, 2), lambda x: heads(*x.split([24, 8, 8], 2)), ((2, 5, 40),),
    ),
    "attention, other scores": (
        lambda *x: hg.nn.attention(*x[:3], 6, 2, scale=0.4, cap=1.5, sinks=x[3]), other_heads, (*QKV, (6,)),
    ),
}  # fmt: skip


def gradients(f: Function, inputs: list[Tensor], upstream: Tensor | None = None) -> list[Tensor]:
    """The output and every gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    out.backward(torch.ones_like(out) if upstream is None else upstream)
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[list-item]


def close(found: list[Tensor], expected: list[Tensor], rel: float) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and (x.double() - y.double()).abs().max() <= rel * max(y.abs().max().item(), 1e-3)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_torch(name: str) -> None:
    ours, torchs, shapes = CASES[name]
    inputs = [rand(*shape) for shape in shapes]
    upstream = torch.randn_like(torchs(*inputs))
    expected = gradients(torchs, inputs, upstream)
    close(gradients(ours, inputs, upstream), expected, 1e-12)
    close(gradients(ours, inputs, upstream.t().contiguous().t() if upstream.ndim == 2 else upstream), expected, 1e-12)
    strided = [torch.stack([x, x], -1)[..., 0] for x in inputs]  # no stride is 1
    close(gradients(ours, strided, upstream), expected, 1e-12)
    close(gradients(ours, inputs), gradients(torchs, inputs), 1e-12)  # an error signal with strides 0
    with torch.no_grad():
        assert not ours(*(x.requires_grad_() for x in inputs)).requires_grad
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [x.detach().to(dtype) for x in inputs]
        exact = gradients(torchs, [x.double() for x in rounded], upstream.to(dtype).double())
        found = gradients(ours, rounded, upstream.to(dtype))
        assert all(x.dtype == dtype for x in found)
        close(found, exact, 10 * ROUNDING[dtype])


@pytest.mark.parametrize("name", ["LoRA", "attention", "layer_norm", "linear after a gate, rebuilt"])
def test_only_gradients_that_are_asked_for(name: str) -> None:
    ours, torchs, shapes = CASES[name]
    inputs = [rand(*shape) for shape in shapes]
    expected = gradients(torchs, inputs)
    for i in range(len(inputs)):
        leaves = [x.clone().requires_grad_(j == i) for j, x in enumerate(inputs)]
        out = ours(*leaves)
        out.backward(torch.ones_like(out))
        close([leaves[i].grad], [expected[1 + i]], 1e-12)  # type: ignore[list-item]


def test_loss_without_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    a, w, b, targets = rand(2, 5, 6), rand(11, 6), rand(11), torch.randint(11, (2, 5))
    targets[0, 3] = targets[1, 0] = -100

    def torchs(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(a, w, b).view(-1, 11), targets.view(-1))

    for at_once in (11, 33, 1 << 25):  # entries of the logits: one row, three rows, all
        monkeypatch.setattr(readout, "LOGITS_AT_ONCE", at_once)
        ours = lambda a, w, b: hg.nn.linear_cross_entropy(a, w, targets, b)  # noqa: E731
        close(gradients(ours, [a, w, b]), gradients(torchs, [a, w, b]), 1e-12)
        part = lambda a, w, b: 3 * hg.nn.linear_cross_entropy(a, w, targets, b, n_targets=24)  # noqa: E731
        close(gradients(part, [a, w, b]), gradients(torchs, [a, w, b]), 1e-12)
    with torch.no_grad():
        assert hg.nn.linear_cross_entropy(a, w, targets).item() == pytest.approx(torchs(a, w, 0 * b).item())
    nothing = gradients(lambda a, w: hg.nn.linear_cross_entropy(a, w, torch.full((2, 5), -100)), [a, w])
    assert nothing[0].isnan() and nothing[1].abs().max() == nothing[2].abs().max() == 0
    for wrong, reason in (
        (targets[:1], "one entry for each"),
        (targets + 99, "outside"),
        (targets.float(), "integers"),
    ):
        with pytest.raises(HandgradError, match=reason):
            hg.nn.linear_cross_entropy(a, w, wrong)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "Linear": (lambda: hg.nn.Linear(6, 7), lambda: nn.Linear(6, 7)),
    "LayerNorm": (lambda: hg.nn.LayerNorm(6), lambda: nn.LayerNorm(6)),
    "RMSNorm": (lambda: hg.nn.RMSNorm(6), lambda: nn.RMSNorm(6)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_stand_in_for_torchs(name: str) -> None:
    ours, torchs = (make().double() for make in MODULES[name])
    ours.load_state_dict(torchs.state_dict())
    ours = copy.deepcopy(ours)
    for module in (ours, torchs):
        module(torch.linspace(-1, 2, 30, dtype=torch.float64).view(5, 6)).square().sum().backward()
    close([p.grad for p in ours.parameters()], [p.grad for p in torchs.parameters()], 1e-12)  # type: ignore[misc]


def test_a_transformer_of_modules_learns() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(hg.nn.RMSNorm(12) for _ in range(2))
            self.attn = hg.nn.Attention(12, 3, 1, window=4, rope_base=100.0)
            self.mlp = hg.nn.GatedMLP(12, 20)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.norms[0](x))
            return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]

    embed, head = nn.Embedding(5, 12), hg.nn.LinearCrossEntropy(12, 5)
    model = nn.Sequential(embed, Block(), hg.nn.MLP(12, 16), hg.nn.LoRALinear(12, 12, rank=2, dropout=0.1))
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-2)
    ids = torch.tensor([[0, 1, 2, 3, 4] * 3])
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = head(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < losses[0] and model[3].weight.grad is None
    for wrong in (
        lambda: hg.nn.Attention(12, 3, 2), lambda: hg.nn.Attention(13, 3), lambda: hg.nn.GatedMLP(4, 4, "relu"),
        lambda: hg.nn.MLP(4, 4, "silu"), lambda: hg.nn.LoRALinear(4, 4, 0), lambda: hg.nn.Attention(9, 3, rope_base=1e4),
        lambda: hg.nn.LayerNorm(4, bias=False)(rand(2, 4)), lambda: hg.nn.Attention(12, 3, window=0),
    ):  # fmt: skip
        with pytest.raises(HandgradError):
            wrong()


def test_dropout_of_the_branch_is_the_same_in_both_passes() -> None:
    a, w, d, u = rand(4, 6), torch.zeros(3, 6, dtype=torch.float64), rand(2, 6), rand(3, 2)
    torch.manual_seed(3)
    found = gradients(lambda a, d, u: hg.nn.linear(a, w, down=d, up=u, dropout=0.5), [a, d, u])
    # the output is linear in each factor: ⟨d, ∂d⟩ = ⟨u, ∂u⟩ = ⟨a, Δ_a⟩ = Σ y if all three see one mask
    total = found[0].sum()
    for x, grad in zip((a, d, u), found[1:], strict=True):
        torch.testing.assert_close((x * grad).sum(), total)
    assert found[1].eq(0).any()


def test_autograd_cannot_differentiate_twice_and_notices_changes() -> None:
    a, w = rand(3, 6).requires_grad_(), rand(4, 6).requires_grad_()
    with pytest.raises(HandgradError, match="leave out create_graph"):
        torch.autograd.grad(hg.nn.linear(a, w).sum(), a, create_graph=True)
    gate, up = rand(3, 6).requires_grad_(), rand(3, 6).requires_grad_()
    x = gate * 1
    out = hg.nn.linear(hg.nn.gate(x, up), w)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    changed = hg.nn.rms_norm(a, rand(6))
    changed.mul_(2)  # what the norm left on its output no longer holds: the linear layer saves the input itself
    plain = changed.detach().clone()
    (found,) = torch.autograd.grad(hg.nn.linear(changed, w).sum(), w)
    torch.testing.assert_close(found, plain.sum(0).expand(4, 6))


def test_second_backward_pass_through_a_retained_graph() -> None:
    a, w, x, y = rand(3, 6).requires_grad_(), rand(6), rand(4, 6).requires_grad_(), rand(4, 6).requires_grad_()
    normed = hg.nn.rms_norm(a, w)
    out = hg.nn.linear(normed, x).square().sum() + hg.nn.linear(normed, y).sum()
    first = torch.autograd.grad(out, (a, x, y), retain_graph=True)
    (alone,) = torch.autograd.grad(out, x, retain_graph=True)  # one reader of the norm's output
    second = torch.autograd.grad(out, (a, x, y))
    assert all(torch.equal(u, v) for u, v in zip(first, second, strict=True)) and torch.equal(alone, first[1])


def test_outputs_of_norms_and_gates_are_not_stored() -> None:
    """A linear layer saves what its input is rebuilt from."""
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.untyped_storage().data_ptr())
        return x

    a, w, x = rand(3, 6).requires_grad_(), rand(6).requires_grad_(), rand(4, 6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        normed = hg.nn.rms_norm(a, w)
        hg.nn.linear(normed, x)
    assert normed.untyped_storage().data_ptr() not in sizes and a.untyped_storage().data_ptr() in sizes


def test_wrong_shapes_do_not_reach_the_kernels() -> None:
    a, w, b = rand(3, 6), rand(4, 6), rand(4)
    for wrong, reason in (
        (lambda: hg.nn.linear(rand(3, 9), w), r"\(f_out, 9\)"), (lambda: hg.nn.linear(a, w, rand(3)), "bias has the shape"),
        (lambda: hg.nn.linear(a, w, in_out=True), r"\(6, f_out\)"),
        (lambda: hg.nn.linear(a, w, b, down=w), "both down and up"),
        (lambda: hg.nn.linear(a, w, down=rand(2, 6), up=rand(4, 3)), "up has the shape"),
        (lambda: hg.nn.linear(a, w, magnitude=b), "a magnitude needs"),
        (lambda: hg.nn.linear(a.sum(), w), "a single number"),
        (lambda: hg.nn.layer_norm(a, b, b), "w has the shape"), (lambda: hg.nn.rms_norm(a, b), "w has the shape"),
        (lambda: hg.nn.gate(a, w), "up has the shape"), (lambda: hg.nn.gate(rand(3, 5), None), "even width"),
        (lambda: hg.nn.gate(a, a, "relu"), "unknown activation"),
        (lambda: hg.nn.activation(a, "silu"), "unknown activation"),
        (lambda: hg.nn.attention(rand(1, 3, 6), rand(1, 2, 6), rand(1, 3, 6), 2), "k has the shape"),
        (lambda: hg.nn.attention(rand(1, 3, 6), rand(1, 3, 6), None, 2), "q alone"),
        (lambda: hg.nn.attention(rand(1, 3, 7), None, None, 2), "width 7"), (lambda: hg.nn.attention(a, a, a, 2), "B, T"),
        (lambda: hg.nn.attention(*[rand(1, 3, 6)] * 3, 3, 2), "does not divide"),
        (lambda: hg.nn.attention(*[rand(1, 0, 6)] * 3, 2), "at least one token"),
        (lambda: hg.nn.attention(*[rand(1, 3, 8)] * 3, 2, rotation=(rand(2, 2), rand(2, 2))), "cos has the shape"),
        (lambda: hg.nn.attention(*[rand(1, 3, 8)] * 3, 2, sinks=rand(3)), "sinks has the shape"),
        (lambda: hg.nn.attention(*[rand(1, 3, 8)] * 3, 2, cap=0.0), "must be numbers above 0"),
        (lambda: hg.nn.linear_cross_entropy(rand(3, 5), w, torch.zeros(3).long()), "weight has the shape"),
        (lambda: hg.nn.linear_cross_entropy(a, w, torch.zeros(3).long(), n_targets=0), "more than 0"),
        (lambda: hg.nn.layer_norm(rand(2, 0), rand(0), rand(0)), "at least one feature"),
        (lambda: hg.nn.rms_norm(rand(2, 0), rand(0)), "at least one feature"),
        (lambda: hg.nn.linear(rand(2, 0), rand(3, 0)), "at least one feature"),
        (lambda: hg.nn.gate(rand(2, 0), rand(2, 0)), "at least one feature"),
        (lambda: hg.nn.layer_norm(rand(2, 4).to_sparse(), rand(4), rand(4)), "sparse"),
        (lambda: hg.nn.layer_norm(rand(2, 4).float(), rand(4), rand(4)), "w is torch.float64 and the input torch.float32"),
        (lambda: hg.nn.linear(rand(2, 4).float(), rand(3, 4)), "weight is torch.float64"),
        (lambda: hg.nn.attention(rand(1, 2, 4), rand(1, 2, 4).float(), rand(1, 2, 4), 2), "k is torch.float32"),
    ):  # fmt: skip
        with pytest.raises(HandgradError, match=reason):
            wrong()


def test_norms_that_are_wider_than_their_input() -> None:
    """A bfloat16 model may keep its norms in float32; the linear layer rebuilds its input in bfloat16."""
    a, x = torch.randn(3, 6).bfloat16().requires_grad_(), torch.randn(4, 6).bfloat16().requires_grad_()
    for norm in (hg.nn.RMSNorm(6, eps=1e-6), hg.nn.LayerNorm(6)):
        hg.nn.linear(norm(a), x).float().sum().backward()
        assert x.grad is not None and norm.weight.grad is not None and norm.weight.grad.dtype == torch.float32
        close([x.grad], [norm(a).sum(0).expand(4, 6)], 10 * ROUNDING[torch.bfloat16])
        x.grad = None


def test_autocast_computes_products_in_bfloat16() -> None:
    layer, x = hg.nn.Linear(6, 7), torch.randn(3, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        loss = hg.nn.linear_cross_entropy(x, layer.weight, torch.tensor([0, 1, 2]))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and loss.dtype == torch.float32 and layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(7, 6), rtol=2e-2, atol=2e-2)


def test_distributed_data_parallel(tmp_path: Any) -> None:
    """Its hooks wait for the gradient of every parameter."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        layer = hg.nn.MLP(4, 8).double()
        plain, x = copy.deepcopy(layer), rand(3, 4)
        nn.parallel.DistributedDataParallel(layer)(x).square().sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    plain(x).square().sum().backward()
    close([p.grad for p in layer.parameters()], [p.grad for p in plain.parameters()], 1e-12)  # type: ignore[misc]
