"""What low-bit weights cost: the change of the mean loss on a text, and how often the most probable token differs."""

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
    """Mean losses in nats per token, and the number of tokens whose most probable successor differs."""

    tokens: int
    loss: float
    low_bit_loss: float
    differ: int

    @property
    def change(self) -> float:
        return self.low_bit_loss - self.loss

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} → {self.low_bit_loss:.4f} ({self.change:+.4f} nats per token); the most probable token"
            f" differs at {self.differ} of {self.tokens} ({self.differ / self.tokens:.1%})"
        )


def measure_cost(model: GPT, low_bit: GPT, ids: list[int]) -> Cost:
    """Compare two models on a text, in windows of at most 256 tokens."""
    if len(ids) < 2:
        raise HandgradError("the text is too short to compare models on it: it needs at least two tokens")
    total, low_total, differ = 0.0, 0.0, 0
    for window in _windows(ids, min(WINDOW, model.config.n_context)):
        targets = window[1:, None]
        ours, low = (_log_probabilities(m, window[:-1]) for m in (model, low_bit))
        total -= float(ours.gather(1, targets).sum())
        low_total -= float(low.gather(1, targets).sum())
        differ += int((ours.argmax(1) != low.argmax(1)).sum())
    count = len(ids) - 1
    return Cost(count, total / count, low_total / count, differ)


def _windows(ids: list[int], size: int) -> Iterator[Tensor]:
    """Ids of which each but the first is a target once."""
    for start in range(0, len(ids) - 1, size):
        yield torch.tensor(ids[start : start + size + 1])


def _log_probabilities(model: GPT, ids: Tensor) -> Tensor:
    logits = model.logits(ids[None].to(model.device))[0].as_subclass(Tensor)
    return torch.log_softmax(logits.double(), 1).cpu()
