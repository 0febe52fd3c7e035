"""The C compiler of this machine: which one it is, its flags for this processor, and what it says if it fails.

gcc and clang, on Linux and macOS. $CC names another one, $HANDGRAD_CFLAGS holds flags that are added to ours.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

from ..files.atomic import write_text

FILES = sorted(Path(__file__).parent.glob("*.c"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
# Sums may be reordered, so that they become vector instructions. NaN and infinity keep their meaning. -ffast-math is not
# among the flags: it would also switch denormal numbers off in the whole process.
FLAGS = (
    "-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=fast", "-fassociative-math",
    "-fno-signed-zeros", "-fno-trapping-math", "-freciprocal-math", "-fno-math-errno",
)  # fmt: skip


MIXED = "mixed"  # a library of floats whose products have operands in bfloat16
_OF_MIXED = ("attention.c", "elementwise.c", "mixed.c")


def sources(real: str) -> list[Path]:
    """The C files of a library: of a C type, or MIXED."""
    if real == MIXED:
        return [path for path in FILES if path.name in _OF_MIXED]
    return [path for path in FILES if path.name != "mixed.c"]


class CompilerError(Exception):
    """Why there are no compiled kernels, in one line."""


def command() -> list[str] | None:
    """The C compiler with its arguments: $CC, or if it is not set cc, gcc or clang on the PATH."""
    given = shlex.split(os.environ.get("CC", ""))
    for words in [given] if given else (["cc"], ["gcc"], ["clang"]):
        if found := shutil.which(words[0]):
            return [found, *words[1:]]
    return None


@cache
def version() -> str:
    """What the compiler says of itself. Raises CompilerError without one."""
    return _run(["--version"])


def is_clang() -> bool:
    return "clang" in version()


def flags(real: str) -> list[str]:
    """All flags, for kernels of the C type `real`, or MIXED."""
    given = shlex.split(os.environ.get("HANDGRAD_CFLAGS", ""))
    types = ["-DREAL=float", "-DMIXED"] if real == MIXED else [f"-DREAL={real}"]
    return [*types, *FLAGS, *_processor_flags(), *_openmp_flags(), *given]


def _processor_flags() -> list[str]:
    """Flags for all instructions that this processor has."""
    if platform.machine() in ("x86_64", "AMD64"):
        return ["-march=native"]
    if platform.machine() in ("aarch64", "ppc64le"):
        return ["-mcpu=native"]
    return []  # on a Mac, arm64 is the processor that all of them have; others have no common flag


def _openmp_flags() -> list[str]:
    """Flags for OpenMP. A Mac's compiler has neither a flag nor a library for it: torch's own is linked."""
    if platform.system() != "Darwin" or not is_clang():
        return ["-fopenmp"]
    folder = Path(torch.__file__).parent / "lib"
    return ["-Xpreprocessor", "-fopenmp", str(folder / "libomp.dylib"), f"-Wl,-rpath,{folder}"]


def build(real: str, out: Path, log: Path) -> None:
    """Compile the C files of a library into `out`. If that fails, `log` gets the output, and the error its first line."""
    _run([*map(str, sources(real)), "-o", str(out), *flags(real), "-lm"], log)


def _run(arguments: list[str], log: Path | None = None) -> str:
    """The output of the compiler. Raises CompilerError, with the first line that speaks of an error, if it fails."""
    compiler = command()
    if compiler is None:
        given = os.environ.get("CC", "").strip()
        reason = f"CC={given} names no program" if given else "there is no C compiler (cc, gcc, clang)"
        raise CompilerError(f"{reason}: install one, or name it in CC")
    words = [*compiler, *arguments]
    try:
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=300
        )
        output, status = done.stdout, f"exit status {done.returncode}"
        if done.returncode == 0:
            return output
    except subprocess.TimeoutExpired as late:
        output, status = "", f"no end within {late.timeout:.0f} seconds"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if found := re.search(r"#error (.+)", line):  # in our own words: what this machine lacks
            raise CompilerError(found[1])
    errors = [line for line in lines if re.search("error|cannot find", line, re.IGNORECASE)]  # the second by a linker
    said = [*errors, *lines, "it printed nothing"][0]
    where = ""
    if log is not None:
        try:
            write_text(log, f"{shlex.join(words)}\n{status}\n{output}")
            where = f"; everything it said is in {log}"
        except OSError as error:
            where = f"; its output cannot be written to {log}: {error.strerror}"
    raise CompilerError(f"{Path(words[0]).name} failed ({status}): {said}{where}")
