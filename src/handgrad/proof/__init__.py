"""Verification: the oracles (autograd, finite differences, operation counts), a reference model, and the paper's ledger.

`verify.verify` checks a model, `ledger.run` checks the paper's formulas, `checker.Checker` gives single results by name,
and `report.Report` holds and prints results; only the command line, `explain` and the tests import them. Autograd appears
in `oracles.py` and `reference.py` alone, and nothing here knows about training, files or the command line.
"""
