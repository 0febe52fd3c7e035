"""Open hostile files one by one, each in a forked process, and measure time and memory.

A helper process imports handgrad once and forks for each case; the fork opens the file as a user would and reports the
result. Memory is counted above that of the helper. A case that hangs is killed.
"""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SECONDS, MEGABYTES = 5, 300  # of processor time: a hostile file that succeeds costs minutes
TIMEOUT = 20  # seconds until a case is killed


class Case(NamedTuple):
    name: str
    make: Callable[[Path], object]  # writes the files into a folder
    call: Callable[[Path], object]  # opens them as a user would
    error: str | None  # part of the expected HandgradError; None: the files are accepted


class Measured(NamedTuple):
    error: str | None  # message of a HandgradError
    crash: str | None  # any other exception
    seconds: float
    cpu_seconds: float  # including child processes
    megabytes: float


class Runner:
    """`with Runner("test_hostile") as runner: runner.run("a case", folder)`; the module has a list CASES."""

    def __init__(self, module: str):
        code = f"import hostile; hostile.serve({module!r})"
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, name: str, folder: Path) -> Measured:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, str(folder)]) + "\n")
        return Measured(*json.loads(self._process.stdout.readline()))

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def serve(module: str) -> None:
    cases = {case.name: case for case in importlib.import_module(module).CASES}
    for line in sys.stdin:
        name, folder = json.loads(line)
        print(json.dumps(_run_in_fork(cases[name], Path(folder))), flush=True)


def _run_in_fork(case: Case, folder: Path) -> Measured:
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.close(reading)
        os.setpgid(0, 0)
        with contextlib.suppress(BaseException), os.fdopen(writing, "w") as reply:
            json.dump(_measure(case, folder), reply)
        os._exit(0)
    os.close(writing)
    done = bool(select.select([reading], [], [], TIMEOUT)[0])
    with os.fdopen(reading) as reply:
        text = reply.read() if done else ""
    if not text:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return Measured(*json.loads(text)) if text else Measured(None, "it hangs or crashed its process", TIMEOUT, 0, 0)


def _measure(case: Case, folder: Path) -> Measured:
    from handgrad import HandgradError
    from handgrad.sandbox import client

    before = _peak("self")
    child = [0.0]
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    error = crash = None
    started, used = time.monotonic(), _cpu_seconds()
    try:
        case.call(folder)
    except HandgradError as reason:
        error = str(reason)
    except BaseException as reason:
        crash = f"{type(reason).__name__}: {str(reason)[:500]}"
    seconds = time.monotonic() - started
    client._service.stop()
    return Measured(error, crash, seconds, _cpu_seconds() - used, _peak("self") - before + child[0])


def _watch(peak: list[float]) -> None:
    """Poll the memory of the sandbox process."""
    from handgrad.sandbox import client

    while True:
        with contextlib.suppress(OSError, AttributeError, StopIteration):
            peak[0] = max(peak[0], _peak(str(client._service.child._process.pid)))  # type: ignore[union-attr]
        time.sleep(0.005)


def _peak(process: str) -> float:
    """Peak memory in megabytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3


def _cpu_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
