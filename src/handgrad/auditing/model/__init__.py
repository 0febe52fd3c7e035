"""The audit of other people's models: `run.audit` compares a PyTorch model's own gradients with the hand-derived ones.

`subject` and `batch` read the model and the batch, `observe` runs its passes, `expect` says what is right and what rounding
allows, `points` are where both are compared, `causes`, `mistakes` and `heads` know mistakes, `setup` checks a fine-tuning
set-up. Autograd is the audited model's, in `observe`, and the reference's, in `expect` and `heads`; nothing here trains or
changes the model it is given.
"""
