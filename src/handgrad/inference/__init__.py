"""Generation: the KV cache, sampling, the engine that runs many sequences at once, `generate`, chats and attribution.

Import `generate`, or `Engine` to add and cancel sequences between steps. A new sampler goes into `sampling.py`. The engine
works on token ids; `generate` also takes text. This package knows the model and its tokenizer; nothing of training or of
how models are stored.
"""
