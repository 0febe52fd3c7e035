"""The registry of checks. A check is a function that takes random inputs and returns the error it measured:

    @check("E-ln-dw", 6, "41", AUTOGRAD)
    def gradient_of_the_gain(rng: RandomInputs) -> float:
        '''∂w = diag(āᵗ Δ_i) ∈ (d)'''          the docstring is the statement
        …
        return relative_error(ours, expected)   or (error, "a note with measured values")

A property that must NOT hold (a misprint, a broken symmetry) is measured with `shortfall`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import HandgradError
from ..paper.attention import Head
from ..paper.transformer import Adapter, Block, Network
from ..proof.check_report import Report, run_check
from ..proof.oracles import differentiate, directional_error, relative_error
from ..tolerances import (
    FINITE_DIFFERENCE_TOLERANCE,
    GRADIENT_FLOOR,
    IDENTITY_TOLERANCE,
    MONTE_CARLO_TOLERANCE,
    TOLERANCE,
)

SECTIONS = {
    1: "1 · Data and loss",
    2: "2 · Embedding",
    3: "3.1 · One head, forward",
    4: "3.2 · One head, backward",
    5: "3 · Box: permutations and the KV cache",
    6: "4 · Many heads",
    7: "5 · LayerNorm",
    8: "6 · LoRA and the inherited layers",
    9: "7 · The minimal transformer: Table 2",
    10: "7 · Parameter gradients: Table 3",
    11: "7 · Numbers",
    12: "A · Matrix identities",
    13: "B · Softmax",
    14: "Invariants derived here",
    15: "Errata: printed form against corrected form",
    16: "Beyond the paper",
}
BEYOND = 16  # layers of handgrad's own; their ids begin with L-

# oracle → its name in the report and the default tolerance
AUTOGRAD = ("autograd", TOLERANCE[torch.float64])
IDENTITY = ("identity", IDENTITY_TOLERANCE)
EXACT = ("exact", 0.0)
COUNTED = ("op count", 0.0)
SAMPLED = ("Monte Carlo", MONTE_CARLO_TOLERANCE)
Oracle = tuple[str, float]

Outcome = float | tuple[float, str]
T = TypeVar("T")


class RandomInputs:
    """Random sizes, tensors and networks for one check. They depend on the seed and the key alone."""

    def __init__(self, seed: int, key: str, shared: dict[str, Any]):
        self.seed = seed
        self.generator = torch.Generator().manual_seed(_mix(seed, key))
        self._shared = shared

    def size(self, low: int, high: int) -> int:
        """A random integer from low to high, inclusive."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def matrix(self, *shape: int) -> Tensor:
        """Standard normal, float64."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def ids(self, n: int, n_vocab: int) -> Tensor:
        return torch.randint(n_vocab, (n,), generator=self.generator)

    def permutation(self, n: int) -> Tensor:
        """A permutation matrix."""
        return torch.eye(n, dtype=torch.float64)[torch.randperm(n, generator=self.generator)]

    def head(self, d: int, d_rho: int, d_h: int) -> Head:
        """A head whose attention weights are neither uniform nor saturated."""
        s = 1 / math.sqrt(d)
        return Head(
            w_q=self.matrix(d, d_rho) * s, b_q=self.matrix(d_rho), w_k=self.matrix(d, d_rho) * s,
            b_k=self.matrix(d_rho), w_v=self.matrix(d, d_h) * s, b_v=self.matrix(d_h),
        )  # fmt: skip

    def block(self, d: int, heads: list[tuple[int, int]], hidden: int) -> Block:
        """`heads` lists (d_ρ, d_h) of each head; Σ d_h need not be d."""
        width = sum(d_h for _, d_h in heads)
        return Block(
            w_1=1 + 0.3 * self.matrix(d), b_1=0.3 * self.matrix(d), heads=[self.head(d, *h) for h in heads],
            w_3=self.matrix(width, d) / math.sqrt(width), b_3=0.3 * self.matrix(d),
            w_5=1 + 0.3 * self.matrix(d), b_5=0.3 * self.matrix(d),
            w_6=self.matrix(d, hidden) / math.sqrt(d), b_6=0.3 * self.matrix(hidden),
            w_8=self.matrix(hidden, d) / math.sqrt(hidden), b_8=0.3 * self.matrix(d),
        )  # fmt: skip

    def network(
        self,
        n_vocab: int,
        n_context: int,
        d: int,
        heads: list[tuple[int, int]],
        n_blocks: int = 1,
        tied: bool = False,
        rank: int = 0,
    ) -> Network:
        """A minimal transformer with random parameters; `rank` > 0 adds an adapter to the logits layer."""
        s = 1 / math.sqrt(d)
        return Network(
            w_tok=self.matrix(n_vocab, d), w_pos=self.matrix(n_context, d),
            blocks=[self.block(d, heads, 4 * d) for _ in range(n_blocks)],
            w_10=1 + 0.3 * self.matrix(d), b_10=0.3 * self.matrix(d),
            w_11=None if tied else self.matrix(d, n_vocab) * s, b_11=None if tied else 0.3 * self.matrix(n_vocab),
            adapter=Adapter(self.matrix(d, rank) * s, self.matrix(rank, n_vocab), 0.7) if rank else None,
        )  # fmt: skip

    def shared(self, key: str, make: Callable[["RandomInputs"], T]) -> T:
        """An input of several checks, made once per run from the seed and this key."""
        if key not in self._shared:
            self._shared[key] = make(RandomInputs(self.seed, key, self._shared))
        made: T = self._shared[key]
        return made


def shortfall(measured: float, at_least: float) -> float:
    """How far `measured` is below `at_least`, or 0: the error of the claim that something is large, or differs."""
    return max(0.0, at_least - measured) if not math.isnan(measured) else math.inf


def mismatch(*pairs: tuple[object, object]) -> float:
    """Number of pairs (found, expected) that are not exactly equal."""
    return float(sum(found != expected for found, expected in pairs))


def raises(kind: type[Exception] | tuple[type[Exception], ...], f: Callable[[], object]) -> bool:
    """Whether f raises this exception."""
    try:
        f()
    except kind:
        return True
    return False


def disagreement(
    f: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, delta: Tensor | float, rng: RandomInputs, floor: float = 0.0
) -> float:
    """The second, independent oracle for grad = ∂(Δ·f(x))/∂x: 0 if finite differences agree with it, else infinity."""
    error = directional_error(lambda x: (f(x) * delta).sum().item(), x, grad, rng.generator, floor)
    return 0.0 if error < FINITE_DIFFERENCE_TOLERANCE else math.inf


def gradient_error(ours: Tensor, f: Callable[[Tensor], Tensor], x: Tensor, delta: Tensor, rng: RandomInputs) -> float:
    """The error of ours against autograd's ∂(Δ·f(x))/∂x; infinite if finite differences disagree."""
    floor = GRADIENT_FLOOR
    disagrees = disagreement(f, x, ours, delta, rng, floor)
    return max(disagrees, relative_error(ours, differentiate(f, x, upstream=delta)[0], floor))


@dataclass(frozen=True)
class Check:
    id: str
    section: int
    equation: str
    statement: str
    oracle: str
    tolerance: float
    measure: Callable[[RandomInputs], Outcome]


CHECKS: dict[str, Check] = {}
Watch = Callable[[Sequence[Check]], Iterable[Check]]


def check(
    id: str, section: int, equation: str, oracle: Oracle, statement: str = ""
) -> Callable[[Callable[[RandomInputs], Outcome]], Callable[[RandomInputs], Outcome]]:
    """Register a function under its id. `equation` is the paper's number, or "" if it has none; the statement defaults to
    the function's docstring."""

    def register(measure: Callable[[RandomInputs], Outcome]) -> Callable[[RandomInputs], Outcome]:
        if id in CHECKS:
            raise AssertionError(f"two checks have the id {id}: rename one")
        text = " ".join((statement or measure.__doc__ or "").split())
        CHECKS[id] = Check(id, section, equation, text, *oracle, measure)
        return measure

    return register


def select(only: str | None) -> list[Check]:
    """The checks in the order of the paper; `only` is an id, a pattern such as 'T2-*', or several with commas."""
    # a stable sort: within a section in the order of the file, errata by their number
    ordered = sorted(CHECKS.values(), key=lambda c: (c.section, int(c.id[1:]) if c.id[1:].isdigit() else 0))
    if only is None:
        return ordered
    patterns = [p.strip() for p in only.split(",") if p.strip()]
    for p in patterns or [only]:
        if not any(fnmatchcase(c.id.lower(), p.lower()) for c in ordered):
            raise HandgradError(f"no check matches {p!r}: give an id such as E-ln-dx or a pattern such as 'T2-*'")
    return [c for c in ordered if any(fnmatchcase(c.id.lower(), p.lower()) for p in patterns)]


def run(seed: int, only: str | None = None, watch: Watch = iter) -> Report:
    """Run the ledger's checks. `watch` may wrap the sequence of checks, for a progress bar."""
    shared: dict[str, Any] = {}
    chosen = select(only)
    report = Report(_title(chosen, seed))
    for c in watch(chosen):
        measure = partial(c.measure, RandomInputs(seed, c.id, shared))
        with torch.no_grad():
            result = run_check(c.id, SECTIONS[c.section], c.equation, c.statement, c.oracle, c.tolerance, measure)
        report.checks.append(result)
    return report


def _title(chosen: list[Check], seed: int) -> str:
    """Counts the paper's checks and those beyond it separately."""
    beyond = sum(c.section == BEYOND for c in chosen)
    counts = f": {len(chosen) - beyond} of the paper, {beyond} beyond it" if beyond else ""
    return f"The paper, checked line by line{counts} (seed {seed})"


def _mix(seed: int, key: str) -> int:
    """Hash seed and key into a generator seed, by FNV-1a: Python's own hash of a string changes from run to run."""
    h = 0xCBF29CE484222325 ^ seed
    for byte in key.encode():
        h = ((h ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h & 0x7FFFFFFFFFFFFFFF
