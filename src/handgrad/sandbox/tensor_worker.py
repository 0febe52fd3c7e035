"""The child process behind `tensor_client.run`: it has each answer run in one confined process, and its tensors in another.

Run as `python -I -S tensor_worker.py PARENT FOLDER…`: the parent's process id, and the folders to import from. A request and
a reply are JSON, preceded by its length in four bytes and followed by the bytes of its tensors.

For each request there are two forks. The answer's process has Python but no torch (answer_worker); the other holds the
tensors and computes what the answer asks for (torch_server). Both are confined, so neither can touch a file, the network or
another process.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import types
from typing import Any

IDLE = 600  # seconds without a request after which the child exits, and frees the memory that torch takes
NO_MEMORY, CRASHED = 3, 4  # exit status
MODULES = ("confine", "worker", "answer_worker")
GRACE = 5.0  # seconds that a fork may take after its time to end by itself


def main() -> None:
    parent = int(sys.argv[1])
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path += sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    handgrad = types.ModuleType("handgrad")  # its parts can be imported one by one, without all of it
    handgrad.__path__ = [os.path.dirname(here)]
    sys.modules["handgrad"] = handgrad
    confine, worker, answers = (importlib.import_module(f"handgrad.sandbox.{name}") for name in MODULES)
    filter = confine.kernel_filter()
    control = answers.start(filter, worker)  # before torch is imported: an answer must not find it
    server = importlib.import_module("handgrad.sandbox.torch_server")
    server.warm_up()
    while (raw := worker.next_request(parent, IDLE)) is not None:
        reply = _in_forks(raw, control, filter)
        worker.write(len(reply).to_bytes(4, "big") + reply)


def _in_forks(raw: bytes, control: socket.socket, filter: Any) -> bytes:
    confine, worker, answers, server = (sys.modules[f"handgrad.sandbox.{name}"] for name in (*MODULES, "torch_server"))
    length = int.from_bytes(raw[:4], "big")
    request = json.loads(raw[4 : 4 + length])
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setpgid(0, 0)
            tensors = list(server.tensors(request["tensors"], raw[4 + length :]))
            by_kernel = confine.confine(request, [ours.fileno(), writing], filter, worker.limit_memory)
            worker.write(server.serve(request, tensors, ours.fileno(), by_kernel), writing)
        except MemoryError:
            os._exit(NO_MEMORY)
        except BaseException:  # a message that no answer sends by itself
            os._exit(CRASHED)
        finally:
            os._exit(0)
    os.close(writing)
    ours.close()
    answers.ask(control, {name: value for name, value in request.items() if name != "tensors"}, theirs.fileno())
    theirs.close()
    reply, late = _collect(reading, request["reply"], time.monotonic() + request["wall"] + GRACE)
    os.close(reading)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)  # nothing of it is left, whatever it started
    status, of_answer = os.waitpid(pid, 0)[1], answers.end(control)
    if not late and len(reply) >= 4 and 4 + int.from_bytes(reply[:4], "big") <= len(reply) <= request["reply"]:
        return reply
    if not late and reply == b"\0":  # the answer's process has ended before it had returned
        status = of_answer
    kind = "time" if late else _ending(status, len(reply) > request["reply"])
    return server.encoded({"problem": {"kind": kind}})  # type: ignore[no-any-return]


def _collect(pipe: int, most: int, deadline: float) -> tuple[bytes, bool]:
    """What comes through the pipe, at most a little more than `most` bytes, and whether the deadline passed."""
    found = bytearray()
    while len(found) <= most:
        if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return bytes(found), True
        if not (part := os.read(pipe, 1 << 20)):
            break
        found += part
    return bytes(found), False


def _ending(status: int, too_long: bool) -> str:
    if too_long:
        return "long"
    if os.WIFSIGNALED(status):
        return "time" if os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU) else "crash"
    return {NO_MEMORY: "memory", CRASHED: "crash"}.get(os.WEXITSTATUS(status), "exit")


if __name__ == "__main__":
    main()
