"""What low bits cost: the change of the mean loss on a text, and how often the most probable token differs; and how much of
both is due to the activations, which generation rounds to 8 bits."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import HandgradError
from ..model.gpt import GPT

WINDOW = 256  # tokens; the logits of one window exist at a time
PASSAGE = """\
Rain begins as water vapour, which the sun lifts from the sea and from wet ground. Warm air can carry more of it than
cold air. When the air rises it expands and cools, and at some height it can no longer hold all the vapour it brought
along. The surplus settles on grains of dust, salt or soot and forms droplets so small that the slightest breeze keeps
them aloft. What we see from below as a white heap is a crowd of such droplets, each of them falling slowly and each
of them carried up again. For rain to fall, droplets have to become a million times larger. In warm clouds they
collide, and the large ones sweep up the small ones on their way. In cold clouds ice crystals grow at the expense of
the droplets around them, until they are heavy enough to fall, and melt before they reach the ground. A farmer who
looks at the sky in the evening knows little of this, but he knows that swallows fly low before a storm, that a ring
around the moon means high thin clouds of ice, and that wind from the west usually brings the weather that others had
the day before. Both kinds of knowledge have their use. The first tells us why it rains; the second, whether to bring
in the hay.
"""


class Cost(NamedTuple):
    """Mean losses in nats per token, and the number of tokens whose most probable successor differs: from that of the model,
    and from that of the same weights with float32 activations."""

    tokens: int
    loss: float
    low_bit_loss: float
    differ: int
    weights_loss: float
    differ_by_activations: int

    @property
    def change(self) -> float:
        return self.low_bit_loss - self.loss

    def __str__(self) -> str:
        by_activations, share = self.low_bit_loss - self.weights_loss, self.differ_by_activations / self.tokens
        return (
            f"loss {self.loss:.4f} → {self.low_bit_loss:.4f} ({self.change:+.4f} nats per token); the most probable token"
            f" differs at {self.differ} of {self.tokens} ({self.differ / self.tokens:.1%})\n"
            f"of this, activations of 8 bits: {by_activations:+.4f} nats per token; without that rounding the most"
            f" probable token differs at {self.differ_by_activations} ({share:.1%})"
        )


def measure_cost(model: GPT, low_bit: GPT, ids: list[int]) -> Cost:
    """Compare two models on a text, in windows of at most 256 tokens."""
    if len(ids) < 2:
        raise HandgradError("the text is too short to compare models on it: it needs at least two tokens")
    totals, differ = [0.0, 0.0, 0.0], [0, 0]
    for window in _windows(ids, min(WINDOW, model.config.n_context)):
        given, targets = window[:-1], window[1:, None]
        passes = (low_bit, True), (model, False), (low_bit, False)
        low, ours, weights = found = [_log_probabilities(m, given, generating) for m, generating in passes]
        for i, x in enumerate(found):
            totals[i] -= float(x.gather(1, targets).sum())
        for i, x in enumerate((ours, weights)):
            differ[i] += int((x.argmax(1) != low.argmax(1)).sum())
    count = len(ids) - 1
    low_loss, loss, weights_loss = (x / count for x in totals)
    return Cost(count, loss, low_loss, differ[0], weights_loss, differ[1])


def _windows(ids: list[int], size: int) -> Iterator[Tensor]:
    """Ids of which each but the first is a target once."""
    for start in range(0, len(ids) - 1, size):
        yield torch.tensor(ids[start : start + size + 1])


def _log_probabilities(model: GPT, ids: Tensor, generating: bool) -> Tensor:
    logits = model.logits(ids[None].to(model.device), generating=generating)[0].as_subclass(Tensor)
    return torch.log_softmax(logits.double(), 1).cpu()
