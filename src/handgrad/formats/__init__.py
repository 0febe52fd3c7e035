"""Models on disk: Hugging Face directories, run folders, the hub, and which model a user means by a name.

Import `load`, `save`, `find_model` and `RunFolder` from their modules. This package reads and writes; it does not train,
generate or print.
"""
