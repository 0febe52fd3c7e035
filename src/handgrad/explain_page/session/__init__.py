"""A model, its traced sentences and the versions of its weights.

Import `Session` and `TracedSentence` from session.py. objectives.py has what is differentiated; sentence_trace.py a trace
that computes the gradients of a layer when one is read; progress.py how far a trace has come. Nothing here knows what the
page shows.
"""
