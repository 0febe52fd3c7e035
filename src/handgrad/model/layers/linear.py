"""Modules that own parameters and call `ops`: `forward`, `backward` for the error signal, `accumulate` for the gradients.

A frozen parameter (`requires_grad=False`) gets no gradient and costs nothing. No module stores activations: the caller
passes what a backward pass needs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import HandgradError
from ...ops import embedding, linear
from ..passes.arguments import PLAIN, Pass
from ..storage.packed import Packed
from ..storage.weights import STORED, Weights
from .hookless import Hookless

Dtype = torch.dtype | None
ROWS_OF_PART = 4096  # a frozen head with more rows is multiplied in parts: see Head


def freeze(parameters: Iterable[nn.Parameter]) -> None:
    """Freeze parameters and discard their gradients, which an optimizer would still apply."""
    for p in parameters:
        p.requires_grad_(False)
        p.grad = None


class Like(Hookless):
    """The dtype and device of a layer without a weight. `model.to(dtype)` changes them as it does those of a weight."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.register_buffer("empty", torch.empty(0, dtype=dtype, device=device), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.empty.dtype  # type: ignore[return-value]


class Affine(Hookless, ABC):
    """a → a w + b: the interface that `Linear` and an adapter around it share, so that no caller needs to know which it
    has. `dropout` is the share of its input that a layer drops while training."""

    dropout = 0.0

    @abstractmethod
    def forward(
        self, a: Tensor, run: Pass = PLAIN, out: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """a_{i−1} → a_i, written to `out` if that is given, or in `dtype` instead of the layer's own"""

    def upstream(self, delta: Tensor, run: Pass = PLAIN) -> Any:
        """What `backward` and `accumulate` both need of Δ_i, to be computed once and given to both."""
        return None

    @abstractmethod
    def backward(
        self, delta: Tensor, run: Pass = PLAIN, into: Tensor | None = None, upstream: Any = None, dtype: Dtype = None
    ) -> Tensor:
        """Δ_i → Δ_{i−1}, in `dtype` instead of the layer's own, or added to `into` if that is given: several layers may have
        the same input"""

    @abstractmethod
    def accumulate(self, delta: Tensor, a: Tensor, run: Pass = PLAIN, upstream: Any = None) -> None:
        """Add the parameters' gradients, from Δ_i and the input a_{i−1}, into `.grad`."""

    @abstractmethod
    def effective_weight(self, weights: Weights = STORED) -> Tensor:
        """(f_in, f_out), everything that multiplies the input"""

    @abstractmethod
    def plain(self) -> "Linear":
        """The linear layer itself, without an adapter."""

    @abstractmethod
    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        """The parameters by the letter the paper gives them: w and b, and an adapter's d, u and m."""

    def low_rank(self) -> list[tuple[Tensor, Tensor, float]] | None:
        """d, u and scale of the low-rank branches that the layer adds to `plain()`; None if it computes something else."""
        return None

    @property
    def adapted(self) -> bool:
        """Whether the layer has an adapter."""
        return self.plain() is not self


class Linear(Affine):
    """weight (f_in, f_out) as in the paper and in GPT-2's files, or (f_out, f_in) if `stored` is "out_in", as in most
    others; bias (f_out). A gradient has the orientation of its weight.

    parts    column widths of several layers side by side, by their letters: {"q": 768, "k": 768, "v": 768}
    weight   a Parameter to share instead of a new one: a tied head has the embedding's

    `pack` replaces the weight by packed bytes, which are unpacked whenever the layer computes. It is then frozen.
    """

    packed: Packed | None = None
    in_parts = False  # whether products are computed part by part

    def __init__(
        self,
        f_in: int,
        f_out: int,
        bias: bool = True,
        device: torch.device | None = None,
        *,
        stored: str = "in_out",
        parts: dict[str, int] | None = None,
        weight: nn.Parameter | None = None,
    ):
        super().__init__()
        self.in_out, self.f_in = stored == "in_out", f_in
        shape = (f_in, f_out) if self.in_out else (f_out, f_in)
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(shape, device=device)) if weight is None else weight
        self.bias = nn.Parameter(torch.empty(f_out, device=device)) if bias else None
        self.parts = parts or {}
        self.widths = list(self.parts.values()) or [f_out]  # columns of each part of the output

    @property
    def w(self) -> Tensor:
        """(f_in, f_out), a view of the weight"""
        return self.effective_weight()

    @property
    def trains(self) -> bool:
        """Whether the weight gets a gradient."""
        return self.weight is not None and self.weight.requires_grad

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layer's results, whatever its weight is stored as."""
        return self.like.dtype if self.weight is None else self.weight.dtype

    def _parts(self, weights: Weights) -> Iterator[tuple[slice, Tensor]]:
        """Columns of the output, and their part of w, (f_in, part): a view, or unpacked into one buffer for all parts."""
        buffer = None
        for start in range(0, self.widths[0], ROWS_OF_PART):
            rows = slice(start, min(start + ROWS_OF_PART, self.widths[0]))
            if self.weight is not None:
                yield rows, self.weight[rows].t()
                continue
            assert self.packed is not None
            part, dtype = self.packed.between(rows.start, rows.stop), weights.dtype or self.like.dtype
            if (stored := part.tensor()).dtype is dtype:
                yield rows, stored.t()
                continue
            buffer = part.unpack(None if buffer is None else buffer[: part.shape[0]], dtype)
            yield rows, buffer.t()

    def pack(self, packed: Packed, dtype: torch.dtype) -> None:
        """Replace the weight by these bytes, in the same orientation, and compute in `dtype`."""
        self.weight, self.packed, self.like = None, packed, Like(dtype, packed.data.device)

    def forward(
        self,
        a: Tensor,
        run: Pass = PLAIN,
        out: Tensor | None = None,
        dtype: torch.dtype | None = None,
        branch: linear.Branch | None = None,
    ) -> Tensor:
        b, dtype = self.added_bias(), dtype or self.dtype
        if self.packed is not None and not self.in_out:
            product = run.weights.product(a, self.packed, out)
            if product is not None:
                product = product if branch is None else product.addmm_(*(x.to(product.dtype) for x in branch))
                return product if b is None else product.add_(b)
            a = run.weights.rounded(a, self.packed)
        if not self.in_parts or len(a) <= linear.FEW_ROWS:
            return linear.forward(a, self.effective_weight(run.weights), b, out, dtype, branch)
        out = a.new_empty(len(a), self.widths[0], dtype=dtype) if out is None else out
        for part, w in self._parts(run.weights):
            low = None if branch is None else (branch[0], branch[1][:, part])
            linear.forward(a, w, None if b is None else b[part], out[:, part], branch=low)
        return out

    def backward(
        self,
        delta: Tensor,
        run: Pass = PLAIN,
        into: Tensor | None = None,
        upstream: Any = None,
        dtype: torch.dtype | None = None,
        branch: linear.Branch | None = None,
    ) -> Tensor:
        dtype = dtype or self.dtype
        if not self.in_parts:
            return linear.backward(delta, self.effective_weight(run.weights), into, dtype, run.rounded, branch)
        for part, w in self._parts(run.weights):
            into = linear.backward(delta[:, part], w, into, self.dtype, run.rounded, branch)
            branch = None
        assert into is not None
        return into.to(dtype)

    def accumulate(self, delta: Tensor, a: Tensor, run: Pass = PLAIN, upstream: Any = None) -> None:
        self.accumulate_weight(delta, a, run)
        self.accumulate_bias(delta, run)

    def accumulate_weight(self, delta: Tensor, a: Tensor, run: Pass = PLAIN) -> None:
        """(∂w)ᵗ = Δᵗ a where the weight is stored transposed. A tied weight's gradient is added to the embedding's own
        (R9)."""
        if self.weight is None or not self.weight.requires_grad:
            return
        if run.examples is not None:
            run.examples.product(self.weight, a, delta, self.in_out)
        else:
            left, right = (delta, a) if self.in_out else (a, delta)
            self.weight.grad = linear.grad_w(left, right, self.weight.grad, self.weight.dtype)

    def accumulate_bias(self, delta: Tensor, run: Pass = PLAIN) -> None:
        if self.bias is None or not self.bias.requires_grad:
            return
        if run.examples is not None:
            run.examples.sums(self.bias, delta)
        else:
            self.bias.grad = linear.grad_b(delta, self.bias.grad, self.bias.dtype)

    def added_bias(self) -> Tensor | None:
        """(f_out), what is added to the product"""
        return self.bias

    def effective_weight(self, weights: Weights = STORED) -> Tensor:
        w: Tensor | None = self.weight
        if w is None:
            assert self.packed is not None
            w = weights.unpacked(self.packed, self.like.dtype)
        return w if self.in_out else w.t()

    def set_effective_weight(self, w: Tensor) -> None:
        """Copy w (f_in, f_out) into the weight, in whichever orientation it is stored."""
        if self.weight is None:
            raise HandgradError("a packed weight cannot be changed: load the model without packed=True or bits")
        self.weight.copy_(w if self.in_out else w.t())

    def plain(self) -> "Linear":
        return self

    def low_rank(self) -> list[tuple[Tensor, Tensor, float]] | None:
        return []

    def named_symbols(self) -> dict[str, nn.Parameter | None]:
        return {"w": self.weight, "b": self.bias}

    def parts_of(self, letter: str, x: Tensor) -> dict[str, Tensor]:
        """Cut the weight, its gradient (letter w; as (f_in, f_out)) or the bias (letter b) into the parts."""
        if letter == "w" and not self.in_out:
            x = x.t()
        parts = (part.reshape(*x.shape[:-1], -1) for part in self.split(x))
        return dict(zip(self.parts, parts, strict=True))

    def split(self, x: Tensor) -> list[Tensor]:
        """The columns (…, f_out) of each part, views: (…, width), or (…, heads, width) if the parts alternate by head."""
        return list(torch.split(x, self.widths, -1))


class QueryKeyValue(Linear):
    """[w_q | w_k | w_v] side by side, with the bias [b_q | b_k | b_v], or [b_q | b_v] without `key_bias`: if queries and
    keys are neither rotated nor normalized, b_k changes nothing (19), so its gradient is exactly 0 (29). With `heads` the
    columns of each head's q, k and v are side by side instead."""

    heads: int | None = None

    def __init__(
        self,
        d: int,
        widths: dict[str, int],
        bias: bool,
        key_bias: bool,
        key_bias_matters: bool,
        device: torch.device | None = None,
        *,
        stored: str = "in_out",
    ):
        super().__init__(d, sum(widths.values()), bias, device, stored=stored, parts=widths)
        self.key_bias, self.key_bias_matters = key_bias, key_bias_matters
        if not key_bias:
            self.bias = nn.Parameter(torch.empty(widths["q"] + widths["v"], device=device))

    def added_bias(self) -> Tensor | None:
        b: Tensor | None = self.bias
        if b is not None and not self.key_bias:
            q, k, _ = self.widths
            b = torch.cat([b[:q], b.new_zeros(k), b[q:]])
        return b

    def accumulate_bias(self, delta: Tensor, run: Pass = PLAIN) -> None:
        if self.key_bias_matters:
            super().accumulate_bias(delta, run)
        elif self.bias is not None and self.bias.requires_grad:
            if run.examples is not None:
                run.examples.sums(self.bias, self._without_key(delta))
                return
            sums = self._without_key(delta.sum(0)[None])[0]  # (24), (32.a)
            self.bias.grad = sums if self.bias.grad is None else self.bias.grad.add_(sums)

    def _without_key(self, x: Tensor) -> Tensor:
        """The columns of the bias; those of b_k, if it has them, are 0 (32.b): what is summed there is rounding (R32)."""
        q, k, _ = self.widths
        key = [torch.zeros_like(x[:, q : q + k])] if self.key_bias else []
        return torch.cat([x[:, :q], *key, x[:, q + k :]], 1)

    def split(self, x: Tensor) -> list[Tensor]:
        if self.heads is None:
            return super().split(x)
        return list(torch.split(x.unflatten(-1, (self.heads, -1)), [w // self.heads for w in self.widths], -1))  # type: ignore[no-untyped-call]

    def parts_of(self, letter: str, x: Tensor) -> dict[str, Tensor]:
        if letter == "b" and not self.key_bias:
            q, v = x[: self.parts["q"]], x[self.parts["q"] :]
            return {"q": q, "v": v}
        return super().parts_of(letter, x)


class Head(Linear):
    """The logits layer, w (d, V), stored as (V, d). A large frozen one is multiplied in parts, so that for many rows a
    packed head is never unpacked as a whole. Unpacked it is multiplied in the same parts: sums have the same order, and
    gradients are equal to the last bit."""

    @property
    def in_parts(self) -> bool:  # type: ignore[override]
        return not self.trains and self.widths[0] > ROWS_OF_PART


class Embedding(Hookless):
    """weight (rows, d), or packed bytes of which only the rows that are looked up are unpacked. What is looked up is
    multiplied by `scale`."""

    packed: Packed | None = None

    def __init__(self, rows: int, d: int, device: torch.device | None = None, scale: float = 1.0):
        super().__init__()
        self.scale = scale  # of what is looked up
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(rows, d, device=device))

    def pack(self, packed: Packed, dtype: torch.dtype) -> None:
        """Replace the weight by these bytes."""
        self.weight, self.packed, self.like = None, packed, Like(dtype, packed.data.device)

    @property
    def w(self) -> Tensor:
        """(rows, d)"""
        if self.weight is not None:
            return self.weight
        assert self.packed is not None
        return self.packed.unpack(dtype=self.like.dtype)

    @property
    def trains(self) -> bool:
        return self.weight is not None and self.weight.requires_grad

    def table(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """A table and the rows to look up in it: the weight itself, or the unpacked rows in the order of the ids."""
        if self.weight is not None:
            return self.weight, ids
        assert self.packed is not None
        return self.packed.rows(ids, self.like.dtype), torch.arange(len(ids), device=ids.device)

    def backward(self, delta: Tensor, ids: Tensor, run: Pass = PLAIN) -> None:
        if self.weight is None or not self.weight.requires_grad:
            return
        if self.scale != 1:
            delta = delta * self.scale
        if run.examples is not None:
            run.examples.look_up(self.weight, delta, ids)
        else:
            self.weight.grad = embedding.grad_w(delta, ids, self.weight, self.weight.grad)
