"""A process that runs alone and reports its own peak memory.

`python -m bench.process FILE CODE [ARGUMENT …]` executes code and writes the peak of the process to FILE as it ends. The
kernel's other figure, ru_maxrss, begins at the size of the process that started this one. Imports neither torch nor
handgrad: what it executes configures its process.
"""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"  # ends with the process that started it


def run_alone(
    name: str, code: str, arguments: Sequence[object] = (), environment: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Execute code in a new process; return its output and its peak memory in bytes. `name` is its name in errors."""
    from handgrad.errors import HandgradError

    with tempfile.TemporaryDirectory() as scratch:
        peak = Path(scratch) / "peak"
        command = [sys.executable, "-m", "bench.process", peak, code, *arguments]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT,
            env=os.environ | (environment or {}),
        )  # fmt: skip
        if done.returncode:
            raise HandgradError(f"{name} failed: {reason_of(done)}")
        return done.stdout, int(peak.read_text())


@cache
def with_torch() -> int:
    """Peak memory of an interpreter that has loaded torch and done nothing else."""
    return run_alone("import torch", "import torch")[1]


def reason_of(done: subprocess.CompletedProcess[str]) -> str:
    """The error message of a process that failed."""
    if done.returncode < 0:
        return ended_by(-done.returncode)
    return (done.stderr.strip().splitlines() or ["no error message"])[-1]


def ended_by(number: int) -> str:
    """What a signal means for a process that it ended."""
    return f"ended by signal {number}" + ", perhaps for lack of memory" * (number == signal.SIGKILL)


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Start processes that use a core each; the system may put them on any."""
    started = [subprocess.Popen([sys.executable, "-c", SPIN, str(os.getpid())]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def memory_of(name: str, process: int | str = "self") -> int:
    """Memory of a process in bytes: VmRSS now, VmHWM at its peak."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    file, code, *sys.argv[1:] = sys.argv[1:]
    atexit.register(lambda: Path(file).write_text(str(memory_of("VmHWM"))))
    exec(code, {"__name__": "__main__"})
