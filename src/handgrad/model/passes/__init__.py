"""What one pass through the network needs besides the layers: the batch in pieces, the arguments of a block, the end of the
network with the loss, what is differentiated, and the measurement of single examples.

Import from the modules. Nothing here owns a parameter or knows the order of a block.
"""
