"""Verification: the oracles (autograd, finite differences, operation counts), a reference model, and `verify`.

`verify.verify` checks a model; `checker.Checker` compares it with the reference, as a whole in float64 or a block at a time,
and gives single results by name; `paths` lists the code paths that users take; `check_report.Report` holds and prints
results. Autograd appears in `oracles.py`, `reference.py`, `reference_model.py` and `rounding.py`; nothing here knows
about training runs or the command line.
"""
