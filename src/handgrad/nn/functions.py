"""Norms, linear layers, activations and gates as autograd functions. The mathematics is in `ops`.

Inputs are (…, d): leading dimensions are rows. Gradients are computed for the inputs that ask for one (`needs_input_grad`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from ..errors import HandgradError
from ..model.config import ACTIVATIONS, GATES
from ..ops import activation as activations
from ..ops import gated, layernorm, lora, rmsnorm
from ..ops import linear as affine
from .arguments import check_activation, check_gate, check_linear, check_norm, mixes
from .rebuild import Rebuild, Shared, Source, mark, source_of

F = TypeVar("F", bound=Callable[..., Any])


def opaque(function: F) -> F:
    """Kernels are called by address: torch.compile leaves a gap at this function."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return,no-untyped-call]


def first_derivative(backward: F) -> F:
    """Refuse create_graph=True: what comes back has no graph, and would silently count as a constant. As the forward pass,
    the backward pass chooses its dtypes itself, also if backward() is called under autocast."""

    @wraps(backward)
    def once(ctx: Any, delta: Tensor, *others: Any) -> Any:
        if torch.is_grad_enabled():
            raise HandgradError("a hand-derived gradient cannot be differentiated again: leave out create_graph=True")
        with without_autocast(delta.device.type):
            return backward(ctx, delta, *others)

    return once  # type: ignore[return-value]


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """The functions choose their dtypes themselves."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def autocast(kind: str, *tensors: Tensor | None) -> Any:
    """The tensors as autocast gives them to a product: in its dtype, except those in float64."""
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def operand(x: Tensor, mixed: bool) -> Tensor:
    """What a product reads."""
    return x.bfloat16() if mixed else x


def rows(x: Tensor) -> Tensor:
    """(…, d) → (n, d), contiguous"""
    return x.reshape(-1, x.shape[-1]).contiguous()


def shaped(x: Tensor, *shape: int) -> Tensor:
    """(n, d) → (…, d). Autograd does not take it for a view, which it would not let anyone change in place."""
    return torch.ops.aten._unsafe_view(x, shape)  # type: ignore[no-any-return]


# ── norms ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class NormFunction(Function):
    """LayerNorm with the gains w and b, or RMSNorm with w alone: `op` is the module of `ops` that has the formulas."""

    @staticmethod
    def forward(ctx: Any, op: Any, eps: float, shared: Shared, a: Tensor, *gains: Tensor) -> tuple[Tensor, ...]:
        out, saved = op.forward(rows(a), *gains, eps)
        ctx.save_for_backward(*saved, *gains)
        ctx.op, ctx.shared = op, shared
        ctx.mark_non_differentiable(*saved[1:])
        return shaped(out, *a.shape), *saved[1:]

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        op, tensors, needs = ctx.op, list(ctx.saved_tensors), ctx.needs_input_grad[3:]  # of a and of the gains
        signal, (a_bar, _out) = rows(delta), ctx.shared.get(partial(_rebuild_norm, op), tensors)
        inverse, w, *_b = tensors[len(op.Saved._fields) - 1 :]  # 1/σ or 1/rms
        before = op.backward(signal, a_bar, inverse, w).view(delta.shape) if needs[0] else None
        grads = [op.grad_w(signal, a_bar, None) if needs[1] else None]
        grads += [op.grad_b(signal, None) if x else None for x in needs[2:]]
        return None, None, None, before, *grads


def _rebuild_norm(op: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    n = len(op.Saved._fields)
    a_bar, out = op.rebuild(op.Saved(*tensors[:n]), *tensors[n:])
    return a_bar, out.to(tensors[0].dtype)  # as in the forward pass, where gains may be wider than activations


def _norm(op: Any, a: Tensor, eps: float, *gains: Tensor) -> Tensor:
    shared = Shared(readers=1)  # its own backward pass needs ā
    out, *statistics = NormFunction.apply(op, eps, shared, a, *gains)  # type: ignore[no-untyped-call]
    return mark(out, partial(_rebuild_norm, op), shared, _detached(rows(a), *statistics, *gains))


@opaque
def layer_norm(a: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> Tensor:
    """ā diag(w) + b with ā = (a − μ)/σ, over the last dimension"""
    check_norm(a, w=w, b=b)
    return _norm(layernorm, a, eps, w, b)


@opaque
def rms_norm(a: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """ā diag(w) with ā = a/√(mean(a²) + ε), over the last dimension"""
    check_norm(a, w=w)
    return _norm(rmsnorm, a, eps, w)


def _detached(*tensors: Tensor) -> list[Tensor]:
    """Without their graph; torch still notices if they are changed in place."""
    return [x.detach() for x in tensors]


# ── linear layers ───────────────────────────────────────────────────────────────────────────────────────────────────


class How(NamedTuple):
    """What a linear layer is, besides its tensors."""

    in_out: bool  # whether the weight is stored as (f_in, f_out)
    scale: float  # of the low-rank branch
    dropout: float
    seed: int
    source: Source | None  # of the input
    mixed: bool  # whether products round their operands to bfloat16

    def dropped(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """ã and the mask that makes it, or a itself."""
        if not self.dropout:
            return a, None
        mask = lora.mask(a, self.dropout, self.seed)
        return lora.masked(a, mask), mask


class LinearFunction(Function):
    """y = a w + b + scale · ã d u, or with a magnitude (DoRA) y = (a w + scale · ã d u) ∘ m/c + b. The low-rank factors are
    stored as PEFT has them: down (r, f_in), up (f_out, r)."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor | None,
        up: Tensor | None,
        magnitude: Tensor | None,
        how: How,
    ) -> Tensor:
        flat, w = operand(rows(a), how.mixed), weight if how.in_out else weight.t()
        h = c = branch = None
        if how.mixed and down is not None and up is not None:
            branch = lora.branch(how.dropped(flat)[0], down.t(), up.t(), how.scale)
        out = affine.forward(flat, w, bias if magnitude is None else None, dtype=a.dtype, branch=branch)
        if down is not None and up is not None:
            # PEFT's factors may be wider than the layer, or narrower
            dtype = torch.promote_types(out.dtype, down.dtype)
            wide, d, u = out.to(dtype), down.t().to(dtype), up.t().to(dtype)
            h = (
                lora.forward(how.dropped(flat.to(dtype))[0], d, u, how.scale, into=wide)
                if branch is None
                else branch[0]
            )
            if magnitude is not None:
                c = lora.column_norms(w.to(dtype), d, u, how.scale)
                wide = wide * (magnitude / c)
                wide = wide if bias is None else wide.add_(bias)
            out = wide.to(out.dtype)
        ctx.shape, ctx.how, stored = a.shape, how._replace(source=None), [flat]
        ctx.rebuild, ctx.shared = None, None
        if not any(ctx.needs_input_grad[i] for i in (1, 3, 5)):
            stored = []  # the input is needed for gradients of matrices and magnitudes only
        elif how.source is not None:
            ctx.rebuild, ctx.shared, stored = how.source.rebuild, how.source.shared, how.source.tensors
            how.source.shared.readers += 1
        ctx.save_for_backward(weight, down, up, magnitude, h, c, *stored)
        return shaped(out, *a.shape[:-1], out.shape[1])

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        weight, down, up, magnitude, h, c, *stored = ctx.saved_tensors
        how, needs, given = ctx.how, ctx.needs_input_grad, rows(delta)
        signal = given if magnitude is None else (given * (magnitude / c)).to(given.dtype)  # of both paths together
        w = weight if how.in_out else weight.t()
        grad_b = affine.grad_b(given, None) if needs[2] else None
        grad_w = grad_d = grad_u = grad_m = branch = None
        if stored:
            a = operand(stored[0] if ctx.rebuild is None else ctx.shared.get(ctx.rebuild, stored)[1], how.mixed)
        if needs[1]:
            left, right = (signal, a) if how.in_out else (a, signal)
            grad_w = affine.grad_w(left, right, None, weight.dtype)
        if down is not None:
            dtype = torch.promote_types(given.dtype, down.dtype)
            wide, d, u = operand(signal.to(dtype), how.mixed), down.t().to(dtype), up.t().to(dtype)
            g = lora.upstream(wide, u, how.scale) if needs[0] or needs[3] else wide
            branch = (g, d.t()) if how.mixed and not how.dropout else None
            if needs[3]:
                read = a if how.mixed else a.to(dtype)
                grad_d = lora.grad_d(how.dropped(read)[0], g, None, dtype)  # (∂d)ᵗ = gᵗ ã   (45)
            if needs[4]:
                grad_u = affine.grad_w(h, wide, None, dtype)  # (∂u)ᵗ = Δᵗ h   (46)
            if needs[5]:
                low = (h, u) if how.mixed else None
                z = affine.forward(a, w, None, dtype=given.dtype, branch=low).to(dtype)
                z = z if how.mixed else z.addmm_(h, u)
                grad_m = lora.grad_m(given.to(dtype), z, c, None)
        before = None
        if needs[0]:
            before = affine.backward(operand(signal, how.mixed), w, None, given.dtype, how.mixed, branch)
            if down is not None and branch is None:
                into = before.to(dtype)
                lora.backward(g.to(dtype), d, into, how.dropped(into)[1])
                before = into.to(before.dtype)
        return None if before is None else before.view(ctx.shape), grad_w, grad_b, grad_d, grad_u, grad_m, None


@opaque
def linear(
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    down: Tensor | None = None,
    up: Tensor | None = None,
    magnitude: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    in_out: bool = False,
    precision: str | None = None,
) -> Tensor:
    """a w + b, with the weight stored as (f_out, f_in), or as (f_in, f_out) if `in_out`; plus scale · ã d u, with down
    (r, f_in) and up (f_out, r). `dropout` is the share of the branch's input that is dropped. A `magnitude` (f_out)
    rescales the columns of w + scale · d u to its length, whose present lengths count as constants (DoRA). With the
    `precision` "mixed" operands of products are rounded to bfloat16; sums, result and gradients are float32."""
    check_linear(a, weight, bias, down, up, magnitude, in_out)
    mixed = mixes(precision, a=a, weight=weight, bias=bias, down=down, up=up, magnitude=magnitude)
    kind, source = a.device.type, source_of(a)
    tensors = autocast(kind, a, weight, bias, down, up, magnitude)
    if tensors[0] is not a:
        source = None  # which is in another dtype
    seed = int(torch.randint(1 << 31, ())) if dropout else 0
    with without_autocast(kind):
        return LinearFunction.apply(*tensors, How(in_out, scale, dropout, seed, source, mixed))  # type: ignore


# ── activations and gates ───────────────────────────────────────────────────────────────────────────────────────────


class ActivationFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        return shaped(activations.forward(rows(x), name), *x.shape)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return activations.backward(rows(delta), rows(x), ctx.name)[0].view(x.shape), None


class GateFunction(Function):
    """gate and up are two tensors, or the halves of one."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, name: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name = name
        halves = _halves(gate, up)
        return shaped(gated.forward(*halves, name), *gate.shape[:-1], halves[0].shape[1])

    @staticmethod
    @first_derivative
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device), None
        if up is not None:
            d_up = torch.empty(up.shape, dtype=up.dtype, device=up.device)
        gated.backward(rows(delta), *_halves(gate, up), ctx.name, into=_halves(d_gate, d_up))
        return d_gate, d_up, None


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """(n, f) each, views if the tensors are contiguous"""
    if up is not None:
        return rows(gate), rows(up)
    both = rows(gate)
    half = both.shape[1] // 2
    return both[:, :half], both[:, half:]


def _rebuild_activation(x: Tensor, name: str) -> tuple[None, Tensor]:
    return None, activations.forward(rows(x), name)


def _rebuild_gate(gate: Tensor, up: Tensor | None = None, *, name: str) -> tuple[None, Tensor]:
    return None, gated.forward(*_halves(gate, up), name)


@opaque
def activation(x: Tensor, name: str) -> Tensor:
    """g(x) for the g of that name: relu, gelu, gelu_tanh or relu2"""
    check_activation(name, ACTIVATIONS)
    out: Tensor = ActivationFunction.apply(x, name)  # type: ignore[no-untyped-call]
    rebuild: Rebuild = partial(_rebuild_activation, name=name)
    return mark(out, rebuild, Shared(), _detached(x))


@opaque
def gate(gate: Tensor, up: Tensor | None, name: str = "silu") -> Tensor:
    """g(gate) ∘ up; without `up`, gate holds both side by side. g is silu, gelu or gelu_tanh."""
    check_activation(name, GATES)
    check_gate(gate, up)
    out: Tensor = GateFunction.apply(gate, up, name)  # type: ignore[no-untyped-call]
    tensors = _detached(gate) if up is None else _detached(gate, up)
    return mark(out, partial(_rebuild_gate, name=name), Shared(), tensors)
