"""The paper's formulas, batched and fast: one file per layer, forward and backward next to each other.

`model` and `adapters` import these pure functions on tensors; each file has a counterpart in `paper/` to which tests hold
it equal. They know no parameters, modules or state, and nothing else of handgrad. The stream is (n, d): a row is a token,
all sequences are packed end to end, and only attention and the short convolution know where they begin and end. A
backward function never changes the Δ or the saved tensors it is given. A parameter's gradient is added into the buffer
given for it, or returned in a new one.

    n   tokens of all sequences together     d    features           V    vocabulary
    h   heads, h_kv of keys and values       d_ρ  width of q and k   d_h  width of v, per head
"""
