"""The paper's formulas, literally: 2-D matrices, one head at a time, its symbols and equation numbers.

L. Boué, "Deep learning for pedestrians: backpropagation in Transformers" (arXiv 2512.23329, CC BY 4.0).

Slow, readable and complete: it contains Tables 1, 2 and 3 formula by formula, and tests hold the fast `ops/` equal to
it. A number in brackets at the end of a line is the paper's equation number; R1 … R41 are the errata of docs/errata.md,
cited where a printed formula is corrected. Layers that the paper does not have, such as RMSNorm, have no numbers.
The ledger, the tests and `proof.reference` import it, module by module.

    n_T      tokens of the sequence (rows)              d        features of the stream (columns)
    n_h      heads                                      d_h      width of a value, per head
    d_ρ      width of a query and of a key, per head    n_vocab  vocabulary
    n_context  longest sequence                         r        rank of a low-rank adapter

Δ_i = ∂L_seq/∂a_i has the shape of a_i. L_seq is the SUM of the losses of the rows that have a target (R5).
This package imports only torch, and knows nothing else of handgrad.
"""
