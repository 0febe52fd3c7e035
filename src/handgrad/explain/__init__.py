"""`handgrad explain`: one pass down and up through a real model, station by station, in the browser.

stations.py   the table that is walked: formulas, equation numbers, words, tensors, parameters, source
session.py    a model and its sentences: traces, versions of the weights, all of it bounded
views.py      what the page is told about a trace: maps, numbers, attention, the loss, the lens
words.py      the sentence under a picture, computed from what is in it
pictures.py   matrices made small enough to draw
steps.py      a step of the optimizer, predicted and measured
proof.py      the judge's verdict, station by station, in the background
server.py     the page on this machine;  export.py: the same in one file
"""
