"""Compile the C files of this folder for the machine at hand, once, and load the result.

The result lies in the cache, named by a hash of source, flags, compiler, processor and user: another machine with the same
home folder makes its own. It ends with a digest of itself and its name, which every load checks. What is damaged or
exchanged, or belongs to another user or may be written by one, is never loaded but compiled again.
HANDGRAD_KERNELS=0 switches kernels off; so does a compiler that is missing or fails, which `prepare` reports.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import HandgradError
from ..files.atomic import LEFTOVER, new_file, rename_onto
from ..files.cache import cache_path
from . import compiler, signatures

# A library by the dtype of the operands of products. Those in bfloat16 are computed with in float32.
REAL = {torch.float32: "float", torch.float64: "double", torch.bfloat16: compiler.MIXED}
LARGEST = 1 << 26  # bytes of a compiled file

_switched_on = os.environ.get("HANDGRAD_KERNELS", "1") != "0"
_allowed: ContextVar[bool] = ContextVar("kernels_allowed", default=_switched_on)


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
        say(f"no compiled kernels, torch computes instead, more slowly: {_failures[dtype]}")


def prepared(dtype: torch.dtype) -> bool:
    """Whether nothing has to be compiled before the kernels for this dtype can run, or they cannot run at all."""
    if dtype not in REAL or not allowed():
        return True
    try:
        handle = _open(_path(REAL[dtype]))
    except compiler.CompilerError:
        return True
    if handle is not None:
        os.close(handle)
    return handle is not None


_failures: dict[torch.dtype, str] = {}  # why there are no kernels


@cache
def load(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled kernels for a dtype; None if there are none for it, or they cannot be compiled. Raises if something else
    has their name and stays there."""
    if dtype not in REAL:
        return None
    try:
        return _load(REAL[dtype])
    except (compiler.CompilerError, OSError) as error:
        _failures[dtype] = str(error)
        return None


def why_not(dtype: torch.dtype) -> str | None:
    """Why there are no kernels for a dtype; None if there are. Not asked again in a context that disables them."""
    if not _switched_on:
        return "HANDGRAD_KERNELS=0 switches kernels off"
    if load(dtype) is not None:
        return None
    return _failures.get(dtype, "there are none for this dtype")


def _load(real: str) -> ctypes.CDLL:
    path = _path(real)
    handle = _open(path)
    if handle is None:
        try:
            _compile(real, path)
        except (compiler.CompilerError, OSError):
            if not os.path.lexists(path):
                raise
        handle = _open(path)
    if handle is None:
        raise HandgradError(
            f"{path} is not what handgrad compiled, and cannot be replaced: delete it, or name another cache folder in"
            " HANDGRAD_CACHE"
        )
    # The file that was checked, whatever has its name now. It stays open: the loader knows a library by its path, and would
    # take another one under a number that is free again for this one.
    checked = Path(f"/proc/self/fd/{handle}")
    if _has_own_threads():
        os.environ.setdefault("KMP_BLOCKTIME", "0")  # milliseconds for which idle threads keep torch's from their cores
    try:
        return ctypes.CDLL(str(checked if checked.exists() else path))
    except OSError:
        os.close(handle)
        raise


def function(name: str, dtype: torch.dtype) -> Any:
    """A kernel of signatures.py, to be called with integers and floats."""
    library = load(dtype)
    assert library is not None
    kernel = signatures.declared(library, name)
    if not _has_own_threads():
        return kernel

    def with_torch_threads(*arguments: int | float) -> int:
        library.omp_set_num_threads(torch.get_num_threads())
        return kernel(*arguments)  # type: ignore[no-any-return]

    return with_torch_threads


def _has_own_threads() -> bool:
    """Whether the kernels have threads besides those of torch: clang knows its own OpenMP library only, and on Linux torch
    uses that of gcc."""
    return sys.platform == "linux" and compiler.is_clang()


@cache
def _path(real: str) -> Path:
    """Where the compiled kernels belong. Raises CompilerError without a compiler."""
    key = hashlib.sha256()
    sources = [path.read_bytes() for path in (*compiler.HEADERS, *compiler.FILES)]
    user = str(os.geteuid())  # several users may share a cache, but not kernels
    for part in (compiler.version(), " ".join(compiler.flags(real)), _processor(), user):
        sources.append(part.encode())
    for part_bytes in sources:
        key.update(hashlib.sha256(part_bytes).digest())
    return cache_path("kernels", f"kernels-{real}-{key.hexdigest()[:16]}.so")


def path_beside(dtype: torch.dtype, ending: str) -> Path:
    """A file beside the kernels for a dtype, for what belongs to them and depends on the same."""
    return _path(REAL[dtype]).with_suffix(ending)


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


@cache
def multiplies_bytes() -> bool:
    """Whether one instruction adds 64 products of bytes: then products of many rows in 8 bits are the fastest."""
    return "avx512_vnni" in _processor()


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


def _compile(real: str, path: Path) -> None:
    """Compile beside `path`, then rename: several processes may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        new_file(path.parent) as file,
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{LEFTOVER}new.{os.getpid()}.") as folder,
    ):
        out, log = Path(folder) / "kernels.so", path.with_suffix(".log")
        compiler.build(real, out, log)
        compiled = out.read_bytes()
        file.write(compiled + _digest(path, compiled))
        os.chmod(file.name, stat.S_IRUSR | stat.S_IWUSR)
        rename_onto(file, path)
        log.unlink(missing_ok=True)  # of an earlier failure
