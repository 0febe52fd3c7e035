"""The sentence under each picture: what to notice in the data at hand, computed from that data."""

import unicodedata
from collections.abc import Callable, Sequence

from torch import Tensor

from .marks import percent, typeset

NAMED = {" ": "␣", "\n": "⏎", "\t": "⇥", "\x7f": "␡"}
UNSEEN = ("Cc", "Cf", "Co", "Cs", "Zs", "Zl", "Zp")  # controls, private use, half a character, spaces


def visible(token: str) -> str:
    """Return a token with its spaces and unseen characters visible, as assets/format.js writes it."""

    def written(c: str) -> str:
        if ord(c) < 32 and c not in NAMED:
            return chr(0x2400 + ord(c))
        return NAMED.get(c) or (f"⟨{ord(c):x}⟩" if unicodedata.category(c) in UNSEEN else c)

    return "".join(map(written, token))


def quote(token: str) -> str:
    """‘token’"""
    return f"‘{visible(token)}’"


def _at(labels: Sequence[str], t: int) -> str:
    return f"{quote(labels[t])} (position {t + 1})"


def about_activations(x: Tensor, labels: Sequence[str]) -> str:
    t = int(x.norm(dim=1).argmax())
    feature = int(x.abs().max(0).values.argmax())
    value = x[:, feature][x[:, feature].abs().argmax()].item()
    return (
        f"The longest row is {_at(labels, t)}, with length {typeset(x[t].norm().item())}. The largest single value is in"
        f" feature {feature}: {typeset(value)}."
    )


def about_scores(x: Tensor, labels: Sequence[str], token_text: Callable[[int], str]) -> str:
    """Describe logits or probabilities, which have one column for each token of the vocabulary."""
    t, column = divmod(int(x.argmax()), x.shape[1])
    return (
        f"The highest score is {typeset(x[t, column].item())}, for {quote(token_text(column))} after {_at(labels, t)}."
        " A column that is bright in every row is a token that the model expects everywhere."
    )


def about_error(x: Tensor, labels: Sequence[str]) -> str:
    norms = x.norm(dim=1)
    total = x.norm().item()
    if total == 0:
        return "No error arrives here."
    t = int(norms.argmax())
    share = norms[t].item() ** 2 / total**2
    unreached = [labels[i] for i in range(len(labels)) if norms[i] == 0]
    none = f" No error reaches {', '.join(quote(w) for w in unreached[-3:])}: no target depends on it here."
    text = f"The largest error arrives at {_at(labels, t)}: {percent(share)} of all squared error here."
    return text + (none if unreached else "")


def about_gradients(norms: dict[str, float], sizes: dict[str, float]) -> str:
    if not norms:
        return "No parameter is trained here."
    largest = max(norms, key=lambda name: norms[name])
    text = f"The largest gradient here is ∂{largest}, with length {typeset(norms[largest])}"
    if sizes.get(largest):
        text += f", {typeset(norms[largest] / sizes[largest])} times the length of {largest} itself"
    zero = [name for name, norm in norms.items() if norm == 0]
    text += f". Exactly 0: {', '.join(f'∂{name}' for name in zero)}." if zero else "."
    waiting = [n for n in zero if n.startswith("d_") and not sizes.get(f"u_{n[2:]}")]
    if waiting:
        why = f"u{waiting[0][1:]} starts at 0, so d{waiting[0][1:]} does not reach the output yet"
        text += f" ∂{waiting[0]} is 0 because {why}."
    return text


def about_attention(rho: Tensor, sent: Tensor, labels: Sequence[str]) -> str:
    n = len(labels)
    others = rho.clone()
    others.fill_diagonal_(0)
    if n > 1:
        others[:, 0] = 0  # heads that find no match attend to the first token
    t, s = divmod(int(others.argmax()), n)
    text = "Each token can attend only to the first token and to itself."
    if others[t, s] > 0:
        text = (
            "The strongest attention, apart from the first token and the token itself:"
            f" {_at(labels, t)} takes {percent(rho[t, s].item())} from {_at(labels, s)}."
        )
    between = sent.clone()
    between.fill_diagonal_(0)
    if between.max() > 0:
        t, s = divmod(int(between.argmax()), n)
        text += (
            f" The largest error between two tokens goes from {_at(labels, t)} back to {_at(labels, s)}:"
            f" length {typeset(between[t, s].item())}."
        )
    first = rho[1:, 0].mean().item() if n > 1 else 0.0
    return text + (f" On average, {percent(first)} of the attention goes to the first token." if first > 0.3 else "")


def about_sent(rotated: bool, normed: bool) -> str:
    """What the map of errors between tokens shows: the length of a sum of two products."""
    steps = [*(["rotated back"] if rotated else []), *(["passed back through the norm of the key"] if normed else [])]
    text = (
        "From each token (row) to each other token (column), through values and keys: length of ρ Δ wᵥᵗ + Δ_raw q wₖᵗ"
    )
    return f"{text}, with q {' and '.join(steps)} before wₖᵗ." if steps else f"{text}."


def about_branches(value: float, query: float, key: float) -> str:
    lengths = {"values": value, "queries": query, "keys": key}
    largest = max(lengths, key=lambda name: lengths[name])
    rest = " and ".join(f"{typeset(x)} through the {name}" for name, x in lengths.items() if name != largest)
    return f"The largest part of this head's error flows through the {largest}: {typeset(lengths[largest])}, against {rest}."


def about_loss(labels: Sequence[str], targets: Sequence[str], probabilities: Sequence[float]) -> str:
    worst = min(range(len(probabilities)), key=lambda t: probabilities[t])
    best = max(range(len(probabilities)), key=lambda t: probabilities[t])
    return (
        f"The biggest surprise is {quote(targets[worst])} after {_at(labels, worst)}: its probability was only"
        f" {typeset(probabilities[worst])}. The best prediction is {quote(targets[best])} after {_at(labels, best)}, with"
        f" probability {typeset(probabilities[best])}."
    )


def about_push(label: str, target: str, probability: float, rival: str, rival_probability: float) -> str:
    missing = typeset(1 - probability)
    push = f"{quote(target)} had probability {typeset(probability)}, so it is pulled up by the missing {missing}"
    if rival == target:
        return f"After {quote(label)}: {push}. It was already the first choice."
    return f"After {quote(label)}: {push}. Pushed down most is {quote(rival)}, which had {typeset(rival_probability)}."


def about_flow(shares: Tensor, lengths: Tensor, labels: Sequence[str]) -> str:
    """Describe error signals (depth, tokens): their share of each row's squares, and their lengths."""
    by_token = shares.mean(0)
    t = int(by_token.argmax())
    low, high = lengths[0].norm().item(), lengths[-1].norm().item()
    if not low or not high:
        return "No error flows."
    return (
        f"Averaged over the depth, the largest share of the error is at {_at(labels, t)}:"
        f" {percent(by_token[t].item())} of a row's squares. The error at the embedding is {typeset(low / high)} times as"
        " long as at the last norm: where activations are short, a small change matters more, so rows are compared with"
        " themselves; ‖a‖·‖Δ‖ does not depend on that scale."
    )


def about_groups(norms: dict[str, float]) -> str:
    nonzero = {name: norm for name, norm in norms.items() if norm > 0}
    if not nonzero:
        return "No parameter is trained."
    most, least = max(nonzero, key=lambda k: nonzero[k]), min(nonzero, key=lambda k: nonzero[k])
    return (
        f"The largest gradient is ∂{most} ({typeset(nonzero[most])}), the smallest nonzero one is ∂{least}"
        f" ({typeset(nonzero[least])})."
    )


def about_lens(label: str, first: str, probability: float, target: str | None, share: float) -> str:
    text = f"Read out here, the model would predict {quote(first)} after {quote(label)}, with {percent(probability)}"
    if target is None:
        return f"{text}. The last position has no target."
    return f"{text}. The target {quote(target)} has probability {typeset(share)}."


def about_swaps(labels: Sequence[str], t: int, other: str, change: float, measured: float) -> str:
    return (
        f"The best single replacement, to first order: {quote(other)} instead of {_at(labels, t)} would change the objective"
        f" by {typeset(change)}. Measured: {typeset(measured)}. A swap is too large a step for a gradient: it"
        " only says in which direction to look."
    )
