"""A child process that answers requests through its standard input and output.

A message is its length in four bytes, then its content. The child exits when a request exceeds its limits; `call` then
raises ChildExited, and a new child has to be started.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

from ..errors import HandgradError


class ChildExited(Exception):
    """The child has exited. Argument: its status."""


class Child:
    """`arguments` follow the parent's process id on the command line of the program, a Python file."""

    def __init__(self, program: str, arguments: list[str], environment: dict[str, str]):
        command = [sys.executable, "-I", "-S", program, str(os.getpid()), *arguments]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
                bufsize=0,
            )  # fmt: skip
        except OSError as reason:
            raise HandgradError(f"cannot start {sys.executable} for the sandbox: {reason.strerror}") from None

    def call(self, request: bytes, timeout: float) -> bytes:
        """Send a request and return the reply; no reply within `timeout` seconds counts as exceeded time."""
        assert self._process.stdin is not None
        try:
            data = memoryview(len(request).to_bytes(4, "big") + request)
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]
            return self._read_reply(timeout)
        except OSError:
            raise ChildExited(self._process.wait()) from None

    def _read_reply(self, timeout: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        reply = bytearray()
        while len(reply) < 4 or len(reply) < 4 + int.from_bytes(reply[:4], "big"):
            if not select.select([pipe], [], [], max(0, deadline - time.monotonic()))[0]:
                raise ChildExited(-signal.SIGPROF)
            part = os.read(pipe, 1 << 20)
            if not part:
                raise ChildExited(self._process.wait())
            reply += part
        return bytes(reply[4:])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()

    def abandon(self) -> None:
        """Close the pipes without waiting: after a fork the child belongs to the parent process."""
        self._process.returncode = 0
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
