"""Stochastic rounding: updates of bfloat16 weights that are not lost, on average.

bfloat16 has 8 significant bits, so an update below |w|/512 rounds back to w, at every step again. Here the update is
computed in float32, and its result x, between the neighbors a < x < b in bfloat16, becomes

    b with probability (x − a)/(b − a), else a          so that E[rounded x] = x

The random bits are a hash of (seed, step, parameter, entry), not a stream: nothing is stored for a resumed run, and neither
threads, processes nor the order of updates change a weight.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

AT_ONCE = 1 << 16  # numbers that are rounded at once: their temporary buffers stay in the cache
LARGEST = torch.finfo(torch.bfloat16).max
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64: the distance of its states, and below the factors that mix a state
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class StochasticRounding:
    """rounding = StochasticRounding(seed, model.parameters())
    optimizer = maker("AdamW", 1e-3, 0.1, (0.9, 0.99), rounding)(model.parameters())
    rounding.step = 7  # before each step: how many were taken
    """

    def __init__(self, seed: int, parameters: Iterable[nn.Parameter]):
        """`parameters` are all of a model, in its order: the position of one, not its address, chooses its random bits."""
        self.seed, self.step = seed, 0
        self.index: dict[Tensor, int] = {p: i for i, p in enumerate(parameters)}

    def update(
        self, optimizer: Optimizer, step: Callable[..., Any], group: dict[str, Any], p: Tensor, space: Tensor
    ) -> None:
        """Run `step` of the optimizer on a float32 copy of p and of its gradient in `space`, and round the result."""
        weight, grad = (row[: p.numel()].view(p.shape) for row in space)
        wide = nn.Parameter(weight.copy_(p))
        wide.grad = grad.copy_(p.grad)
        groups, state = optimizer.param_groups, optimizer.state[p]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype == torch.bfloat16:  # Adagrad makes it before the first step
                state[key] = value.float()
        optimizer.param_groups, optimizer.state[wide] = [{**group, "params": [wide]}], state
        try:
            step(optimizer)
        finally:
            optimizer.param_groups = groups
            del optimizer.state[wide]
        p.copy_(round_to_bfloat16_(wide.detach(), self.key(p)))

    def key(self, p: Tensor) -> int:
        text = f"round {self.seed} {self.step} {self.index[p]}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def rounding_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """A torch optimizer's `step` that updates bfloat16 parameters one by one, if the optimizer has a `rounding`. Their state
    (AdamW's moments) is float32."""

    def rounded(self: Any, closure: None = None) -> Any:
        rounding: StochasticRounding | None = getattr(self, "rounding", None)
        trained = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if rounding is None or not trained or any(p.dtype != torch.bfloat16 for _, p in trained):
            return step(self, closure)
        largest = max(p.numel() for _, p in trained)
        space = torch.empty(2, largest, dtype=torch.float32, device=trained[0][1].device)
        for group, p in trained:
            rounding.update(self, step, group, p, space)
        return None

    return rounded


def round_to_bfloat16_(x: Tensor, key: int) -> Tensor:
    """Round contiguous float32 numbers to ones that bfloat16 represents, in place. What it represents already, NaN and
    infinity stay; finite numbers stay finite."""
    flat = x.view(-1)
    states = torch.arange(-(-min(AT_ONCE, len(flat)) // 4), device=x.device).mul_(_signed(GOLDEN))
    for first in range(0, len(flat), AT_ONCE):
        part = flat[first : first + AT_ONCE]
        mixed = _mix(states[: -(-len(part) // 4)] + _signed(key + first // 4 * GOLDEN))
        noise = mixed.view(torch.int16)[: len(part)].int().bitwise_and_(0xFFFF)  # four numbers of 16 bits in each hash
        unusual = None if part.abs().amax() <= LARGEST else part.clone()  # NaN compares as False
        part.view(torch.int32).add_(noise).bitwise_and_(-0x10000)  # carries into the upper half with that probability
        if unusual is not None:
            part.copy_(torch.where(unusual.isfinite(), part.clamp(-LARGEST, LARGEST), unusual))
    return x


def _mix(z: Tensor) -> Tensor:
    """The output of splitmix64 (Steele, Lea and Flood, 2014) in state z, in place."""
    for shift, factor in MIX:
        _xor_shift(z, shift).mul_(_signed(factor))
    return _xor_shift(z, 31)


def _xor_shift(z: Tensor, shift: int) -> Tensor:
    return z.bitwise_xor_((z >> shift).bitwise_and_((1 << 64 - shift) - 1))  # torch's shift repeats the sign


def _signed(x: int) -> int:
    """The int64 with the last 64 bits of x."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)
