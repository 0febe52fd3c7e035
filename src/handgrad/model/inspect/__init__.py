"""What looks at a pass: `trace` records every tensor under the paper's name, `edits` replaces some, `layer_gradients`
computes the gradients of one layer again; `patch`, `patch_map` and `paths` take values from another trace and predict what
that does; `tensor_view` shows tensors in notebooks.

All of it observes the passes of `gpt.py`; training uses it only to name a tensor that is not finite.
"""
