"""Several processes that train one model, on torch.distributed.

Each process takes its share of the sequences of a batch. As soon as the gradients of a layer are final they are summed
over the processes while the backward pass continues with earlier layers. Gradients are pre-divided by the global number
of targets, so processes with different numbers of targets are weighted correctly.

A process that does not answer for `timeout` seconds ends the group. While the first one works and the others wait, it says
so from time to time, so that its work may take longer.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..errors import HandgradError, option
from ..formatting import plural
from .config import TrainOptions

T = TypeVar("T")
WORKING = -1  # sent instead of the size of a message: the first process is not ready yet
PATIENCE = 2.0  # seconds a process waits to learn whether the first one has the same error


class LostPeerError(HandgradError):
    """Another process of the group has ended, or does not answer."""


class Ranks:
    """This process's rank in the group. Without torchrun the group has one process, and nothing is sent."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.pending: list[Any] = []
        self.timeout = TrainOptions.peer_timeout
        self.group: dist.ProcessGroup | None = None  # None: that of all processes
        if self.size > 1 and not dist.is_initialized():
            with self._peers():
                self.store = self._open_store()
                limit = timedelta(seconds=self.timeout)
                dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.size, timeout=limit)
        if self.size > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.size))

    def set_timeout(self, seconds: float) -> None:
        """Wait this long for other processes. Called in all of them."""
        if self.size > 1 and seconds != self.timeout:
            with self._peers():
                self.group = dist.new_group(timeout=timedelta(seconds=seconds))
            self.timeout = seconds

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def share(self, first: int, count: int) -> tuple[int, int]:
        """This process's part of `count` sequences from `first` on: its first sequence and their number."""
        if count < self.size:
            raise HandgradError(
                f"a batch of {count} sequences cannot be split over {self.size} processes: use a larger batch"
            )
        edges = [count * r // self.size for r in range(self.size + 1)]
        return first + edges[self.rank], edges[self.rank + 1] - edges[self.rank]

    def total(self, *values: float) -> list[float]:
        """Sums over all processes."""
        if self.size == 1:
            return list(values)
        both = torch.tensor(values, dtype=torch.float64)
        with self._peers():
            dist.all_reduce(both, group=self.group)
        return [float(x) for x in both]

    def all_reduce_async(self, layer: list[nn.Parameter]) -> None:
        """Start summing a layer's gradients over the processes and return immediately."""
        if self.size > 1:
            with self._peers():
                for p in layer:
                    if p.grad is not None:
                        self.pending.append(dist.all_reduce(p.grad, group=self.group, async_op=True))

    def all_reduce(self, layer: list[nn.Parameter]) -> None:
        """Sum a layer's gradients over the processes."""
        self.all_reduce_async(layer)
        self.wait()

    def wait(self) -> None:
        """Wait until all pending sums are complete."""
        with self._peers():
            for work in self.pending:
                work.wait()
        self.pending.clear()

    def broadcast(self, make: Callable[[], str]) -> str:
        """Call `make` in the first process and return its result in all. If it raises there, all raise."""
        if self.size == 1:
            return make()
        message = b""
        if self.first:
            try:
                with self._working():
                    message = b"+" + make().encode()
            except HandgradError as mistake:
                message = b"-" + mistake.message.encode()
        with self._peers():
            size = torch.tensor([len(message)])
            dist.broadcast(size, 0, group=self.group)
            while int(size) == WORKING:
                dist.broadcast(size, 0, group=self.group)
            text = torch.tensor(list(message) if self.first else [0] * int(size), dtype=torch.uint8)
            dist.broadcast(text, 0, group=self.group)
        answer = bytes(text.tolist()).decode()
        if answer[0] == "-":
            raise HandgradError(answer[1:])
        return answer[1:]

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Within the context a thread of the first process tells the others, which wait, that it is alive."""
        ready = threading.Event()

        def announce() -> None:
            with contextlib.suppress(RuntimeError):  # a lost process is noticed by the next message
                while not ready.wait(self.timeout / 4):
                    dist.broadcast(torch.tensor([WORKING]), 0, group=self.group)

        thread = threading.Thread(target=announce, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ready.set()
            thread.join()

    def run_on_first(self, act: Callable[[], object]) -> None:
        """Call `act` in the first process while the others wait. If it raises there, all raise."""

        def acted() -> str:
            act()
            return ""

        self.broadcast(acted)

    def first_then_others(self, make: Callable[[], T]) -> T:
        """Call `make` in every process, first in rank 0: the others then find its result in the cache."""
        if self.size > 1:
            self.run_on_first(make)
        return make()

    def shutdown(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def should_print(self, error: HandgradError) -> bool:
        """Whether this process should print an error: if several have the same one, only the first prints it."""
        if self.size == 1 or isinstance(error, LostPeerError):  # a lost process may host the store
            return True
        text = error.message
        with contextlib.suppress(Exception):  # the store ends with the process that hosts it
            end = time.monotonic() + PATIENCE
            if self.first:
                self.store.set("error", text)
                while self.hosts_store and self.store.add("seen", 0) < self.size - 1 and time.monotonic() < end:
                    time.sleep(0.02)  # the store ends with this process
                return True
            while time.monotonic() < end:
                if self.store.check(["error"]):
                    same = self.store.get("error").decode() == text
                    self.store.add("seen", 1)
                    return not same
                time.sleep(0.02)
        return True

    def _open_store(self) -> Any:
        """The store through which processes find each other. torchrun keeps one store over all restarts: without a prefix
        per restart, a new group would find the addresses of dead processes."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun hosts the store
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        library: Any = dist  # its stores are public, but not typed
        self.hosts_store = self.first and not agent
        store = library.TCPStore(address, port, self.size, is_master=self.hosts_store, wait_for_workers=False)
        return library.PrefixStore(f"handgrad/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    @contextlib.contextmanager
    def _peers(self) -> Iterator[None]:
        """Turn torch's RuntimeError about a lost peer into a short message."""
        try:
            yield
        except RuntimeError as reason:
            why = str(reason).strip().splitlines()[0].rpartition("] ")[2][:120]  # drop gloo's source location
            who = f"another of the {self.size} processes"
            if re.search("timed? ?out", why, re.IGNORECASE):
                raise LostPeerError(
                    f"{who} did not answer within {plural(self.timeout, 'second')}: it is stopped, or much slower than this"
                    f" one. Look at it, or allow more seconds with {option('peer_timeout')}"
                ) from None
            raise LostPeerError(f"process {self.rank} lost contact with {who}, which has ended: {why}") from None
