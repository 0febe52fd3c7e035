"""Weights that are stored as something else than float tensors: `packed` holds matrices in packed bytes, `weights`
hands them to layers while these compute, `quantize` rounds the matrices of a model to 8 or 4 bits.

The formats and their products are `ops/packed.py`; files are not read here.
"""
