"""Every JSON that the page reads, declared: the answers of ../routes.py, which the server sends and an exported file
contains.

A function of routes.py returns one of these types, so mypy compares what is sent with what is declared;
tests/explain/test_contract.py compares both with what the page's JavaScript reads. Numbers that JSON does not have
(infinity, NaN) arrive as null. `python` is always code that computes the data beside it.

common.py      pictures, tokens, probabilities            model.py       the model, its stations, a traced sentence
station.py     one station, its head, lens, neurons, and single numbers
questions.py   attribution, what-if, compare, step        course.py      proofs and exercises
"""
