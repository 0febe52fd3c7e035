"""What known mistakes would have made of a mixture of experts: of the gates and the output, and of every error signal and
gradient inside.

    s = a_6 w_router,  g = gates of the chosen,  y = outputs of the experts,  a_9 = Σ g y + σ(a_6 v) a_shared

`compute` runs one block's mixture with choices that may be wrong, and autograd through it, from the a_6 and the Δ_9 that the
audited model has.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...model.block import Block
from ...model.layers.experts import Experts
from ...ops.routing import Routing
from ...proof.reference import weight_and_bias
from ...proof.reference_experts import choose, gated, mixed, mixture_of, outputs
from .balance import Balance
from .observe import of_experts

MAX_EXPERTS = 64  # of a mixture whose experts' parts are told apart


@dataclass(frozen=True)
class Mixing:
    """The choices of one block's mixture; a mistake is a change of them."""

    routing: Routing
    before: str = ""  # what the scores go through before the router's own function: "softmax" or "sigmoid"
    again: bool = False  # softmax of the gates of the chosen
    selected: bool = True  # the bias that chooses experts is used
    biased: bool = False  # and is part of the gates
    powers: int = 1  # how often outputs are multiplied by their gates
    gated_signals: bool = True  # the experts' error signals are multiplied by the gates
    detached: str = ""  # what gets no gradient: "gates", "sum" of the gates, "shared gate"
    corrected: bool = True  # the backward pass of softmax subtracts ⟨p, Δ⟩
    shared: str = "gated"  # or "alone", without its gate; "raw", without the gate's sigmoid; "" for left out
    without: tuple[int, ...] = ()  # experts that compute nothing
    exchanged: bool = False  # gate and up of the experts


class Made(NamedTuple):
    """Tensors by the names of activations, gates as (n, E), and gradients by our parameter names inside the mixture."""

    values: dict[str, Tensor]
    signals: dict[str, Tensor]
    grads: dict[str, Tensor]


def right_choices(mixture: Experts) -> Mixing:
    return Mixing(mixture.routing)


def known_mistakes(mixture: Experts, backward: bool) -> dict[str, Mixing]:
    """Mistakes of a mixture that are worth trying, in one of its passes, each named by a condition."""
    right = right_choices(mixture)
    r, n = right.routing, len(mixture.experts)
    routings: dict[str, Routing] = {}
    found: dict[str, Mixing] = {}
    if r.kind == "sigmoid":
        found["the sigmoid were applied twice"] = replace(right, before="sigmoid")
        found["softmax were applied before the sigmoid"] = replace(right, before="softmax")
        routings["the gates were a softmax, not sigmoids"] = r._replace(kind="softmax", groups=1, kept=1)
        found["the bias that chooses experts were left out"] = replace(right, selected=False)
        found["the bias that chooses experts were part of the gates"] = replace(right, biased=True)
        routings[f"the gates were not multiplied by {r.scale:g}"] = r._replace(scale=1.0)
        routings["the groups of experts were ignored"] = r._replace(groups=1, kept=1)
    else:
        found["softmax were applied twice"] = replace(right, before="softmax")
        found["softmax were applied to the gates of the chosen again"] = replace(right, again=True)
        routings["the gates were sigmoids, not a softmax"] = r._replace(kind="sigmoid", normalized=False)
        found["the softmax's backward pass lacked its correction term"] = replace(right, corrected=False)
    if r.kind == "softmax of chosen":
        routings["the gates were a softmax over all experts, not over the chosen"] = r._replace(
            kind="softmax", normalized=False
        )
    elif r.normalized:
        routings["the gates were not normalized"] = r._replace(normalized=False)
        found["the sum of the gates were detached"] = replace(right, detached="sum")
    else:
        routings["the gates were normalized, which this model does not do"] = r._replace(normalized=True)
    for k, how in ((r.k - 1, "one expert too few"), (r.k + 1, "one expert too many")):
        if 0 < k <= n // r.groups * r.kept:
            routings[f"a token went to {how}"] = r._replace(k=k)
    found["the outputs were multiplied by their gates twice"] = replace(right, powers=2)
    if backward:
        found["the experts' error signals were not multiplied by the gates"] = replace(right, gated_signals=False)
        found["the gates were detached"] = replace(right, detached="gates")
    else:
        found |= {name: replace(right, routing=x) for name, x in routings.items()}
        found["the gates were left out"] = replace(right, powers=0)
        found["gate and up of the experts were exchanged"] = replace(right, exchanged=True)
    if mixture.has("shared"):
        found["the shared expert were left out"] = replace(right, shared="")
    if mixture.has("shared_gate"):
        found["the gate of the shared expert were left out"] = replace(right, shared="alone")
        found["the gate of the shared expert had no sigmoid"] = replace(right, shared="raw")
        found["the gate of the shared expert were detached"] = replace(right, detached="shared gate")
    return found


def compute(
    block: Block, a_6: Tensor, choices: Mixing, delta_9: Tensor | None = None, balance: Balance | None = None
) -> Made:
    """The mixture of one block with these choices; with Δ_9, its error signals and gradients, those of the balance loss
    included."""
    mixture = block.mlp
    assert isinstance(mixture, Experts)
    params = dict(mixture.named_parameters())
    before = {p: p.requires_grad for p in params.values()}
    try:
        with torch.enable_grad():
            for p in params.values():
                p.requires_grad_(True)
            leaf = a_6.clone().requires_grad_()
            values, chosen, backward = _forward(mixture, leaf, choices, balance)
            shown = {name: x.detach() for name, x in values.items()}
            shown["a_gates"] = of_experts(chosen, len(mixture.experts), shown["a_gates"])
            if delta_9 is None:
                return Made(shown, {}, {})
            wanted = {"a_6": leaf, **{name: x for name, x in values.items() if name != "a_9"}}
            inputs = [*wanted.values(), *params.values()]
            grads = torch.autograd.grad((backward * delta_9).sum(), inputs, allow_unused=True)
    finally:
        for p, trained in before.items():
            p.requires_grad_(trained)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
    signals = dict(zip(wanted, found, strict=False))
    signals["a_gates"] = of_experts(chosen, len(mixture.experts), signals["a_gates"])
    return Made(shown, signals, dict(zip(params, found[len(wanted) :], strict=True)))


def _forward(
    mixture: Experts, a: Tensor, c: Mixing, balance: Balance | None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The values, the chosen experts, and a_9 as the backward pass sees it."""
    known = mixture_of(mixture)
    scores = _affine(mixture.router, a)
    values = {"a_scores": scores}
    s = scores if balance is None else balance.added(scores)
    if c.before:
        s = torch.sigmoid(s) if c.before == "sigmoid" else torch.softmax(s, 1)
    chosen = choose(s, known._replace(routing=c.routing, selection=known.selection if c.selected else None))
    gates = _gates(s, chosen, c, known.selection)
    values["a_gates"] = gates
    used = gates.detach() if c.detached == "gates" else gates

    def expert(e: int, rows: Tensor) -> Tensor:
        own = mixture.experts[e]
        gate, up = (_affine(layer, rows) for layer in own.projections()[:: -1 if c.exchanged else 1])
        y = _affine(own.contract, gated(mixture.g, gate, up))
        return y * 0 if e in c.without else y

    y = outputs(a, chosen, expert)
    more: list[Tensor] = []
    if mixture.has("shared") and c.shared:
        gate, up = (_affine(layer, a) for layer in mixture.shared.projections())
        more = [_affine(mixture.shared.contract, gated(mixture.g, gate, up))]
        values["a_shared"] = more[0]
        if mixture.has("shared_gate"):
            z = _affine(mixture.shared_gate, a)
            values["a_shared_gate"] = z
            z = z.detach() if c.detached == "shared gate" else z
            more = [more[0] * z] if c.shared == "raw" else more if c.shared == "alone" else [*more, z]
    values["a_9"] = backward = mixed(used**c.powers, y, *more)
    if not c.gated_signals:  # Δ_y is Δ_9, and Δ_g stays
        backward = mixed(used, y.detach(), *more) + mixed(torch.ones_like(used), y)
    return values, chosen, backward


def _gates(s: Tensor, chosen: Tensor, c: Mixing, selection: Tensor | None) -> Tensor:
    """(n, k)"""
    r = c.routing
    if r.kind == "sigmoid":
        p = torch.sigmoid(s) + (selection if c.biased and selection is not None else 0.0)
    else:
        norm = torch.logsumexp(s, 1, keepdim=True)
        p = torch.exp(s - (norm if c.corrected else norm.detach()))
    p = p.gather(1, chosen)
    if r.normalized or r.kind == "softmax of chosen":
        total = p.sum(1, keepdim=True)
        p = p / (total.detach() if c.detached == "sum" or not c.corrected else total)
    return torch.softmax(p, 1) if c.again else r.scale * p


@torch.no_grad()
def parts(block: Block, a_6: Tensor) -> dict[str, Tensor]:
    """The terms of a_9."""
    mixture = block.mlp
    assert isinstance(mixture, Experts)
    right = right_choices(mixture)
    whole = compute(block, a_6, right).values["a_9"]
    routed = compute(block, a_6, replace(right, shared="")).values["a_9"]
    found = {"the experts' part": routed}
    if mixture.has("shared"):
        found["the shared expert's part"] = whole - routed
    if len(mixture.experts) <= MAX_EXPERTS:
        for e in range(len(mixture.experts)):
            others = compute(block, a_6, replace(right, without=(e,))).values["a_9"]
            found[f"the part of expert {e}"] = whole - others
    return found


@torch.no_grad()
def signal_parts(block: Block, a_6: Tensor, delta_9: Tensor, balance: Balance | None) -> dict[str, dict[str, Tensor]]:
    """The terms of Δ_6 and of Δ_scores, by the names of the activations, and those of the router's gradients."""
    mixture = block.mlp
    assert isinstance(mixture, Experts)
    right = right_choices(mixture)
    whole = compute(block, a_6, right, delta_9, balance)
    plain = whole if balance is None else compute(block, a_6, right, delta_9)
    router = plain.signals["a_scores"] @ mixture.router.effective_weight().t()
    experts = compute(block, a_6, replace(right, shared="", detached="gates"), delta_9).signals["a_6"]
    found = {"a_6": {"the router's part": router, "the experts' part": experts}}
    if mixture.has("shared"):
        found["a_6"]["the shared expert's part"] = plain.signals["a_6"] - router - experts
    if balance is not None:
        for where in ("a_6", "a_scores"):
            found.setdefault(where, {})["the balance loss's part"] = whole.signals[where] - plain.signals[where]
        found["a_scores"]["the gates' part"] = plain.signals["a_scores"]
        for name, part in plain.grads.items():
            if (added := whole.grads[name] - part).any():
                found[name] = {"the balance loss's part": added, "the gates' part": part}
    return found


def _affine(layer: Any, a: Tensor) -> Tensor:
    w, b = weight_and_bias(layer)
    return a @ w if b is None else a @ w + b
