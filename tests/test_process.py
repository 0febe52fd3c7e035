"""Settings of the process: importing handgrad changes none, commands and `hg.configure_runtime` do."""

import json
import os
import subprocess
import sys

import pytest

from handgrad import machine

SETTINGS = ("THP_MEM_ALLOC_ENABLE", "ONEDNN_MAX_CPU_ISA", "GOMP_SPINCOUNT")
SHOW = """
import ctypes, json, os, sys
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd b1 b2 b3 b4 b5".split()]
libc.mallinfo2.restype = Info
def maps_large_buffers():
    before = libc.mallinfo2().hblks
    libc.malloc(16_000_000)
    return libc.mallinfo2().hblks > before
def show():
    names = json.loads(sys.argv[-1])
    print(json.dumps([{n: os.environ[n] for n in names if n in os.environ}, maps_large_buffers()]))
"""


def settings_after(code: str, **given: str) -> tuple[dict[str, str], bool]:
    """The variables of a process that runs this, and whether it maps a large buffer, as the C library does by default."""
    own = {n: x for n, x in os.environ.items() if n not in SETTINGS and not n.startswith(("MALLOC_", "OMP_"))}
    program = [sys.executable, "-c", f"{SHOW}\n{code}\nshow()", json.dumps(SETTINGS)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, env=own | given)
    found, maps = json.loads(done.stdout.splitlines()[-1])
    return found, maps


USE = """
import importlib, pkgutil, handgrad as hg, torch
for module in pkgutil.iter_modules(hg.__path__):
    if module.name != "__main__": importlib.import_module(f"handgrad.{module.name}")
model = hg.GPT(hg.preset("nano", n_vocab=5, n_context=4, d_model=4, n_heads=1, n_blocks=1))
model.loss_and_grads(torch.zeros(1, 4).long(), torch.zeros(1, 4).long())
"""
COMMAND = """
from handgrad.cli.app import main
sys.argv[1:], arguments = ["plan", "--model", "nano"], sys.argv[1:]
try: main()
except SystemExit: pass
sys.argv[1:] = arguments
"""


def test_importing_and_using_the_library_changes_nothing() -> None:
    assert settings_after(USE) == ({}, True)


@pytest.mark.parametrize("code", ["import handgrad as hg; hg.configure_runtime()", COMMAND])
def test_commands_and_scripts_that_ask_configure_the_process(code: str) -> None:
    found, maps = settings_after(code)
    assert found.pop("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16") == "AVX512_CORE_FP16"  # on some machines
    assert found == {"THP_MEM_ALLOC_ENABLE": "1", "GOMP_SPINCOUNT": "10000"} and not maps


def test_settings_of_the_user_stay() -> None:
    given = {"THP_MEM_ALLOC_ENABLE": "0", "ONEDNN_MAX_CPU_ISA": "AVX2", "MALLOC_ARENA_MAX": "4", "GOMP_SPINCOUNT": "7"}
    found, maps = settings_after("import handgrad as hg; hg.configure_runtime()", **given)
    assert found == {"THP_MEM_ALLOC_ENABLE": "0", "ONEDNN_MAX_CPU_ISA": "AVX2", "GOMP_SPINCOUNT": "7"} and maps


def test_spinning_is_limited_unless_the_user_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({}, {"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        machine.limit_spinning()
        expected = given or {"GOMP_SPINCOUNT": "10000"}
        assert {n: os.environ[n] for n in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if n in os.environ} == expected
