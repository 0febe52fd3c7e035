"""The sentence under a picture: what to look for in the data at hand, computed, not canned."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor


def quote(word: str) -> str:
    """A token as it is named in a sentence, blanks and line ends visible."""
    return f"‘{word.replace(' ', '␣').replace(chr(10), '⏎').replace(chr(9), '⇥')}’"


def number(x: float) -> str:
    """Three significant digits."""
    if x == 0 or not math.isfinite(x):
        return "0" if x == 0 else str(x)
    if x < 0:
        return f"−{number(-x)}"
    if 1e-3 <= abs(x) < 1e5:
        return f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"
    mantissa, exponent = f"{x:.2e}".split("e")
    return f"{mantissa}·10{_power(int(exponent))}"


def _power(exponent: int) -> str:
    return "".join("⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".index(c)] for c in str(exponent))


def about_activations(x: Tensor, labels: Sequence[str]) -> str:
    t = int(x.norm(dim=1).argmax())
    feature = int(x.abs().max(0).values.argmax())
    value = x[:, feature][x[:, feature].abs().argmax()].item()
    return (
        f"The longest row is {quote(labels[t])} at place {t + 1} (length {number(x[t].norm().item())}); the feature that"
        f" stands out most is {feature}, which reaches {number(value)}."
    )


def about_scores(x: Tensor, labels: Sequence[str], word: Callable[[int], str]) -> str:
    """Of logits or probabilities, whose columns are words."""
    t, column = divmod(int(x.argmax()), x.shape[1])
    return (
        f"The highest score of all: after {quote(labels[t])} at place {t + 1}, {quote(word(column))} with"
        f" {number(x[t, column].item())}. A column that is bright all the way down is a word the model always reckons with."
    )


def about_error(x: Tensor, labels: Sequence[str]) -> str:
    norms = x.norm(dim=1)
    total = x.norm().item()
    if total == 0:
        return "No error arrives here."
    t = int(norms.argmax())
    share = norms[t].item() ** 2 / total**2
    silent = [labels[i] for i in range(len(labels)) if norms[i] == 0]
    rest = f" No error at all reaches {', '.join(quote(w) for w in silent[-3:])}: nothing with a target depends on it here."
    return (
        f"The largest error arrives at {quote(labels[t])}, place {t + 1}: {share:.0%} of all that arrives here, counted in"
        f" squares.{rest if silent else ''}"
    )


def about_gradients(norms: dict[str, float], sizes: dict[str, float]) -> str:
    if not norms:
        return "Nothing trains here."
    strongest = max(norms, key=lambda name: norms[name])
    text = f"The strongest gradient here is that of {strongest}, of length {number(norms[strongest])}"
    if sizes.get(strongest):
        text += f", {number(norms[strongest] / sizes[strongest])} times the length of {strongest} itself"
    none = [name for name, norm in norms.items() if norm == 0]
    return text + (f". Exactly 0: {', '.join(none)}." if none else ".")


def about_attention(rho: Tensor, sent: Tensor, labels: Sequence[str]) -> str:
    n = len(labels)
    others = rho.clone()
    others.fill_diagonal_(0)
    if n > 1:
        others[:, 0] = 0  # the first token is where a head looks when it looks for nothing
    t, s = divmod(int(others.argmax()), n)
    text = "A token here can look at the first place and at its own, and nowhere else."
    if others[t, s] > 0:
        text = (
            f"This head's firmest look, first place and own place aside: {quote(labels[t])} (place {t + 1}) takes"
            f" {rho[t, s].item():.0%} from {quote(labels[s])} (place {s + 1})."
        )
    away = sent.clone()
    away.fill_diagonal_(0)
    if away.max() > 0:
        t, s = divmod(int(away.argmax()), n)
        text += (
            f" The strongest error between two places goes from {quote(labels[t])} (place {t + 1}) back to"
            f" {quote(labels[s])} (place {s + 1}): length {number(away[t, s].item())}."
        )
    first = rho[1:, 0].mean().item() if n > 1 else 0.0
    return text + (f" On average {first:.0%} of the attention rests on the first token." if first > 0.3 else "")


def about_branches(value: float, query: float, key: float) -> str:
    names = {"values": value, "queries": query, "keys": key}
    strongest = max(names, key=lambda name: names[name])
    rest = " and ".join(f"{number(x)} through the {name}" for name, x in names.items() if name != strongest)
    return f"Most of this head's error comes back through the {strongest}: {number(names[strongest])}, against {rest}."


def about_loss(labels: Sequence[str], targets: Sequence[str], probabilities: Sequence[float]) -> str:
    worst = min(range(len(probabilities)), key=lambda t: probabilities[t])
    best = max(range(len(probabilities)), key=lambda t: probabilities[t])
    return (
        f"The greatest surprise is {quote(targets[worst])} after {quote(labels[worst])} at place {worst + 1}: it had"
        f" probability {number(probabilities[worst])}. The surest is {quote(targets[best])} after {quote(labels[best])} at"
        f" place {best + 1}, with {number(probabilities[best])}."
    )


def about_push(label: str, target: str, probability: float, rival: str, rival_probability: float) -> str:
    push = f"{quote(target)} had probability {number(probability)} and is pulled up by the missing {number(1 - probability)}"
    if rival == target:
        return f"After {quote(label)}: {push}; it was the first choice already."
    return f"After {quote(label)}: {push}; pushed down most is {quote(rival)}, which had {number(rival_probability)}."


def about_flow(norms: Tensor, names: Sequence[str], labels: Sequence[str]) -> str:
    by_token = norms.square().sum(0)
    t = int(by_token.argmax())
    row, column = divmod(int(norms.argmax()), norms.shape[1])
    low = norms[0].norm().item()
    high = norms[-1].norm().item()
    growth = (
        f"the error at the embedding is {number(low / high)} times as long as at the last norm" if high and low else ""
    )
    return (
        f"Blamed most, over all depths, is {quote(labels[t])} (place {t + 1}), with {by_token[t] / by_token.sum():.0%} of"
        f" the squares. The strongest cell is {names[row]} at {quote(labels[column])} (place {column + 1});"
        f" {growth or 'nothing flows'}."
    )


def about_groups(norms: dict[str, float]) -> str:
    live = {name: norm for name, norm in norms.items() if norm > 0}
    if not live:
        return "Nothing trains."
    most, least = max(live, key=lambda k: live[k]), min(live, key=lambda k: live[k])
    return (
        f"The longest gradient is that of {most} ({number(live[most])}), the shortest that is not 0 that of {least}"
        f" ({number(live[least])})."
    )


def about_lens(label: str, first: str, probability: float, target: str | None, share: float) -> str:
    text = f"Read out already here, after {quote(label)} the model would say {quote(first)} ({probability:.0%})"
    if target is None:
        return f"{text}; this last place has no target."
    return f"{text}; the target {quote(target)} has {number(share)}."


def about_swaps(label: str, other: str, change: float) -> str:
    return f"To first order, {quote(other)} in place of {quote(label)} would change the loss by {number(change)}."
