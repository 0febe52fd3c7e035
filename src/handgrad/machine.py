"""The process: its cores and memory, and settings that commands make before torch is imported (instruction set,
allocator, page size, waiting threads). Importing handgrad makes none."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ModuleNotFoundError:  # Windows
    raise ImportError("handgrad runs on Linux and macOS; on Windows, install it in WSL") from None

AMX_VARIABLE = "ONEDNN_MAX_CPU_ISA"
BUSY = 0.3  # load per core above which other programs matter


def configure_runtime() -> None:
    """Set up this process as the commands do: the allocator keeps freed memory, torch asks for large pages, waiting threads
    sleep sooner, and oneDNN avoids AMX in virtual machines. Each only if you have not set it yourself; call it before
    importing torch."""
    disable_amx_in_virtual_machines()
    keep_buffers_in_heap()
    enable_huge_pages()
    limit_spinning()


def keep_buffers_in_heap() -> None:
    """Make glibc reuse freed buffers instead of returning them to the system.

    A training step allocates the same large buffers again and again; mapping them anew page by page costs about a tenth
    of the step's time. No-op if the user set any MALLOC_* variable."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 1 << 25)  # glibc's maximum; larger buffers are mapped, so they do not fragment the heap


def trim_heap() -> None:
    """Return free heap memory to the system, where peak memory matters more than a few milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def enable_huge_pages() -> None:
    """Make torch request 2 MB pages for large tensors: a hundredth of the page faults, fewer TLB misses in matmuls.

    torch reads the variable before its first allocation."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def limit_spinning() -> None:
    """Make a waiting thread sleep after a few tenths of a millisecond instead of several milliseconds.

    If another program uses a core, threads wait for the one on that core; spinning, they keep it from running, and a step
    can take several times as long. On an idle machine the difference was within the noise of a small model's steps; sleeping
    at once would cost half of its speed. libgomp, torch's thread pool, reads the variable when torch is imported. No-op if
    the user set a waiting policy."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def disable_amx_in_virtual_machines() -> None:
    """Make oneDNN avoid AMX in virtual machines: some announce it and then kill the process at the first bfloat16 matmul.

    oneDNN reads the variable once, before its first matmul. No-op if the user set it."""
    if amx_is_doubtful():
        os.environ.setdefault(AMX_VARIABLE, "AVX512_CORE_FP16")


def amx_is_doubtful() -> bool:
    """Whether this is a virtual machine that announces AMX."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text() if cpu.exists() else ""
    return "amx_bf16" in flags and "hypervisor" in flags


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy() -> bool:
    """Whether programs use the cores, or did a minute ago."""
    return os.getloadavg()[0] > BUSY * available_cores()


def available_memory() -> tuple[int, str]:
    """Bytes that this process can still use, and what limits them: the machine, a control group, or `ulimit -v`."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found = [(1024 * int(fields["MemAvailable"].split()[0]), "of this machine")]
        found += [(limit, "of this control group (container)") for limit in _group_limits()]
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            found.append((limit - used, "of this process (ulimit -v)"))
        return max(0, min(found)[0]), min(found)[1]
    return sys.maxsize, "of this machine"


def _group_limits(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Bytes that the control groups of this process, and those around them, still allow. Version 2 has one tree, version 1
    a separate one for memory. Within a container the path is that of the host, and the group is the root."""
    for line in groups.read_text().splitlines() if groups.exists() else ():
        kinds, path = line.split(":", 2)[1:]
        if kinds == "":
            tree, names = root, ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            tree, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = tree / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(tree):
                break
            with contextlib.suppress(OSError, ValueError):  # not here, or "max"
                limit, used = (int((folder / name).read_text()) for name in names)
                if limit < 1 << 60:  # version 1 has a huge number for no limit
                    yield limit - used


def peak_memory() -> int:
    """Peak memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
