"""A small session for tests: byte tokens, two blocks, weights large enough that no gradient is nearly zero."""

import torch

import handgrad as hg
from handgrad.explain.session import Session, add_adapters
from handgrad.text import tokenizer

TEXT = "to be, or not"


def make_session(seed: int = 0, dtype: torch.dtype = torch.float32, lora: int = 0, **shape: object) -> Session:
    small = {"n_vocab": 256, "n_context": 48, "d_model": 24, "n_heads": 3, "n_blocks": 2}
    model = hg.GPT(hg.preset("nano", **{**small, **shape}), seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator).to(dtype)
    if lora:
        add_adapters(model, lora)
    return Session(model, tokenizer.make("bytes", ()), "small", "for a test", TEXT)
