"""The sentence under each picture: what to notice in the data at hand, computed from that data."""

import unicodedata
from collections.abc import Callable, Sequence

from torch import Tensor

from ..json_types.common import Position
from .chances import chance
from .notation import percent, typeset

NAMED = {" ": "␣", "\n": "⏎", "\t": "⇥", "\x7f": "␡"}
ALONE = {" ": "a space", "\n": "a line break", "\t": "a tab"}
UNSEEN = ("Cc", "Cf", "Co", "Cs", "Zs", "Zl", "Zp")  # controls, private use, half a character, spaces


def visible(token: str) -> str:
    """Return a token with its spaces and unseen characters visible, as assets/format.js writes it."""

    def written(c: str) -> str:
        if ord(c) < 32 and c not in NAMED:
            return chr(0x2400 + ord(c))
        return NAMED.get(c) or (f"⟨{ord(c):x}⟩" if unicodedata.category(c) in UNSEEN else c)

    return "".join(map(written, token))


def quote(token: str) -> str:
    """A token in a sentence: ‘token’ without spaces around it; one that is a space, by its name."""
    word = token.strip(" ")
    return ALONE.get(token) or f"‘{' '.join(map(visible, word.split(' '))) if word else visible(token)}’"


def _at(labels: Sequence[str], t: int) -> str:
    return f"{quote(labels[t])} (position {t + 1})"


def about_activations(x: Tensor, labels: Sequence[str]) -> str:
    t = int(x.norm(dim=1).argmax())
    feature = int(x.abs().max(0).values.argmax())
    value = x[:, feature][x[:, feature].abs().argmax()].item()
    return (
        f"The longest row is {_at(labels, t)}, with length {typeset(x[t].norm().item())}. The value furthest from 0 is in"
        f" feature {feature}: {typeset(value)}."
    )


def about_scores(x: Tensor, labels: Sequence[str], token_text: Callable[[int], str], what: str) -> str:
    """Describe logits or probabilities, which have one column for each token of the vocabulary."""
    t, column = divmod(int(x.argmax()), x.shape[1])
    ties = int((x == x[t, column]).sum()) - 1
    return (
        f"The highest {what} is {typeset(x[t, column].item())}, for {quote(token_text(column))} after {_at(labels, t)}"
        f"{_shared(ties)}. A column that is high in every row is a token that the model expects everywhere."
    )


def _shared(ties: int, one: str = "entry", many: str = "entries") -> str:
    """That equal numbers have equal ranks."""
    return f" and {ties:,} other {one if ties == 1 else many}" if ties else ""


def about_error(x: Tensor, labels: Sequence[str], depends: Callable[[int], bool]) -> str:
    """Describe an error signal; `depends` says whether what is explained depends on a row here."""
    norms = x.double().norm(dim=1)
    total = norms.norm().item()
    if total == 0:
        return "No error arrives here."
    t = int(norms.argmax())
    share = norms[t].item() ** 2 / total**2
    ties = int((norms == norms[t]).sum()) - 1
    text = f"The largest error arrives at {_at(labels, t)}{_shared(ties, 'token', 'tokens')}:"
    text += f" {percent(share)} of all squared error here{', at each' if ties else ''}."
    zero = [i for i in range(len(labels)) if norms[i] == 0]
    outside, rounded = ([i for i in zero if depends(i) is reached] for reached in (False, True))
    if outside:
        them = "it" if len(outside) == 1 else "them"
        text += f" No error reaches {_listed(outside, labels)}: what is explained does not depend on {them} here."
    if rounded:
        text += f" It is 0, as computed, at {_listed(rounded, labels)}."
    return text


def _listed(rows: Sequence[int], labels: Sequence[str], most: int = 3) -> str:
    """These tokens if they are few; else how many, and the last of them."""
    if len(rows) <= most:
        return ", ".join(_at(labels, t) for t in rows)
    return f"{len(rows)} of the {len(labels)} tokens, the last of them {_at(labels, rows[-1])}"


def about_gradients(norms: dict[str, float], sizes: dict[str, float]) -> str:
    if not norms:
        return "No parameter is trained here."
    largest = max(norms, key=lambda name: norms[name])
    if not norms[largest]:
        return "Every gradient here is 0, as computed."
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
    text = "No attention goes to any token but the first and the token itself."
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
    if first > 0.3:
        text += (
            f" On average over the rows after the first, which can attend only to itself, {percent(first)} of the attention"
            " goes to the first token."
        )
    return text


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
    if not lengths[largest]:
        return "No error flows back through this head."
    rest = " and ".join(f"{typeset(x)} through the {name}" for name, x in lengths.items() if name != largest)
    return f"The largest part of this head's error flows through the {largest}: {typeset(lengths[largest])}, against {rest}."


def about_loss(labels: Sequence[str], targets: Sequence[str], losses: Sequence[float]) -> str:
    """Describe −log p of every target."""
    worst = max(range(len(losses)), key=lambda t: losses[t])
    best = min(range(len(losses)), key=lambda t: losses[t])

    def one(t: int) -> str:
        others = _shared(losses.count(losses[t]) - 1, "target", "targets")
        return f"{quote(targets[t])} after {_at(labels, t)}{others}, with {percent(chance(-losses[t]))}"

    if losses[worst] == losses[best] and len(losses) > 1:
        computed = "" if losses[best] else ", as computed"
        return f"All {len(losses)} targets were equally probable{computed}: {percent(chance(-losses[best]))}."
    if len(losses) == 1:
        return f"The only target is {one(0)}."
    return (
        f"The biggest surprise is {one(worst)}: −log p = {typeset(losses[worst])}. The best prediction is {one(best)}:"
        f" −log p = {typeset(losses[best])}."
    )


def about_push(row: Position, push: float, targets: int, mapped: bool = False) -> str:
    """Describe the push on the logits of a row, −Δ₁₂ at its target; the loss is a mean over that number of targets. Logits
    that are `mapped`, scaled or capped before the softmax, are pushed by another multiple of 1 − p."""
    target, p = row["target"], row["probability"]
    assert target is not None and p is not None
    by = f"{'1 − p' if targets == 1 else f'(1 − p)/{targets:,}'} = {typeset(push)}{'' if push else ', as computed'}"
    by = typeset(push) if mapped else by
    text = (
        f"After {quote(row['token'])}: {quote(target)} had probability p = {percent(p)}, so its logit"
        f" is pushed up by {by}"
    )
    if row["rank"] == 1:
        return f"{text}. It was already the first choice{_together(row['ties'])}."
    rival = row["top"][0]
    return f"{text}. Pushed down most is {quote(rival['word'])}, which had {percent(rival['p'])}."


def _together(ties: int) -> str:
    return f", together with {ties:,} equally probable {'one' if ties == 1 else 'ones'}" if ties else ""


def about_groups(norms: dict[str, float]) -> str:
    if not norms:
        return "No parameter is trained."
    nonzero = {name: norm for name, norm in norms.items() if norm > 0}
    if not nonzero:
        return "Every gradient is 0, as computed."
    most, least = max(nonzero, key=lambda k: nonzero[k]), min(nonzero, key=lambda k: nonzero[k])
    return (
        f"The largest gradient is ∂{most} ({typeset(nonzero[most])}), the smallest nonzero one is ∂{least}"
        f" ({typeset(nonzero[least])})."
    )


def about_lens(label: str, first: str, probability: float, target: str | None, share: float) -> str:
    text = f"Read out here, the model would predict {quote(first)} after {quote(label)}, with {percent(probability)}"
    if target is None:
        return f"{text}. The last position has no target."
    return f"{text}. The target {quote(target)} has {percent(share)}."


def about_swaps(labels: Sequence[str], t: int, other: str, change: float, measured: float) -> str:
    return (
        f"The best single replacement, to first order: {quote(other)} instead of {_at(labels, t)} would change the objective"
        f" by {typeset(change)}. Measured: {typeset(measured)}. For so large a step an estimate can be wrong,"
        " even in sign."
    )
