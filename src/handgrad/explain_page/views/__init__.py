"""The data of the views of the page, one file each.

A function here takes a session, a traced sentence and what the page asks about, and returns an answer of ../json_types.py:
exact numbers of the trace, and matrices reduced for drawing. Its name and its parameters are a line of ../routes.py.
"""
