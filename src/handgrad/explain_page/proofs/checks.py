"""The checks of one station: against autograd, against finite differences, and identities that hold for any numbers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...formatting import subscript
from ...model.steps import signal
from ...proof.checker import Checker
from ...proof.oracles import relative_error
from ...tolerances import ENTRY_FLOOR, TOLERANCE
from ..json_types.course import Check
from ..presentation.notation import symbol
from ..session import objectives
from ..session.session import Session, TracedSentence
from ..stations.table import Station

MAX_DIFFERENCE_PARAMETERS = 20_000_000  # finite differences hold several copies


def compare_with_reference(
    session: Session, checker: Checker, sentence: TracedSentence, station: Station
) -> list[Check]:
    """The checks of a station against autograd, against what rounding explains, and by identities."""
    checks: list[Check] = []

    def add(what: str, kind: str, error: float, limit: float) -> None:
        checks.append({"what": what, "kind": kind, "error": error, "limit": limit, "passed": bool(error <= limit)})

    if station.id == "a_0":
        text = session.tokenizer.decode(sentence.ids)
        add("decoding the tokens gives the sentence", "identity", float(text != sentence.text), 0.0)
        return checks
    if station.id == "loss":
        add("loss", "twin", checker.errors["loss"], checker.limit)
    else:
        for name in station.a:
            add(symbol(name), "twin", checker.errors[name], checker.limit)
    for name in dict.fromkeys([*station.incoming, *station.outgoing]):
        way = "incoming" if name in station.incoming else "outgoing"
        add(f"{symbol(name)}, {way}", "autograd", checker.errors[name], checker.limit)
    prefix = session.model.config.table.names["blocks"].rpartition(".")[0] + "."
    for name in _trained_names(station, checker):
        add(f"gradient of {name.removeprefix(prefix)}", "autograd", checker.errors[name], checker.limit)
    for name in station.incoming:
        limit, usual = checker.rounding_limits[name], TOLERANCE[session.model.dtype]
        why = "; limit: what rounding explains here" if limit > usual else ""
        add(f"{symbol(name)} as the model computed it{why}", "rounding", checker.rounding[name], limit)
    for what, error in _identities(session, checker, sentence, station):
        add(what, "identity", error, checker.limit)
    return checks


def compare_with_differences(session: Session, checker: Checker, station: Station) -> list[Check]:
    """The checks of a station against finite differences."""
    checks = []
    signals = list(dict.fromkeys([*station.outgoing, *station.incoming]))
    for name in signals[: 1 if session.large else None]:
        error = checker.difference(name)
        checks.append((f"{symbol(name)} along a random direction", error))
    names = [name for name in _trained_names(station, checker) if checker.can_differentiate(name)]
    if names and sum(checker.trained[name] for name in names) <= MAX_DIFFERENCE_PARAMETERS:
        checks.append(("all gradients here along a random direction", checker.difference_of(names)))
    limit = checker.difference_limit
    return [
        {"what": what, "kind": "differences", "error": error, "limit": limit, "passed": bool(error <= limit)}
        for what, error in checks
    ]


def _identities(
    session: Session, checker: Checker, sentence: TracedSentence, station: Station
) -> list[tuple[str, float]]:
    """Return the identities that hold for any numbers, with their errors in float64."""
    ours, config = checker.ours, session.model.config
    here = "" if station.block is None else f"blocks.{station.block}."
    centered = "mu_10" in ours  # the norms subtract the mean, so shifting a row of the stream changes nothing
    found = []
    after = objectives.rows_after(sentence)
    if station.incoming and config.causal and after < len(sentence.ids):
        last = max(_largest(ours[name][after:]) for name in station.incoming)
        found.append((objectives.about_rows_after(sentence), last))
    if station.stream and centered:
        (name,) = station.incoming
        found.append((f"each row of {symbol(name)} sums to 0", _largest_row_sum(ours[name])))
    if station.kind == "norm" and station.outgoing:
        found += _norm_identity(session, ours, station, centered)
    if station.id in ("a_12", "loss") and session.model.logit_map.cap is None:
        found.append(("each row of Δ₁₂ sums to 0", _largest_row_sum(ours["delta_12"])))
    if station.kind == "attention":
        found += _attention_identities(session, checker, station, here)
    if station.id in ("a_1", "a_12") and config.tied and checker.whole and _embedding(session) in checker.trained:
        found.append(("∂w_tok is the sum of the gradients of both uses (R9)", _tied_gradient_error(session, checker)))
    return found


def _norm_identity(
    session: Session, ours: Mapping[str, Tensor], station: Station, centered: bool
) -> list[tuple[str, float]]:
    """A norm that subtracts the mean ignores shifts of a row. One that does not ignores its scale, but for ε: the error
    signal it sends back has the product ε/rms³ (G ⊖ ā) with ā."""
    (name,) = station.outgoing
    if centered:
        return [(f"each row of {symbol(name)} sums to 0", _largest_row_sum(ours[name]))]
    network = session.network
    step = network.maker(station.a[0])
    assert step is not None
    number = step.norm()[0]
    beside, more = network.beside(step, step.inputs[0])
    if more:  # which also depends on the row's scale
        return []
    through_norm = ours[name] - sum(ours[x] for x in beside)  # without what the skip connection sends
    what = " − ".join(map(symbol, [name, *beside]))
    a_bar, rms = ours[f"{step.here}a_bar_{number}"], ours[f"{step.here}rms_{number}"]
    through = (ours[step.signals[0]] * ours[step.outputs[0]]).sum(1)  # G ⊖ ā, as there is no bias
    left = (through_norm * a_bar).sum(1) - session.model.config.eps / rms[:, 0] ** 3 * through
    size = ours[name].norm(dim=1) * a_bar.norm(dim=1)
    error = _largest(left) / max(_largest(size), 1e-300)
    return [(f"{what} has no part along ā{subscript(int(number))}, up to its share of ε", error)]


def _attention_identities(session: Session, checker: Checker, station: Station, here: str) -> list[tuple[str, float]]:
    assert station.block is not None
    ours, attn = checker.ours, session.model.blocks[station.block].attn
    causal, rho = ours[f"{here}delta_causal"], ours[f"{here}rho"]
    # a row that sees only one token is 0 up to the rounding of what ρ was multiplied with
    size = _largest(ours[station.incoming[0]]) * _largest(ours[f"{here}v"])
    if attn.sinks is None:
        found = [
            ("each row of Δ_causal sums to 0 (26)", _largest_row_sum(causal, ENTRY_FLOOR * size)),
            ("each row of ρ sums to 1 (14)", _largest(rho.sum(2) - 1)),
        ]
    else:  # the sink has the rest of ρ, and Δ_causal = −ρ_sink (Δ_3 ⊖ a_3)
        delta, a = (
            ours[x].view(rho.shape[1], len(rho), -1).transpose(0, 1) for x in (station.incoming[0], station.a[0])
        )
        of_sink = (1 - rho.sum(2)) * (delta * a).sum(2)
        floor = max(ENTRY_FLOOR * size, _largest(causal.abs().sum(2)), 1e-300)
        found = [("each row of Δ_causal sums to ρ_sink (Δ₃ ⊖ a₃)", _largest(causal.sum(2) - of_sink) / floor)]
        found += [
            (
                "∂b_sink is minus the sum of these over the tokens",
                relative_error(checker.gradient(p.name), -of_sink.sum(1)),
            )
            for p in station.parameters
            if p.symbol == "b_sink" and p.name in checker.trained
        ]
    if attn.scores.causal:
        found.append(("ρ is 0 above the diagonal", _largest(rho.triu(1))))
    if attn.scores.window is not None:
        width = attn.scores.window
        found.append((f"ρ is 0 more than {width - 1} tokens back", _largest(rho.tril(-width))))
    for keys in station.parameters:
        if keys.symbol == "b_k" and keys.name in checker.trained and not attn.rotated and not attn.normed:
            found.append(("∂b_k is 0 (29)", _largest(keys.view(checker.gradient(keys.name)))))
    return found


def _embedding(session: Session) -> str:
    """The name of the token table in the model; "" if it is packed."""
    return next((p.name for p in session.by_id["a_1"].parameters if p.symbol == "w_tok"), "")


def _tied_gradient_error(session: Session, checker: Checker) -> float:
    """Relative error of ∂w_tok = ohe(a_0)ᵗ Δ_1 + Δ_12ᵗ a_11. A trained table implies a head without an adapter."""
    ours, grad = checker.ours, checker.gradient(_embedding(session))
    picked = torch.zeros_like(grad)
    picked.index_add_(0, ours["a_0"], session.model.embed.scale * ours[signal(session.network.start)])
    picked.addmm_(ours["delta_12"].t(), ours["a_11"])
    return relative_error(grad, picked)


def _trained_names(station: Station, checker: Checker) -> list[str]:
    return [name for name in dict.fromkeys(p.name for p in station.parameters) if name in checker.trained]


def _largest_row_sum(x: Tensor, least: float = 0.0) -> float:
    """Return the largest |row sum|, relative to the largest sum of |entries| of a row or to `least`."""
    return (x.sum(-1).abs().max() / x.abs().sum(-1).max().clamp(min=max(least, 1e-300))).item()


def _largest(x: Tensor) -> float:
    return x.abs().max().item()
