"""GGUF files, llama.cpp's format: what is in them, under the names of Hugging Face's files.

`file` maps a file and unpacks single tensors. `model` makes a config.json and tensors of it by the tables of
`architectures`, `tokenizer` a tokenizer and its settings; `adapter` writes LoRA's factors. This package knows files and the
`gguf` library: no network, no text and no training. `formats.gguf_model` builds a model from what it reads.
"""
