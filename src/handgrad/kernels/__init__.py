"""Compiled loops for the layers of a model, in training and for generating tokens. Used by `ops` and `inference` where they
fit.

The C files hold the formulas, `library` compiles them once per machine with the C compiler it finds, and `calls` passes
tensors to them. Without a C compiler, on other devices and for other dtypes, torch computes the same. This package knows
tensors and nothing of layers, models or training. Import `calls`, or `library` to prepare and to switch off.
"""
