"""The process: its cores and peak memory, and settings made before torch is imported (instruction set, allocator, page
size, waiting threads)."""

import contextlib
import ctypes
import os
import resource
from pathlib import Path


def configure_runtime() -> None:
    """Apply all settings of this module. Call it before importing torch."""
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

    If another process uses a core, threads wait for the one on that core; spinning, they keep it from running. Sleeping at
    once would cost a small model half its speed on an idle machine. libgomp, torch's thread pool, reads the
    variable when torch is imported. No-op if the user set a waiting policy."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def disable_amx_in_virtual_machines() -> None:
    """Make oneDNN avoid AMX in virtual machines: some announce it and then kill the process at the first bfloat16 matmul.

    oneDNN reads the variable once, before its first matmul. No-op if the user set it."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text() if cpu.exists() else ""
    if "amx_bf16" in flags and "hypervisor" in flags:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def available_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def peak_memory() -> int:
    """Peak memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
