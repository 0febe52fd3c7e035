"""What must be settled about the machine before the first number runs on it."""

import contextlib
import ctypes
import os
from pathlib import Path


def settle() -> None:
    do_without_amx_in_virtual_machines()
    keep_freed_memory()
    ask_for_large_pages()


def keep_freed_memory() -> None:
    """A training step asks for the same large buffers again and again. glibc would give each back to the system and get
    it anew, page by page, at about a tenth of the step's time; told not to, it hands them out again. Whoever has set
    one of its own variables (MALLOC_…) has decided."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 1 << 25)  # the largest it takes; what is larger comes and goes, and leaves no holes


def give_back_freed_memory() -> None:
    """Let the system have what `keep_freed_memory` has gathered, where low memory counts more than a few milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def ask_for_large_pages() -> None:
    """torch asks the system for pages of 2 MB instead of 4 kB for its larger tensors if this is set before it makes the
    first one: a hundredth of the page faults, and products that miss fewer addresses."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def do_without_amx_in_virtual_machines() -> None:
    """Some virtual machines promise AMX and then trap on it, which ends the process at the first bfloat16 product.
    oneDNN reads this variable once, before its first product; whoever has set it has decided."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text() if cpu.exists() else ""
    if "amx_bf16" in flags and "hypervisor" in flags:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
