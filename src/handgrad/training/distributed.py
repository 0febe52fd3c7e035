"""Several processes that train one model, on torch.distributed.

Each process takes its share of the sequences of a batch. As soon as the gradients of a layer are final they are summed
over the processes while the backward pass continues below it. Gradients are pre-divided by the global number of targets,
so processes with different numbers of targets are weighted correctly.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..errors import HandgradError

T = TypeVar("T")
PATIENCE = 2.0  # seconds that a process waits to see whether the first one has the same error


class LostPeerError(HandgradError):
    """Another process of the group has ended."""


class Ranks:
    """This process among all. Without torchrun there is one, and nothing is sent."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """`device` is where the gradients are: it decides what can carry them."""
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.under_way: list[Any] = []
        if self.size > 1 and not dist.is_initialized():
            with self._peers():
                self.store = self._open_store()
                backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
                dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size)
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
        with self._peers():
            dist.all_reduce(both)
        return [float(x) for x in both]

    def all_reduce_async(self, layer: list[nn.Parameter]) -> None:
        """Begin to sum a layer's gradients over the processes, and return at once."""
        if self.size > 1:
            with self._peers():
                for p in layer:
                    if p.grad is not None:
                        self.under_way.append(dist.all_reduce(p.grad, async_op=True))

    def all_reduce(self, layer: list[nn.Parameter]) -> None:
        """Sum a layer's gradients over the processes."""
        self.all_reduce_async(layer)
        self.wait()

    def wait(self) -> None:
        """Until all sums under way are complete."""
        with self._peers():
            for work in self.under_way:
                work.wait()
        self.under_way.clear()

    def broadcast(self, make: Callable[[], str]) -> str:
        """What the first process makes, to all. If it fails there, all fail with its reason."""
        if self.size == 1:
            return make()
        said = b""
        if self.first:
            try:
                said = b"+" + make().encode()
            except HandgradError as mistake:
                said = b"-" + str(mistake).encode()
        with self._peers():
            size = torch.tensor([len(said)])
            dist.broadcast(size, 0)
            text = torch.tensor(list(said) if self.first else [0] * int(size), dtype=torch.uint8)
            dist.broadcast(text, 0)
        answer = bytes(text.tolist()).decode()
        if answer[0] == "-":
            raise HandgradError(answer[1:])
        return answer[1:]

    def run_on_first(self, act: Callable[[], object]) -> None:
        """The first process acts, the others wait; if it fails, all fail with its reason."""

        def acted() -> str:
            act()
            return ""

        self.broadcast(acted)

    def first_then_others(self, make: Callable[[], T]) -> T:
        """Every process makes the same thing: the first one before the others, which then find it in the cache."""
        if self.size > 1:
            self.run_on_first(make)
        return make()

    def shutdown(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def is_mine(self, error: str) -> bool:
        """Whether this process should print an error: of several with the same one, only the first does."""
        if self.size == 1:
            return True
        with contextlib.suppress(Exception):  # the store may be gone with the process that kept it
            end = time.monotonic() + PATIENCE
            if self.first:
                self.store.set("error", error)
                while self.keeps_store and self.store.add("seen", 0) < self.size - 1 and time.monotonic() < end:
                    time.sleep(0.02)  # the store ends with this process
                return True
            while time.monotonic() < end:
                if self.store.check(["error"]):
                    same = self.store.get("error").decode() == error
                    self.store.add("seen", 1)
                    return not same
                time.sleep(0.02)
        return True

    def _open_store(self) -> Any:
        """Where the processes find each other. torchrun keeps one store over all its restarts: without a prefix for each,
        a restarted group would find the addresses of the processes that died."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun itself keeps the store
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        library: Any = dist  # its stores are public, but not typed
        self.keeps_store = self.first and not agent
        store = library.TCPStore(address, port, self.size, is_master=self.keeps_store, wait_for_workers=False)
        return library.PrefixStore(f"handgrad/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    @contextlib.contextmanager
    def _peers(self) -> Iterator[None]:
        """torch reports a peer that ended as a RuntimeError with a long trace of its own."""
        try:
            yield
        except RuntimeError as reason:
            why = str(reason).strip().splitlines()[0].rpartition("] ")[2][:120]  # without gloo's source file
            raise LostPeerError(
                f"process {self.rank} lost another one of the {self.size}, which has ended: {why}"
            ) from None
