"""Run hostile files one by one, each in a forked process, and measure time and memory above a plain start.

A helper process imports handgrad once. For each case it forks; the fork does what a user would do with the file and says
how it went. A case that hangs is killed.
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

SECONDS, MEGABYTES = 2, 300
HANGS = 20  # seconds until a case is given up


class Case(NamedTuple):
    name: str
    make: Callable[[Path], object]  # the files, in a folder of the case
    call: Callable[[Path], object]  # what a user does with them
    refused: str | None  # part of the one line that refuses; None: it is read


class Measured(NamedTuple):
    refused: str | None  # the line
    error: str | None  # anything but a HandgradError
    seconds: float
    processor: float  # seconds, of its children too: what the clock would show on a machine that does nothing else
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
        print(json.dumps(_forked(cases[name], Path(folder))), flush=True)


def _forked(case: Case, folder: Path) -> Measured:
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.close(reading)
        os.setpgid(0, 0)
        with contextlib.suppress(BaseException), os.fdopen(writing, "w") as answer:
            json.dump(_measure(case, folder), answer)
        os._exit(0)
    os.close(writing)
    done = bool(select.select([reading], [], [], HANGS)[0])
    with os.fdopen(reading) as answer:
        text = answer.read() if done else ""
    if not text:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return Measured(*json.loads(text)) if text else Measured(None, "it hangs, or ended its process", HANGS, 0, 0)


def _measure(case: Case, folder: Path) -> Measured:
    from handgrad import HandgradError
    from handgrad.sandbox import client

    before = _peak("self")
    child = [0.0]
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    refused = error = None
    started, used = time.monotonic(), _processor()
    try:
        case.call(folder)
    except HandgradError as reason:
        refused = str(reason)
    except BaseException as reason:
        error = f"{type(reason).__name__}: {str(reason)[:500]}"
    seconds = time.monotonic() - started
    client._stop()
    return Measured(refused, error, seconds, _processor() - used, _peak("self") - before + child[0])


def _watch(peak: list[float]) -> None:
    """The memory of the child that runs foreign programs, looked at again and again."""
    from handgrad.sandbox import client

    while True:
        with contextlib.suppress(OSError, AttributeError, StopIteration):
            peak[0] = max(peak[0], _peak(str(client._child._process.pid)))  # type: ignore[union-attr]
        time.sleep(0.005)


def _peak(process: str) -> float:
    """Megabytes of memory at the most."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3


def _processor() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
