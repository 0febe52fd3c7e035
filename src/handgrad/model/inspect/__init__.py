"""What looks at a pass: `trace` records every tensor under the paper's name, `edits` replaces some, `layer_gradients`
computes the gradients of one layer again.

All of it observes the passes of `gpt.py`; training uses it only to name a tensor that is not finite.
"""
