"""Formulas as the texts of exercises write them, in one line of characters, as LaTeX and so as MathML:

    Δ_{i−1} = aᵗ w_q + b~        x/2 (1 + tanh u)        σ: deviation of the row

A formula ends at three spaces, unless = follows, which is aligned with others. Words become upright text, `_x` a subscript,
raised characters exponents, `~` a tilde above, √(…) a root."""

import re

from ..stations.formulas import mathml

GAP = re.compile(r" {3,}(?!=)")
ALIGNED = re.compile(r" {2,}=")
TOKEN = re.compile(
    r"√\((?P<root>(?:[^()]|\([^()]*\))*)\)|√(?P<short>\w(?:_\w)?)"
    r"|(?P<words>[A-Za-z]{2,}(?: [A-Za-z]{2,}(?!_))*)"
    r"|(?P<base>[A-Za-zΑ-ωāΣ∂])(?P<sub>_\{[^}]*\}|_\w+)?(?P<tilde>~?)(?P<up>[ᵗ²³])?(?P<over>\^\([^)]*\))?"
    r"|(?P<close>[)\]])(?P<raised>[ᵗ²³])|(?P<operator> [=+−·∘/] )|(?P<other>.)"
)
WORDS = ("pred", "emb", "gate", "up")  # subscripts that are words, not indices
RAISED = {"ᵗ": r"\mathrm{t}", "²": "2", "³": "3"}
SIGNS = {"−": "-", "·": r"\cdot ", "∘": r"\circ ", "∞": r"\infty ", " ": r"\;"}
GREEK = {
    "Δ": r"\Delta", "δ": r"\delta", "ρ": r"\rho", "σ": r"\sigma", "μ": r"\mu", "θ": r"\theta", "ε": r"\varepsilon",
    "η": r"\eta", "π": r"\pi", "∂": r"\partial", "Σ": r"\sum", "ā": r"\bar{a}",
}  # fmt: skip


def formulas(block: str) -> list[list[str]]:
    """The MathML of an indented block: its lines, and the formulas of each."""
    return [[mathml(latex(part)) for part in split(line)] for line in block.splitlines()]


def split(line: str) -> list[str]:
    """The formulas of a line."""
    return GAP.split(ALIGNED.sub(" =", line.strip()))


def latex(formula: str) -> str:
    return "".join(map(_written, TOKEN.finditer(formula))).strip()


def _written(found: re.Match[str]) -> str:
    root = found["root"] or found["short"]
    if root:
        return rf"\sqrt{{{latex(root)}}}"
    if found["words"]:
        return rf"\text{{{found['words'].replace(' ', chr(160))}}}" if " " in found["words"] else _word(found["words"])
    if found["base"]:
        return _symbol(found)
    if found["close"]:
        return f"{found['close']}^{{{RAISED[found['raised']]}}}"
    sign = (found["operator"] or "").strip() or found["other"]
    return SIGNS.get(sign, sign)


def _word(word: str) -> str:
    return rf"\mathrm{{{word}}}"


def _symbol(found: re.Match[str]) -> str:
    base = GREEK.get(found["base"], found["base"])
    if found["tilde"]:
        base = rf"\tilde{{{base}}}"
    if found["sub"]:
        base += f"_{{{_index(found['sub'][1:].strip('{}'))}}}"
    exponent = RAISED[found["up"]] if found["up"] else latex(found["over"][2:-1]) if found["over"] else ""
    return base + (f"^{{{exponent}}}" if exponent else " ")


def _index(index: str) -> str:
    """gate is a word, 12 and i−1 one index; tj are two"""
    if index in WORDS:
        return _word(index)
    return " ".join(map(latex, index)) if index.isalpha() else latex(index)
