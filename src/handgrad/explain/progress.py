"""How far the trace that is being computed has come, for the page to show while the reader waits."""

from typing import Any

from torch import Tensor

BACKWARD = 2 / 3  # share of the time: a backward pass has twice the products of a forward pass


class Progress:
    """The pass and the block that were recorded last."""

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.busy = False
        self._back, self._block = False, 0

    def begin(self) -> None:
        self.busy, self._back, self._block = True, False, 0

    def end(self) -> None:
        self.busy = False

    def record(self, name: str, value: Tensor) -> None:
        """Take note of a tensor of the trace."""
        here, _, last = name.rpartition(".")
        self._back = self._back or last.startswith("delta_")
        if here:
            self._block = int(here.split(".")[1])
        elif self._back:
            self._block = self.blocks - 1

    def report(self) -> dict[str, Any]:
        """Return which pass is in which block, and the share of the work that is done."""
        if not self.busy:
            return {"busy": False, "share": 0.0, "backward": False, "block": 0, "blocks": self.blocks}
        done = (self.blocks - 1 - self._block if self._back else self._block) / self.blocks
        share = 1 - BACKWARD + BACKWARD * done if self._back else (1 - BACKWARD) * done
        return {
            "busy": True, "share": share, "backward": self._back, "block": self._block, "blocks": self.blocks,
        }  # fmt: skip
