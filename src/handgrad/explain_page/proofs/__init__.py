"""The checks of every station on the current sentence.

Import `Prover` from prover.py, which computes them in the background; checks.py compares one station. The checks themselves
are those of `handgrad.proof`.
"""
