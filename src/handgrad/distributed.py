"""Several processes that train one model, on torch.distributed: gloo between processors, nccl between GPUs.

Each process takes its share of the sequences of a batch. As soon as the gradients of a layer are final they are summed
over the processes while the way back goes on below it. Every gradient is already divided by the number of targets of all
processes together, so a sum is all that is needed, however unevenly the targets lie.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .errors import HandgradError


class Ranks:
    """This process among all. Without torchrun there is one, and nothing is sent."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """`device` is where the gradients are: it decides what can carry them."""
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.under_way: list[Any] = []
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if torch.device(device).type == "cuda" else "gloo")
        if self.size > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.size))

    @property
    def first(self) -> bool:
        """The one that writes and shows."""
        return self.rank == 0

    def share(self, first: int, count: int) -> tuple[int, int]:
        """Of `count` sequences from `first` on, this process's own: where they begin and how many there are."""
        if count < self.size:
            raise HandgradError(
                f"a batch of {count} sequences cannot be shared by {self.size} processes: use a larger one"
            )
        edges = [count * r // self.size for r in range(self.size + 1)]
        return first + edges[self.rank], edges[self.rank + 1] - edges[self.rank]

    def total(self, *values: float) -> list[float]:
        """Sums over all processes."""
        if self.size == 1:
            return list(values)
        both = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(both)
        return [float(x) for x in both]

    def sum_behind(self, layer: list[nn.Parameter]) -> None:
        """Begin to sum a layer's gradients, and come back at once."""
        if self.size > 1:
            for p in layer:
                if p.grad is not None:
                    self.under_way.append(dist.all_reduce(p.grad, async_op=True))

    def sum_now(self, layer: list[nn.Parameter]) -> None:
        """The same, and wait."""
        self.sum_behind(layer)
        self.wait()

    def wait(self) -> None:
        for work in self.under_way:
            work.wait()
        self.under_way.clear()

    def agree(self, make: Callable[[], str]) -> str:
        """What the first process makes, to all; the others wait for it."""
        if self.size == 1:
            return make()
        said = make().encode() if self.first else b""
        size = torch.tensor([len(said)])
        dist.broadcast(size, 0)
        text = torch.tensor(list(said) if self.first else [0] * int(size), dtype=torch.uint8)
        dist.broadcast(text, 0)
        return bytes(text.tolist()).decode()

    def together(self, act: Callable[[], None]) -> None:
        """The first process acts; if it fails, all fail with its reason."""

        def attempt() -> str:
            try:
                act()
            except HandgradError as mistake:
                return str(mistake)
            return ""

        mistake = self.agree(attempt)
        if mistake:
            raise HandgradError(mistake)

    def meet(self) -> None:
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
