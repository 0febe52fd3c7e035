"""How far the trace that is being computed has come, for the page to show while the reader waits."""

from torch import Tensor

from ..json_types.model import Better
from ..json_types.model import Progress as Report

BACKWARD = 2 / 3  # share of the time: a backward pass has twice the products of a forward pass


class Progress:
    """The pass and the block that were recorded last."""

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.busy, self.compiling = False, False
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

    def report(self, better: list[Better]) -> Report:
        """Return which pass is in which block, and the share of the work that is done."""
        back, block = (self._back, self._block) if self.busy else (False, 0)
        done = (self.blocks - 1 - block if back else block) / self.blocks
        share = 1 - BACKWARD + BACKWARD * done if back else (1 - BACKWARD) * done
        return {
            "busy": self.busy, "compiling": self.compiling, "share": share, "backward": back, "block": block,
            "blocks": self.blocks, "better": better,
        }  # fmt: skip
