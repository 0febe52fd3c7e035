"""Follow one number: the sum of products that made a cell of an activation, an error signal or a gradient.

follow.py answers; forward.py and signals.py have a rule per kind of step, norms.py and mixture.py those of norms, experts;
tensors.py computes what the trace does not record; terms.py adds up. Nothing here knows the order of a block's layers: it is
read from the network's steps.
"""
