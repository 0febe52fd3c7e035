"""Checks of code that is not ours: `model` compares a PyTorch model's gradients with the hand-derived ones (`hg.audit`),
`gradcheck` checks one function (`hg.check`), `diagnosis` says how a tensor is wrong, by the guesses of `hypotheses`, and
`findings` are the reports of both.

The right answers come from `proof`; nothing here trains, or changes the model it is given.
"""
