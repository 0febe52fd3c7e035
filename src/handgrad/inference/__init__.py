"""Generation: the KV cache, sampling, and the loop that joins them.

Import `generate`. A new sampler goes into `sampling.py`. This package works on token ids: it knows the model, and nothing of
text, files or training.
"""
