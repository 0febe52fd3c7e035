"""Ctrl-C and SIGTERM: finish the step, save, end."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self


class Stop:
    """Inside this context the first signal sets `requested`, and the second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread can handle signals
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("\nSaving after this step. Press Ctrl-C again to quit immediately.\n")
