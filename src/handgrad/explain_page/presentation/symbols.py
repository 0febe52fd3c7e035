"""Every symbol of the formulas, in one table, by which the page explains what is pointed at; docs/layers shows it.

    python -m handgrad.explain_page.presentation.symbols      writes the table into docs/layers/README.md

A key is a symbol as assets/symbols.js reads it from a formula or a text: Δ_# is Δ with any subscript that has no line of its
own, ^t a superscript, ~ a sign above.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

from ..json_types.model import SymbolEntry

PROLOGUE = "explain.md#the-prologue"
BEGIN, END = "<!-- begin: the symbols of the explain page -->\n", "<!-- end: the symbols of the explain page -->"


class Symbol(NamedTuple):
    keys: str  # separated by spaces
    latex: str
    shown: str  # as plain text
    name: str
    meaning: str
    shape: str
    introduced: str  # the prologue, or a page of docs/layers


TOKENS, FEATURES, NUMBER = "one row per token", "one number per feature", "a number"

SYMBOLS = (
    # ── sizes ──
    Symbol("n_T", "n_T", "n_T", "tokens", "the number of tokens of the sequence", NUMBER, "README"),
    Symbol("d", "d", "d", "width", "the features of the residual stream", NUMBER, "README"),
    Symbol("n_h", "n_h", "n_h", "heads", "the number of heads", NUMBER, "attention"),
    Symbol("n_kv", r"n_{kv}", "n_kv", "shared heads", "the number of key and value heads, if there are fewer than n_h",
           NUMBER, "grouped_query"),
    Symbol("d_h", "d_h", "d_h", "width of a value", "per head", NUMBER, "attention"),
    Symbol("d_ρ", r"d_\rho", "d_ρ", "width of a query", "and of a key, per head", NUMBER, "attention"),
    Symbol("n_vocab n_context", r"n_{\mathrm{vocab}}, n_{\mathrm{context}}", "n_vocab, n_context",
           "vocabulary, context", "the number of tokens that the model knows, and the longest sequence it reads",
           NUMBER, "embedding"),
    Symbol("r", "r", "r", "rank, or group size",
           "of an adapter; in attention with shared keys, the query heads per key head", NUMBER, "lora"),
    # ── activations, errors, gradients ──
    Symbol("a_# a", "a_{i-1}, a_i", "a", "activation", "the input and the output of layer i",
           f"{TOKENS}, one column per feature", "prologue"),
    Symbol("Δ_# Δ δ δ_#", r"\Delta_i, \delta", "Δ, δ", "error signal",
           "∂L/∂a: by how much L changes if an entry of a is raised; δ that of a query, key or value", "that of a",
           "prologue"),
    Symbol("Δ_causal", r"\Delta_{\mathrm{causal}}", "Δ_causal", "error of the scores", "after scaling and mask",
           "tokens × tokens, per head", "attention"),
    Symbol("Δ_raw", r"\Delta_{\mathrm{raw}}", "Δ_raw", "error of q kᵗ", "before scaling and mask",
           "tokens × tokens, per head", "attention"),
    Symbol("∂", r"\partial w", "∂w", "gradient", "short for ∂L/∂w: by how much L changes if a parameter is raised",
           "that of w", "prologue"),
    Symbol("w_# w", "w_i", "w", "weight", "a matrix that a layer learns; of a norm, a vector of gains",
           "inputs × outputs", "prologue"),
    Symbol("b_# b", "b_i", "b", "bias", "a vector that a layer learns and adds to every token", FEATURES, "prologue"),
    Symbol("L", "L", "L", "loss", "what is explained: one number, which training lowers", NUMBER, "prologue"),
    Symbol("y_pred y", r"y_{\mathrm{pred}}", "y_pred, y", "probabilities",
           "the softmax of the logits; y alone, in a formula of the loss, the logits as the softmax reads them",
           "tokens × vocabulary", "prologue"),
    Symbol("y_gt", r"y_{\mathrm{gt}}", "y_gt", "the truth", "one-hot rows of the tokens that follow",
           "tokens × vocabulary", "prologue"),
    Symbol("y_e y_shared y_#", "y_e", "y_e", "output of an expert",
           "what expert e computes for a token; shared: what all tokens share", TOKENS, "experts"),
    # ── operations ──
    Symbol("^t ᵗ", "A^t", "Aᵗ", "transpose", "rows and columns exchanged", "columns × rows", "prologue"),
    Symbol("·", r"A \cdot B", "A · B", "Frobenius product", "the sum of all products of entries in the same place",
           NUMBER, "README"),
    Symbol("∘", r"A \circ B", "A ∘ B", "elementwise product", "entry by entry", "that of A", "prologue"),
    Symbol("⊖", r"A \ominus B", "A ⊖ B", "row-wise dot product", "each row of A times the same row of B, added up",
           "one number per token", "prologue"),
    Symbol("∑ Σ Σ_tok", r"\sum_{\mathrm{tok}} A", "Σ, Σ_tok", "sum", "over what stands below it; tok: over the rows",
           "tok: one number per feature", "prologue"),
    Symbol("~", r"\widetilde b", "b̃, (…)~", "broadcast, a tilde",
           "a vector of features is repeated on every row, a number per token across its row",
           "that of what it is added to", "prologue"),
    Symbol("ā ā_# x̄ x̄_#", r"\bar a", "ā", "normalized, a bar",
           "input of a norm with mean 0 and standard deviation 1, or root mean square 1", "that of a", "layernorm"),
    Symbol("k̂ q̂ k̂_# q̂_#", r"\hat q, \hat k", "q̂, k̂", "before the rotation", "queries and keys after their norm",
           "tokens × d_ρ, per head", "rotary"),
    Symbol("ohe", r"\mathrm{ohe}(\cdot)", "ohe", "one-hot",
           "a row per token: 1 in the column of the token, 0 elsewhere", "tokens × vocabulary", "prologue"),
    Symbol("softmax", r"\mathrm{softmax}", "softmax", "softmax",
           "e to the power of each entry, divided by the sum over its row", "unchanged", "prologue"),
    Symbol("log", r"\log", "log", "natural logarithm", "entry by entry", "unchanged", "prologue"),
    Symbol("e", "e", "e", "2.718…", "e with an exponent is the exponential function", NUMBER, "prologue"),
    Symbol("diag", r"\mathrm{diag}(w)", "diag", "diagonal matrix",
           "with the numbers of w; A diag(w) multiplies every column by its number", "d × d", "layernorm"),
    Symbol("mean", r"\mathrm{mean}", "mean", "mean of each row", "over the features", "one number per token",
           "layernorm"),
    Symbol("⟨ ⟩", r"\langle x, y \rangle", "⟨x, y⟩", "inner product", "the sum of products", NUMBER, "experts"),
    # ── norms, activations ──
    Symbol("μ_#", r"\mu_i", "μ", "mean", "of the features of a token", "one number per token", "layernorm"),
    Symbol("σ_#", r"\sigma_i", "σ with an index", "standard deviation", "of the features of a token",
           "one number per token", "layernorm"),
    Symbol("rms rms_#", r"\mathrm{rms}", "rms", "root mean square", "of the features of a token",
           "one number per token", "rmsnorm"),
    Symbol("ε", r"\varepsilon", "ε", "epsilon", "a small number, so that nothing is divided by 0", NUMBER,
           "layernorm"),
    Symbol("G G_#", "G", "G", "error times gain", "Δ at the output of a norm, times its gain", "that of Δ",
           "layernorm"),
    Symbol("g g_#", "g, g'", "g, g′", "activation function",
           "entry by entry, and its slope g′; g_e: the gate of an expert; g = ⌊h/r⌋: the number of a shared head",
           "unchanged", "activation"),
    Symbol("^′", "x'", "′", "prime", "g′ is the slope of g; s′ a capped score", "unchanged", "activation"),
    Symbol("σ", r"\sigma(x)", "σ(x)", "sigmoid", "1/(1 + e⁻ˣ), between 0 and 1", "unchanged", "gated"),
    Symbol("tanh", r"\tanh", "tanh", "hyperbolic tangent", "between −1 and 1: caps what goes into it", "unchanged",
           "scores"),
    Symbol("max", r"\max", "max", "the larger", "of the two", "unchanged", "activation"),
    Symbol("gate a_gate", r"\mathrm{gate}", "gate", "gate", "hidden values that decide how much of up passes",
           "tokens × hidden", "gated"),
    Symbol("up a_up", r"\mathrm{up}", "up", "up", "hidden values that the gate multiplies", "tokens × hidden",
           "gated"),
    Symbol("x x_#", "x", "x", "what a function is applied to",
           "x_q, x_k: queries and keys as projected; in a short convolution, the part that is mixed", "as it is used",
           "rotary"),
    Symbol("z z_# c", "z, c", "z, c", "inside an adapter or a convolution",
           "z: before a magnitude, or what a convolution mixes; c: column norms, what it has mixed, or a cap",
           "as it is used", "lora"),
    Symbol("B B_# C C_#", "B, C", "B, C", "gates of a convolution", "what enters it, and what leaves it", TOKENS,
           "short_conv"),
    Symbol("conv conv_#", r"\mathrm{conv}", "conv", "convolution", "what the short convolution has mixed", TOKENS,
           "short_conv"),
    # ── attention ──
    Symbol("q q_#", "q", "q", "queries", "what a token looks for", "tokens × d_ρ, per head", "attention"),
    Symbol("k k_#", "k", "k", "keys", "what a token is found by", "tokens × d_ρ, per head", "attention"),
    Symbol("v v_#", "v", "v", "values", "what a token gives", "tokens × d_h, per head", "attention"),
    Symbol("ρ ρ_#", r"\rho", "ρ", "attention weights", "how much each token (row) takes from each other (column)",
           "tokens × tokens, per head", "attention"),
    Symbol("mask", r"\mathrm{mask}", "mask", "causal mask", "−∞ for later tokens, so that their weight is 0",
           "tokens × tokens", "attention"),
    Symbol("h ^h", "h", "h", "head", "its number; a superscript h marks what belongs to one head", NUMBER,
           "attention"),
    Symbol("^g", "x^g", "g above", "group", "what belongs to a head of keys and values that several query heads share",
           NUMBER, "grouped_query"),
    Symbol("s s_#", "s", "s", "score, or scale",
           "in attention and in a router, scores before the softmax; elsewhere the factor of an adapter",
           "as it is used", "scores"),
    Symbol("sink", r"\mathrm{sink}", "sink", "sink", "a learned score without a value: attention to nothing",
           "one number per head", "scores"),
    Symbol("R", "R(t)", "R(t)", "rotation", "of pairs of features by the angles of position t", "d_ρ × d_ρ", "rotary"),
    Symbol("θ_#", r"\theta_i", "θ", "frequency", "the angle per position of pair i", NUMBER, "rotary"),
    Symbol("f_#", "f_i", "f", "scaling of a frequency", "for a longer context", NUMBER, "rotary"),
    Symbol("⌊ ⌋", r"\lfloor x \rfloor", "⌊x⌋", "rounded down", "to a whole number", NUMBER, "grouped_query"),
    Symbol("t β i j", r"t, \beta, i, j", "t, β, i, j", "indices", "t and β count positions, i and j features or taps",
           NUMBER, "README"),
    Symbol("target", r"\mathrm{target}(t)", "target", "the token that follows", "the one after position t", NUMBER,
           "loss"),
    Symbol("n", "n", "n", "targets", "the number of tokens that are predicted", NUMBER, "loss"),
    Symbol("u", "u, v", "u", "a token", "with v: the two tokens whose logits are compared", NUMBER, "loss"),
    # ── adapters, experts ──
    Symbol("d_# u_#", "d_i, u_i", "d and u with an index", "adapter", "the two narrow matrices beside a frozen weight",
           "inputs × r, r × outputs", "lora"),
    Symbol("m_# m", "m_i", "m", "magnitude", "one factor per output of an adapter", "one number per output", "lora"),
    Symbol("τ", r"\tau", "τ", "scale of the gates", "a factor on what a router gives", NUMBER, "experts"),
    Symbol("ĝ", r"\hat g", "ĝ", "gates, divided by τ", "before their factor", "tokens × chosen experts", "experts"),
    Symbol("scores experts shared", r"\mathrm{scores}, \mathrm{experts}, \mathrm{shared}", "scores, experts, shared",
           "inside a mixture",
           "what the router gives every expert, what the chosen experts compute, and the expert that all tokens share",
           TOKENS, "experts"),
    Symbol("p p_#", "p", "p", "probabilities of experts", "the softmax of a router's scores", "tokens × experts",
           "experts"),
    Symbol("‖", r"\lVert x \rVert", "‖x‖", "length", "the square root of the sum of squares", NUMBER, "per_example"),
    Symbol("η", r"\eta", "η", "learning rate", "a step is −η times the gradient", NUMBER, "prologue"),
)  # fmt: skip


def entries() -> list[SymbolEntry]:
    """The table for the page."""
    return [
        {
            "keys": s.keys.split(), "shown": s.shown, "name": s.name, "meaning": s.meaning, "shape": s.shape,
            "introduced": "Prologue" if s.introduced == "prologue" else f"docs/layers/{s.introduced}.md",
        }
        for s in SYMBOLS
    ]  # fmt: skip


def markdown() -> str:
    """The table for docs/layers/README.md."""
    lines = ["| symbol | name | meaning | shape | introduced in |", "|---|---|---|---|---|"]
    for s in SYMBOLS:
        where = {"prologue": f"[prologue](../{PROLOGUE})", "README": "this page"}
        page = where.get(s.introduced, f"[{s.introduced.replace('_', ' ')}]({s.introduced}.md)")
        lines.append(f"| ${s.latex}$ | {s.name} | {s.meaning} | {s.shape} | {page} |")
    return "\n".join(lines) + "\n"


def placed(text: str) -> str:
    """A page with the table between its marks."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"expected {BEGIN.strip()} … {END}")
    return re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + "\n" + markdown() + "\n" + END, text, flags=re.S
    )


if __name__ == "__main__":
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/layers/README.md")
    page.write_text(placed(page.read_text()))
