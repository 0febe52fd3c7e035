"""Compile the C files of this folder for the machine at hand, once, and load the result.

The result lies in the cache, named by a hash of source, flags, compiler and processor, so that another machine with the same
home folder makes its own. HANDGRAD_KERNELS=0 switches kernels off; so does a missing compiler, or one without OpenMP.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch

from ..files.cache import cache_path

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
REAL = {torch.float32: "float", torch.float64: "double"}
# Sums may be reordered, so that they become vector instructions. NaN and infinity keep their meaning. -ffast-math is not
# among the flags: it would also switch denormal numbers off in the whole process.
FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fopenmp", "-fassociative-math", "-fno-signed-zeros",
    "-fno-trapping-math", "-freciprocal-math", "-fno-math-errno",
)  # fmt: skip

_allowed: ContextVar[bool] = ContextVar("kernels_allowed", default=os.environ.get("HANDGRAD_KERNELS", "1") != "0")


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """In this context `ops` uses torch calls only."""
    token = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(token)


def allowed() -> bool:
    return _allowed.get()


def prepare(dtype: torch.dtype, say: Callable[[str], None]) -> None:
    """Compile before the first step, with a message, so that no step waits; say so if that is not possible."""
    if not prepared(dtype):
        say("compiling kernels for this machine (once, a few seconds)")
    if dtype in REAL and allowed() and load(dtype) is None:
        say(
            "no compiled kernels: no C compiler with OpenMP (cc, gcc, clang, or what CC names) works here; torch computes"
            " instead, more slowly"
        )


def prepared(dtype: torch.dtype) -> bool:
    """Whether nothing has to be compiled before the kernels for this dtype can run, or they cannot run at all."""
    if dtype not in REAL or not allowed():
        return True
    path = _path(REAL[dtype])
    return path is None or path.exists()


@cache
def load(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled kernels for a dtype; None if there are none for it, or they cannot be compiled."""
    if dtype not in REAL:
        return None
    path = _path(REAL[dtype])
    if path is None or not (path.exists() or _compile(REAL[dtype], path)):
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def compiler() -> str | None:
    """The C compiler: $CC, or cc, gcc or clang on the PATH."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


@cache
def _path(real: str) -> Path | None:
    """Where the compiled kernels belong; None without a compiler."""
    with_ = compiler()
    if with_ is None:
        return None
    try:
        version = subprocess.run([with_, "--version"], capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    key = hashlib.sha256()
    sources = [path.read_bytes() for path in (*HEADERS, *SOURCES)]
    for part in (*sources, " ".join((*FLAGS, real)).encode(), version, _processor().encode()):
        key.update(hashlib.sha256(part).digest())
    return cache_path("kernels", f"kernels-{real}-{key.hexdigest()[:16]}.so")


@cache
def multiplies() -> bool:
    """Whether matrix products should be ours: on processors of AMD with AVX-512 the library of torch is slower. Decided by
    the processor, not by a measurement, so that a machine always computes the same bits. HANDGRAD_PRODUCTS=own or torch
    decides by hand."""
    given = os.environ.get("HANDGRAD_PRODUCTS", "")
    if given in ("own", "torch"):
        return given == "own"
    with contextlib.suppress(OSError):
        info = Path("/proc/cpuinfo").read_text()
        return "AuthenticAMD" in info and "avx512f" in info
    return False


def _processor() -> str:
    """Model and instruction sets of the processor."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        chosen = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
        return platform.machine() + "".join(sorted(chosen))
    return platform.machine() + platform.processor()


def _compile(real: str, path: Path) -> bool:
    """Compile beside `path`, then rename: several processes may do so at the same time."""
    with_ = compiler()
    assert with_ is not None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            out = Path(folder) / "kernels.so"
            command = [with_, *FLAGS, f"-DREAL={real}", *map(str, SOURCES), "-o", str(out), "-lm"]
            subprocess.run(command, capture_output=True, check=True, timeout=300)
            os.replace(out, path)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
