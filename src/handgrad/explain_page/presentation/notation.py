"""How the page writes the names of a trace (a_5 → a₅, blocks.0.delta_gate → Δ_gate, a_gate → gate), and numbers inside
sentences: marked with their exact value, so that assets/format.js writes every number."""

from collections.abc import Iterable

from ...formatting import subscript


def symbol(name: str) -> str:
    """The symbol of a tensor of the trace. Outputs that have a word instead of a number are called by that word."""
    last = name.rpartition(".")[2]
    kind, _, index = last.partition("_")
    if kind not in ("a", "delta"):
        return last
    number, _, word = index.partition("_")
    if not number.isdigit():
        return index if kind == "a" else f"Δ_{index}"
    return ("Δ" if kind == "delta" else kind) + subscript(int(number)) + (f"_{word}" if word else "")


def symbols(names: Iterable[str]) -> str:
    """The symbols of several tensors: gate, up"""
    return ", ".join(map(symbol, names))


def typeset(x: float) -> str:
    """⟦0.0123456⟧: the page writes 0.0123"""
    return f"⟦{float(x)!r}⟧"


def percent(fraction: float) -> str:
    """⟦0.4512%⟧: the page writes 45 %"""
    return f"⟦{float(fraction)!r}%⟧"
