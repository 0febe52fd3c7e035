"""Compiled loops for the parts of a training step that are not matrix products, and for generating single tokens, used by
`ops` and `inference` where they fit.

`elementwise.c`, `attention.c` and `decode.c` hold the formulas, `library` compiles them once per machine with the C compiler
it finds, and `calls` passes tensors to them. Without a C compiler, on other devices and for other dtypes, torch computes
the same. This package knows tensors and nothing of layers, models or training. Import `calls`, or `library` to prepare or
switch off.
"""
