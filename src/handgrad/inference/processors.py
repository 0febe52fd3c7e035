"""What changes the logits l of a sequence before its next token is chosen, in this order:

    repetition penalty r      l_i / r if l_i > 0, otherwise l_i · r, for every id i of prompt and text (as `transformers`)
    frequency f, presence p   l_i − f c_i − p [c_i > 0], where i occurs c_i times in the new text (as OpenAI)
    bias b                    l_i + b_i
    grammar                   −∞ for every id with which the text could not go on

Log-probabilities that are returned are those of the model, before all of this.
"""

from collections import Counter
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from .sampling import Sampling
from .sequences import Sequence


def changes_logits(sequence: Sequence) -> bool:
    """Whether `process` does anything."""
    s = sequence.options.sampling
    penalties = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty
    return bool(penalties or s.logit_bias or sequence.matcher)


def process(logits: Tensor, sequence: Sequence) -> None:
    """(V) logits of the next token, changed in place. Raises if the grammar leaves none."""
    penalize(logits, sequence.options.sampling, sequence.prompt, sequence.new)
    if sequence.matcher is not None:
        sequence.matcher.mask(logits)


def penalize(logits: Tensor, sampling: Sampling, prompt: SequenceOf[int], new: SequenceOf[int]) -> None:
    """(V) logits, changed in place, all but the grammar."""
    if sampling.repetition_penalty != 1 and (prompt or new):
        where = torch.tensor(list({*prompt, *new}), device=logits.device)
        found = logits[where]
        penalty = sampling.repetition_penalty
        logits[where] = torch.where(found < 0, found * penalty, found / penalty)
    if (sampling.frequency_penalty or sampling.presence_penalty) and new:
        counts = Counter(new)
        where = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[where] -= sampling.frequency_penalty * times + sampling.presence_penalty
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        bias = torch.tensor(biases, dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, torch.tensor(ids, device=logits.device), bias)
