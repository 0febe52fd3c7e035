"""The paper, literally: 2-D matrices, one head at a time, its symbols, its equation numbers.

L. Boué, "Deep learning for pedestrians: backpropagation in Transformers" (arXiv 2512.23329, CC BY 4.0).

Slow, readable, complete: Tables 1, 2 and 3 stand here formula by formula, and everything fast in `ops/` is held
equal to it by tests. A number in brackets at the end of a line is the paper's equation number; R1 … R41 are the
errata of docs/errata.md, named where a printed formula had to be corrected.

    n_T      tokens of the sequence (rows)              d        features of the stream (columns)
    n_h      heads                                      d_h      width of a value, per head
    d_ρ      width of a query and of a key, per head    n_vocab  vocabulary
    n_context  longest sequence                         r        rank of a low-rank adapter

Δ_i = ∂L_seq/∂a_i has the shape of a_i. L_seq is the SUM of the losses of the rows that have a target (R5).
This package imports torch and nothing else of handgrad.
"""
