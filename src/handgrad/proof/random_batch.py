"""Verify a model on a random batch."""

import torch

from ..checks import check_integer
from ..model.gpt import GPT
from .report import Report
from .verify import verify

SMALL = 5_000_000  # parameters below which a second thread would only wait


def verify_on_random_batch(model: GPT, seed: int) -> Report:
    """`verify` on three random sequences of different lengths, with a fifth of the targets ignored."""
    check_integer("seed", seed)
    if model.size < SMALL:
        torch.set_num_threads(1)
    lengths = [min(n, model.config.n_context) for n in (9, 1, 6)]
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.n_vocab, (sum(lengths),), generator=generator)
    targets = torch.randint(model.config.n_vocab, (sum(lengths),), generator=generator)
    targets[torch.rand(len(targets), generator=generator) < 0.2] = -100
    targets[0] = tokens[-1]
    return verify(model, tokens, targets, lengths, seed=seed)
