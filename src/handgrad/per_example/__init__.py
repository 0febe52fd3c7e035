"""Gradients per example: which examples have outlying gradients, and which influenced an answer.

Import `measure` (norms and inner products), `ranking` (`hg.influence`), `outliers` and `page` (HTML parts) from here. The
gradients come from `model.example_gradients`; this package knows nothing of training runs.
"""
