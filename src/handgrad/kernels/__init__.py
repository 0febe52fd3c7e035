"""Compiled loops for what torch has no fast call for: all of a training step except matrix products, and products with
packed weights. Used by `ops` where they fit.

`elementwise.c`, `attention.c` and `packed.c` hold the formulas, `library` compiles them once per machine with the C compiler
it finds, and `calls` passes tensors to them. Without a C compiler, on other devices and for other dtypes, `ops` computes the
same with torch calls. This package knows tensors and nothing of layers, models or training. Import `calls`, or `library`
to prepare and to switch off.
"""
