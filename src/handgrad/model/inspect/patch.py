"""Patches: edits that put entries of another trace in the place of a pass's own. `patch_from` makes one, `align` says which
row of one prompt belongs to which row of another.

    patch = hg.patch_from(other, "blocks.3.a_3", position=4, head=2)
    hg.trace(model, tokens, targets, edit=patch).loss − trace.loss        measured
    patch.predicted(trace) = ⟨Δ, a′ − a⟩                                  to first order

The prediction is the derivative of the objective along a + t (a′ − a) at t = 0, for all entries that are replaced at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from functools import reduce

import torch
from torch import Tensor

from ...errors import HandgradError, shown
from ..passes.batch import check_ids
from ..steps import signal

Rows = Mapping[int, int]  # a row here → the row of the other prompt that belongs to it
INSIDE = ("q", "k", "v", "rho", "skip_5", "skip_10")  # activations that are not called a_…


@dataclass(frozen=True)
class Place:
    """Entries of one activation, and another trace's, which replace them."""

    name: str
    values: Tensor  # of the other trace
    align: Rows | None = None  # None: prompts of equal length
    positions: tuple[int, ...] | None = None  # None: every row that has a partner
    heads: int = 1  # side by side in a row, as in a_3
    head: int | None = None
    column: int | None = None

    def view(self, x: Tensor) -> Tensor:
        """A tensor of that name as (n, heads, w), all of it."""
        return x.transpose(0, 1) if x.ndim == 3 else x.view(len(x), self.heads, -1)

    def entries(self, x: Tensor) -> Tensor:
        """The same with the heads and columns that are replaced: a view."""
        return self.view(x)[:, _only(self.head), _only(self.column)]

    def matched(self, x: Tensor) -> tuple[list[int], list[int]]:
        """The rows of a tensor of that name that are replaced, and those of the other trace."""
        (n, *shape), (others, *its) = self.view(x).shape, self.view(self.values).shape
        if self.name.endswith("rho") and n != others:
            raise HandgradError(
                f"{self.name} is a map between the tokens of a prompt: the other has {others}, this {n}"
            )
        if shape != its:
            raise HandgradError(
                f"{self.name} has the shape {tuple(x.shape)} here and {tuple(self.values.shape)} in the other trace: patch"
                " between traces of models of one shape"
            )
        if n != others and self.align is None:
            raise HandgradError(
                f"{self.name} has {n} rows here and {others} in the other trace: say which row gets which, with"
                " align={row: row of the other} or align=hg.align(tokens, other_tokens)"
            )
        rows = dict(zip(range(n), range(n), strict=True)) if self.align is None else self.align
        for t, s in rows.items():
            check_index("align: the row", t, n)
            check_index("align: the other's row", s, others)
        if self.positions is None:
            return [*rows], [*rows.values()]
        for t in self.positions:
            check_index("position", t, n)
            if t not in rows:
                raise HandgradError(f"position {t} has no row in the other trace: add it to align")
        return [*self.positions], [rows[t] for t in self.positions]

    def replaced(self, x: Tensor) -> Tensor:
        """The tensor with the other's entries, changed in place."""
        here, there = self.matched(x)
        self.entries(x)[here] = self.entries(self.values)[there].to(x)
        return x

    def products(self, x: Tensor, delta: Tensor) -> Tensor:
        """Δ ∘ (a′ − a) in float64, (n, heads, w); 0 in rows that are not replaced"""
        here, there = self.matched(x)
        own, error, its = (self.entries(y).double() for y in (x, delta, self.values))
        found = torch.zeros_like(own)
        found[here] = error[here] * (its[there] - own[here])
        return found


class Patch(Mapping[str, Callable[[Tensor], Tensor]]):
    """An edit for `hg.trace(..., edit=patch)`. `one | other` is both at once."""

    def __init__(self, places: Sequence[Place], n_vocab: int):
        self.places, self.n_vocab = tuple(places), n_vocab

    def __getitem__(self, name: str) -> Callable[[Tensor], Tensor]:
        its = [place for place in self.places if place.name == name]
        if not its:
            raise KeyError(name)
        return lambda x: reduce(lambda y, place: place.replaced(y), its, x)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(place.name for place in self.places))

    def __len__(self) -> int:
        return len({place.name for place in self.places})

    def __or__(self, other: "Patch") -> "Patch":
        if not isinstance(other, Patch):
            return NotImplemented
        self.check_vocabulary(other.n_vocab)
        return Patch([*self.places, *other.places], self.n_vocab)

    def check_vocabulary(self, n_vocab: int) -> None:
        """Raise unless the entries are from a model with a vocabulary of this size."""
        if n_vocab != self.n_vocab:
            raise HandgradError(
                f"the other trace is of a model with a vocabulary of {self.n_vocab:,} tokens, this one has {n_vocab:,}:"
                " patch between traces of one model"
            )

    def predicted(self, trace: Mapping[str, Tensor]) -> float:
        """⟨Δ, a′ − a⟩, from the trace of the prompt without the patch: the change of its objective to first order."""
        self.check_vocabulary(vocabulary_of(trace))
        return sum(place.products(*with_signal(trace, place.name)).sum().item() for place in self.places)


def patch_from(
    other: Mapping[str, Tensor],
    name: str,
    *,
    position: int | Sequence[int] | None = None,
    head: int | None = None,
    column: int | None = None,
    align: Rows | None = None,
) -> Patch:
    """An edit that replaces entries of the activation `name` by those of another trace.

    position   The rows to replace, counted in the prompt that is patched; default: all that have a partner.
    head       Replace one head alone: of a_3, q, k, v or rho.
    column     Replace one feature alone: a neuron is a column of a_8.
    align      The row of the other trace for each row here, {row: row}; prompts of equal length need none.
    """
    values = activation_of(other, name)
    positions = None if position is None else (position,) if isinstance(position, int) else tuple(position)
    whole = Place(name, values, align, positions, 1 if head is None else heads_of(other, name), head, column)
    _, n_heads, width = whole.view(values).shape
    if head is not None:
        check_index("head", head, n_heads)
    if column is not None:
        check_index("column", column, width)
    return Patch([whole], vocabulary_of(other))


def align(tokens: Tensor, other: Tensor) -> dict[int, int]:
    """Which row of another prompt belongs to each row here: runs of equal tokens, and what is replaced between them, where
    rows are paired from the end. Rows without a partner are left out."""
    check_ids("tokens", tokens)
    check_ids("other", other)
    found: dict[int, int] = {}
    one, two = tokens.reshape(-1).tolist(), other.reshape(-1).tolist()
    for kind, first, end, its_first, its_end in SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
        if kind in ("equal", "replace"):
            paired = min(end - first, its_end - its_first)
            found |= {end - i: its_end - i for i in range(paired, 0, -1)}
    return found


def activation_of(trace: Mapping[str, Tensor], name: str) -> Tensor:
    """The activation of that name, or an error."""
    if not isinstance(trace, Mapping):
        raise HandgradError(f"other must be the hg.trace of another prompt, not {shown(trace)[:80]}")
    last = name.rpartition(".")[2]
    activations = [x for x in trace if _is_activation(x)]
    if name not in trace or not _is_activation(name) or trace[name].ndim not in (2, 3):
        near = get_close_matches(name, activations, 3) or activations[:3]
        only = " only a trace with edit={} has it;" if last.startswith("skip_") else ""
        raise HandgradError(
            f"the other trace has no activation {name!r} to patch with:{only} the closest are {', '.join(near)}"
        )
    return trace[name]


def _is_activation(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in INSIDE or (last.startswith("a_") and last != "a_0" and not last.startswith("a_bar"))


def heads_of(trace: Mapping[str, Tensor], name: str) -> int:
    """How many heads are side by side in a row of an activation."""
    here, _, last = name.rpartition(".")
    if last in ("q", "k", "v", "rho"):
        return len(trace[name])
    if last != "a_3" or f"{here}.rho" not in trace:
        raise HandgradError(f"{name} has no heads: a_3, q, k, v and rho of blocks with attention have them")
    return len(trace[f"{here}.rho"])


def with_signal(trace: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """An activation and its error signal."""
    here, dot, last = name.rpartition(".")
    delta = signal(name) if last.startswith("a_") else f"{here}{dot}delta_{last}"
    for wanted in (name, delta):
        if wanted not in trace:
            raise HandgradError(
                f"the trace has no {wanted}, which the prediction needs: make it with hg.trace(…, edit={{}})"
            )
    return trace[name], trace[delta]


def vocabulary_of(trace: Mapping[str, Tensor]) -> int:
    """The number of tokens that the traced model knows."""
    return trace["a_12"].shape[1]


def check_index(what: str, i: object, end: int) -> None:
    """Raise unless i is a number from 0 to end − 1."""
    if type(i) is not int or not 0 <= i < end:
        raise HandgradError(f"{what} must be a number from 0 to {end - 1}, not {shown(i)}")


def _only(i: int | None) -> slice:
    return slice(None) if i is None else slice(i, i + 1)
