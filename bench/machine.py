"""What a result depends on besides the code: the machine, what else ran on it, versions, commit and date."""

import os
import platform
import subprocess
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import handgrad
from handgrad.kernels import library
from handgrad.machine import BUSY

from .process import ROOT

PACKAGES = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class CpuTime:
    """Processor seconds since the machine and this process started."""

    everyone: float
    own: float  # this process and its ended children
    clock: float


@dataclass(frozen=True)
class Machine:
    """The machine before and after the measurement.

    A load average counts the measurement's own processes too, so only the one before is compared with a limit. What others
    did meanwhile is told apart by processor time: that of all processes minus our own."""

    load: float  # 1-minute load average before the measurement
    cores: int
    threads: int  # of torch
    cpu: str = ""
    memory: int = 0  # bytes
    load_after: float | None = None  # 1-minute load average at the end, mostly the measurement's own
    others: float | None = None  # cores that other processes used during the measurement, on average
    started: CpuTime | None = field(default=None, repr=False)

    @staticmethod
    def now() -> "Machine":
        cores = os.cpu_count() or 1
        return Machine(
            os.getloadavg()[0], cores, torch.get_num_threads(), cpu_model(), total_memory(), started=cpu_time()
        )

    def after(self) -> "Machine":
        """The same with what happened since."""
        now, others = cpu_time(), None
        if self.started is not None and now is not None and now.clock > self.started.clock:
            foreign = now.everyone - self.started.everyone - (now.own - self.started.own)
            others = max(0.0, foreign / (now.clock - self.started.clock))
        return replace(self, load_after=os.getloadavg()[0], others=others)

    @property
    def busy(self) -> bool:
        return max(self.load, self.others or 0.0) > BUSY * self.cores

    @property
    def state(self) -> str:
        cores, threads = (f"{n} {what}{'s' * (n > 1)}" for n, what in ((self.cores, "core"), (self.threads, "thread")))
        others = "" if self.others is None else f", other processes used {self.others:.2f} cores meanwhile"
        return f"load {self.load:.2f} on {cores} at the start{others}, {threads}, torch {torch.__version__}"

    @property
    def warning(self) -> str:
        """A warning if the machine is or was busy, else \"\"."""
        if not self.busy:
            return ""
        used = "" if self.others is None else f", other processes used {self.others:.2f} cores"
        return (
            f"THE MACHINE IS BUSY: load {self.load:.2f} on {self.cores} cores{used}, above {BUSY} per core. Ratios from a"
            " busy machine are biased in our favor: do not publish them; wait until it is idle and measure again."
        )


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_time() -> CpuTime | None:
    """Processor time so far; None where there is no /proc/stat."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, soft, steal = map(int, stat.read_text().split(maxsplit=9)[1:9])
    everyone = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return CpuTime(everyone, sum(times[:4]), times.elapsed)


def versions() -> dict[str, str]:
    """Versions of Python and of every program that takes part, and whether handgrad's kernels do; "" if not installed."""
    kernels = "compiled" if library.allowed() and library.load(torch.float32) is not None else "off"
    found = {"python": platform.python_version(), "handgrad": handgrad.__version__, "kernels": kernels}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def commit() -> tuple[str, bool]:
    """The commit that is checked out, and whether files differ from it; ("", False) outside git."""
    answers = []
    for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no")):
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        except OSError:
            return "", False
        if done.returncode:
            return "", False
        answers.append(done.stdout.strip())
    return answers[0], bool(answers[1])


def origin() -> dict[str, Any]:
    """What the code was as the measurement began: date, commit, versions."""
    head, dirty = commit()
    return {"date": today(), "commit": head, "dirty": dirty, "versions": versions()}


def today() -> str:
    return datetime.now(UTC).date().isoformat()
