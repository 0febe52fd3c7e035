"""Read files safely and write them atomically; manifests with checksums, safetensors headers, cache paths.

Import from its modules: `reading`, `atomic`, `manifest`, `tensors`, `scratch`, `cache`, `framed`. This package knows bytes,
JSON and tensors, but not what they mean: no models, tokenizers or runs.
"""
