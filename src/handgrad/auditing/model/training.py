"""The checks of what trains: experts, what the optimizer has, and what the norm of all gradients counts."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from ...formatting import plural
from ..diagnosis import diagnose
from ..hypotheses import ranges
from .observe import Loss, Norm, Observed
from .points import expert_layers
from .subject import Subject


class Loop(NamedTuple):
    """What the user's training loop has besides the model."""

    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    norm: Norm | None = None


ROUNDINGS = 4  # of the dtype, in the norm of all gradients; they are added in float32


def experts_alike(subject: Subject) -> tuple[bool | None, str]:
    """Whether the experts of each mixture train, or are frozen, together."""
    own = expert_layers(subject.ours)
    groups: dict[int, dict[bool, list[str]]] = {}
    for t in subject.tracked:
        path = t.ours.rpartition(".")[0].removesuffix(".base")
        if path in own and not t.adapter:
            groups.setdefault(own[path][0], {True: [], False: []})[t.parameter.requires_grad].append(t.name)
    for found in groups.values():
        if found[True] and found[False]:
            return False, f"{found[False][0]} is frozen ({len(found[False])} such), and {found[True][0]} trains"
    return (True, plural(len(groups), "mixture")) if groups else (None, "the model has no experts")


def optimizer_complete(subject: Subject, optimizer: torch.optim.Optimizer) -> tuple[bool | None, str]:
    """Whether the optimizer has every parameter that trains."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = {t.held.name: t.parameter for t in subject.tracked if t.trains}
    missing = [name for name, p in trained.items() if id(p) not in held]
    if missing:
        return False, f"it lacks {missing[0]} ({len(missing)} of {len(trained)}), which stays as it is"
    return True, plural(len(trained), "tensor")


def norm_complete(subject: Subject, seen: Observed, computed: float) -> tuple[bool | None, str]:
    """Whether a norm is that of all gradients; a diagnosis by what it may have left out."""
    own = expert_layers(subject.ours)
    squares: dict[str, float] = {}
    experts: dict[int, float] = {}
    for t in subject.tracked:
        grad = seen.grads[t.name]
        if grad is None or t.ours in squares:
            continue
        squares[t.ours] = grad.double().square().sum().item()
        path = t.ours.rpartition(".")[0].removesuffix(".base")
        if path in own:
            experts[own[path][1]] = experts.get(own[path][1], 0.0) + squares[t.ours]
    total = sum(squares.values())
    count = sum(grad.numel() for grad in seen.grads.values() if grad is not None)
    rounding = ROUNDINGS * torch.finfo(seen.dtype).eps + count**0.5 * torch.finfo(torch.float32).eps
    bound = rounding * total**0.5
    mistakes = {name: max(0.0, total - left_out) ** 0.5 for name, left_out in _left_out(subject, squares, experts)}
    mistakes["it were the sum of the tensors' norms"] = sum(x**0.5 for x in squares.values())
    mistakes["it were the square"] = total
    number = partial(torch.tensor, dtype=torch.float64)
    guesses = {name: number(x) for name, x in mistakes.items()}
    found = diagnose(number(computed), number(total**0.5), bound, mistakes=guesses)
    return found.right, plural(len(squares), "tensor") if found.right else f"the norm {found.sentence}"


def _left_out(subject: Subject, squares: dict[str, float], experts: dict[int, float]) -> Iterator[tuple[str, float]]:
    """The squares that a norm may lack."""
    names = subject.config.table.names
    if experts:
        yield "the experts were left out", sum(experts.values())
        n = subject.config.n_experts or 0
        for each in (size for size in range(1, n) if n % size == 0):  # experts of one process under expert parallelism
            for first in range(0, n, each):
                mine = range(first, first + each)
                others = sum(x for e, x in experts.items() if e not in mine)
                yield f"only the experts {ranges([*mine])} of {n} were counted", others
        router = f".{names['mlp']}.{names['mlp.router']}."
        yield "the routers were left out", sum(x for name, x in squares.items() if router in name)
    for part, what in {"embed": "the embeddings", "head": "the head", "final_norm": "the final norm"}.items():
        yield f"{what} were left out", sum(x for name, x in squares.items() if name.startswith(f"{names[part]}."))
