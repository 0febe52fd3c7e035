"""The paper's mathematics, batched and fast: one file per layer, a forward and a backward side by side.

Pure functions on tensors: no parameters, no modules, no state. The stream is (n, d): a row is a token, all sequences
packed end to end; only attention knows where they begin and end. A backward function never changes the Δ or the
saved tensors it was handed. The gradient of a parameter is added into the buffer given for it, or starts a new one.

    n   tokens of all sequences together     d    features           V    vocabulary
    h   heads                                d_ρ  width of q and k   d_h  width of v, per head
"""
