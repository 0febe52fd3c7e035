"""The network: layers that own parameters, the block, the whole GPT, and the trace of one pass.

Import `GPT`, `ModelConfig`, `trace` and the layers from their modules. The arithmetic is in `ops`. This package knows no
files, text, optimizers or adapters (an adapter takes the place of a layer by implementing `Affine`).
"""
