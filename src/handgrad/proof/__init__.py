"""Verification: the oracles (autograd, finite differences, operation counts), a reference model, and the paper's ledger.

`verify.verify` checks a model, `ledger.run` checks the paper's formulas, `checker.Checker` gives single results by name,
and `report.Report` holds and prints results. `audit` compares other people's models with ours, `gradcheck` checks one
function, and `diagnosis` says how a tensor is wrong. Only the command line, `explain` and the tests import them. Autograd
appears in `oracles.py`, in `reference.py` and where an audited model or function runs; nothing here knows about training or
the command line.
"""
