"""The stations of a model, one per step of the network.

network.py has the steps of all blocks, and what comes before and after them, in order; table.py has the stations;
formulas.py, attention_formulas.py and end_formulas.py their formulas; sources.py their source code.
A step of an unknown kind is refused by its name.
"""
