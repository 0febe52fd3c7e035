"""What must be settled about the machine before the first number runs on it."""

import os
from pathlib import Path


def do_without_amx_in_virtual_machines() -> None:
    """Some virtual machines promise AMX and then trap on it, which ends the process at the first bfloat16 product.
    oneDNN reads this variable once, before its first product; whoever has set it has decided."""
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text() if cpu.exists() else ""
    if "amx_bf16" in flags and "hypervisor" in flags:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
