"""Compile the C files of this folder for the machine at hand, once, and load the result.

The result lies in the cache, named by a hash of source, flags, compiler, processor and user: another machine with the same
home folder makes its own. It ends with a digest of itself and its name, which every load checks. What is damaged or
exchanged, or belongs to another user or may be written by one, is never loaded but compiled again.
HANDGRAD_KERNELS=0 switches kernels off; so does a missing compiler, or one without OpenMP.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch

from ..errors import HandgradError
from ..files.atomic import LEFTOVER, new_file, rename_onto
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

LARGEST = 1 << 26  # bytes of a compiled file

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
    if path is None:
        return True
    handle = _open(path)
    if handle is not None:
        os.close(handle)
    return handle is not None


@cache
def load(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled kernels for a dtype; None if there are none for it, or they cannot be compiled. Raises if something else
    has their name and stays there."""
    if dtype not in REAL:
        return None
    path = _path(REAL[dtype])
    if path is None:
        return None
    handle = _open(path)
    if handle is None and _compile(REAL[dtype], path):
        handle = _open(path)
    if handle is None:
        if os.path.lexists(path):
            raise HandgradError(
                f"{path} is not what handgrad compiled, and cannot be replaced: delete it, or name another cache folder in"
                " HANDGRAD_CACHE"
            )
        return None
    # The file that was checked, whatever has its name now. It stays open: the loader knows a library by its path, and would
    # take another one under a number that is free again for this one.
    checked = Path(f"/proc/self/fd/{handle}")
    try:
        return ctypes.CDLL(str(checked if checked.exists() else path))
    except OSError:
        os.close(handle)
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
    user = str(os.geteuid()).encode()  # several users may share a cache, but not kernels
    for part in (*sources, " ".join((*FLAGS, real)).encode(), version, _processor().encode(), user):
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


def _open(path: Path) -> int | None:
    """Open compiled kernels; None if there are none, or they are not what this user has compiled."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(handle)
        own = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISREG(status.st_mode) and own and status.st_size <= LARGEST:
            with open(handle, "rb", closefd=False) as file:
                content = file.read(LARGEST)
            if _digest(path, content[:-DIGEST_BYTES]) == content[-DIGEST_BYTES:]:
                return handle
    except OSError:
        pass
    os.close(handle)
    return None


DIGEST_BYTES = hashlib.sha256().digest_size


def _digest(path: Path, compiled: bytes) -> bytes:
    """Of the name too: kernels for another dtype or processor are whole, and wrong here."""
    return hashlib.sha256(path.name.encode() + compiled).digest()


def _compile(real: str, path: Path) -> bool:
    """Compile beside `path`, then rename: several processes may do so at the same time."""
    with_ = compiler()
    assert with_ is not None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            new_file(path.parent) as file,
            tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{LEFTOVER}new.{os.getpid()}.") as folder,
        ):
            out = Path(folder) / "kernels.so"
            command = [with_, *FLAGS, f"-DREAL={real}", *map(str, SOURCES), "-o", str(out), "-lm"]
            subprocess.run(command, capture_output=True, check=True, timeout=300)
            compiled = out.read_bytes()
            file.write(compiled + _digest(path, compiled))
            os.chmod(file.name, stat.S_IRUSR | stat.S_IWUSR)
            rename_onto(file, path)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
