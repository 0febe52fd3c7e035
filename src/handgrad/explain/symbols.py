"""How the page writes the names of a trace: a_5 → a₅, blocks.0.delta_gate → Δ_gate, a_gate → gate."""

from collections.abc import Iterable

from ..formatting import subscript


def symbol(name: str) -> str:
    """The symbol of a tensor of the trace. Outputs that have a word instead of a number are called by that word."""
    last = name.rpartition(".")[2]
    kind, _, index = last.partition("_")
    if kind not in ("a", "delta"):
        return last
    if kind == "a" and not index.isdigit():
        return index
    return ("Δ" if kind == "delta" else kind) + (subscript(int(index)) if index.isdigit() else f"_{index}")


def symbols(names: Iterable[str]) -> str:
    """The symbols of several tensors: gate, up"""
    return ", ".join(map(symbol, names))
