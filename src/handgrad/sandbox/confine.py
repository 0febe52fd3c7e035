"""Take from a process what an answer does not need: it can compute, and use the pipes that it has open. Nothing else.

On Linux the kernel enforces it (seccomp): every system call that is not in ALLOWED fails, whatever code makes it. Without it
there remain the limits on files, memory and time, and an audit hook, which a program written to break out can evade.
"""

import contextlib
import errno
import importlib
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

ALLOWED = ("read", "write", "mmap", "munmap", "mremap", "mprotect", "madvise", "brk", "futex", "rt_sigreturn", "getrandom",
           "clock_gettime", "gettimeofday", "clock_nanosleep", "restart_syscall", "sched_yield", "exit",
           "exit_group")  # fmt: skip
MOST_FILES = 1 << 20  # the largest number of an open file that Linux gives by default
WHY = "an answer uses no files, no network and no other programs"


class Refused(Exception):
    """The code asked for something that it may not do here."""


def kernel_filter() -> Any:
    """The filter of system calls, or None where there is no seccomp."""
    try:
        seccomp = importlib.import_module("pyseccomp")
        made = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))
        for name in ALLOWED:
            made.add_rule(seccomp.ALLOW, name)
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    return made


def confine(limits: dict[str, Any], keep: list[int], filter: Any, limit_memory: Callable[[int], None]) -> bool:
    """Confine this process for ever. Returns whether the kernel does it.

    limits   memory in bytes, cpu and wall in seconds
    keep     numbers of the files that stay open"""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    last = 2
    for number in [*sorted(keep), MOST_FILES]:
        os.closerange(last + 1, number)
        last = number
    limit_memory(limits["memory"])
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    seconds = int(limits["cpu"]) + 2  # in case that its timers do not end it
    hard = {resource.RLIMIT_NOFILE: 0, resource.RLIMIT_NPROC: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0,
            resource.RLIMIT_AS: soft, resource.RLIMIT_CPU: seconds}  # fmt: skip
    for limit, most in hard.items():
        resource.setrlimit(limit, (most, most))
    signal.setitimer(signal.ITIMER_PROF, limits["cpu"])
    signal.setitimer(signal.ITIMER_REAL, limits["wall"])
    by_kernel = False
    if filter is not None:
        with contextlib.suppress(OSError):  # a container can forbid it
            filter.load()
            by_kernel = True
    _refuse_in_python()
    return by_kernel


def _refuse_in_python() -> None:
    """Refuse by name, with a message that says what was asked for."""
    families = frozenset(("open", "os", "socket", "subprocess", "ctypes", "shutil", "resource", "mmap", "fcntl", "signal",
                          "glob", "pty", "tempfile", "syslog", "sqlite3", "pathlib"))  # fmt: skip
    unreported = {  # calls that no audit hook sees
        "posix": ("mkfifo", "mknod", "setpgid", "setsid", "setpriority", "nice", "chroot", "unshare", "setns", "closerange",
                  "sched_setaffinity", "sched_setscheduler", "sched_setparam", "dup", "dup2", "close"),
        "_signal": ("setitimer", "alarm", "signal", "pthread_sigmask", "siginterrupt", "set_wakeup_fd", "raise_signal"),
    }  # fmt: skip

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if event.partition(".")[0] in families:
            refusing(event)()

    for home, calls in unreported.items():
        public = {"posix": "os", "_signal": "signal"}[home]
        for call in calls:
            for module in (sys.modules[home], sys.modules[public]):
                vars(module)[call] = refusing(f"{public}.{call}")
    sys.addaudithook(hook)


def refusing(name: str, why: str = WHY) -> Callable[..., Any]:
    """A function to stand for the one of that name."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise Refused(f"{name} is refused: {why}")

    return refuse
