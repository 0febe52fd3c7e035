"""Gradients per example: which examples have outlying gradients, and which pushed an answer.

Import `measure` (norms and inner products), `ranking` (`hg.influence`), `outliers` and `page` (HTML parts) from here. The
gradients come from `model.example_gradients`; the room knows nothing of training runs.
"""
