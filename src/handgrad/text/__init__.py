"""Everything between text and token batches: downloads, tokenizers, chat templates, corpora, fine-tuning examples.

Import from its modules: `tokenizer`, `corpus` and `batches` for training, `examples`, `validation_split` and `chat` for
fine-tuning, `downloads` for datasets. This package knows no model, optimizer or run; it hands out ids and targets.
"""
