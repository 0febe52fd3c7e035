"""Layers: modules that own parameters and call `ops`, each with `forward`, `backward` and, for its gradients, `accumulate`.

`linear` and `norms` have the single layers, `attention` and `mlp` the branches that a block adds to the stream; `parts`
reaches layers under our names that are registered under the family's. No layer stores activations or knows the order of
a block.
"""
