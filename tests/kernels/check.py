"""All kernels under the sanitizers of gcc and clang, and for arm64: make kernels-check. Words choose runs by name.

Two kinds of runs: every_kernel.c, a program of its own, and the tests of the kernels in a Python whose library of a
sanitizer is loaded first. A compiler or emulator that is not installed is named and left out. docs/kernels.md says what the
thread sanitizer can see.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from handgrad.kernels import compiler, library

HERE = Path(__file__).parent
TESTS = HERE.parent
PROGRAM, POSIX_THREADS = HERE / "every_kernel.c", HERE / "threads.c"
MATH = [flag for flag in compiler.FLAGS if flag.startswith(("-f", "-std")) and flag != "-fPIC"]
CHECKED = ("-g", "-fno-sanitize-recover=all")
ADDRESS = (*CHECKED, "-fsanitize=address,undefined,float-cast-overflow")
THREAD = (*CHECKED, "-fsanitize=thread")
ROUNDING = {"float": 1e-5, "double": 1e-12}  # relative to the largest number of a result
# What calls kernels in one process. The tests of files and compilers start other processes, without a sanitizer.
PYTHON_TESTS = (
    "kernels/test_kernels.py",
    "kernels/test_arguments.py",
    "ops/test_mixed.py",
    "ops/test_packed.py",
    "model/test_token_block.py",
)

Results = list[tuple[str, list[float]]]


def results(words: list[str], real: str, folder: Path, run: tuple[str, ...] = (), **environment: str) -> Results:
    """Compile every_kernel.c with the kernels, run it, and read what it prints. Raises if a sanitizer reports anything."""
    out = folder / "every_kernel"
    sources = map(str, (PROGRAM, *compiler.sources(real)))
    printed([*words, *MATH, "-fopenmp", f"-DREAL={real}", *sources, "-o", str(out), "-lm"])
    done = subprocess.run([*run, str(out)], capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[:5000]
    return [(name, list(map(float, x))) for name, *x in (line.split("\t") for line in done.stdout.splitlines())]


def compare(found: Results, expected: Results, real: str) -> None:
    """Raises if two builds differ by more than rounding."""
    assert [(name, len(x)) for name, x in found] == [(name, len(x)) for name, x in expected]
    for (name, x), (_, y) in zip(found, expected, strict=True):
        error = max(abs(a - b) for a, b in zip(x, y, strict=True)) / max(map(abs, y))
        assert error <= ROUNDING["float" if "packed" in name else real], (
            f"{name} differs by {error:.1e}"
        )  # always floats


def sanitized(words: list[str], sanitizer: str, real: str, folder: Path) -> Results:
    """The results under a sanitizer, "address" or "thread"."""
    if sanitizer == "address":
        return results([*words, "-O1", *ADDRESS], real, folder)  # compiled in a third of the time of -O3
    if not is_clang(words):  # gcc's own library of threads is not known to the sanitizer
        return results([*words, "-O1", *THREAD, str(POSIX_THREADS)], real, folder)
    archer = Path(printed([*words, "-print-resource-dir"])).parents[1] / "libarcher.so"
    assert archer.exists(), f"there is no {archer}, without which every sum would be reported"
    settings = {
        "OMP_TOOL_LIBRARIES": str(archer),
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
        "OMP_NUM_THREADS": "3",
    }
    return results([*words, "-O1", *THREAD], real, folder, **settings)


def is_clang(words: list[str]) -> bool:
    return "clang" in printed([*words, "--version"])


def printed(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def python_tests(name: str, flags: tuple[str, ...], runtime: str, folder: Path) -> None:
    """The tests, with kernels that were compiled with these flags, in a Python that has loaded the sanitizer first."""
    settings = {"CC": name, "HANDGRAD_CFLAGS": " ".join(flags), "HANDGRAD_CACHE": str(folder), "OMP_NUM_THREADS": "1"}
    settings |= {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1", "ASAN_OPTIONS": "detect_leaks=0"}
    os.environ |= settings
    for cached in (compiler.version, library._path):
        cached.cache_clear()
    for real in library.REAL.values():
        library._compile(real, library._path(real))  # here: the compiler itself need not be watched
    tests = [str(TESTS / test) for test in PYTHON_TESTS]
    # Loops that the thread sanitizer watches are not vectorized, and in scalar code gcc rounds exp more.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests, "-k", "not exp_is_exact"]
    # The sanitizer looks for C++'s exceptions, which torch throws, when it is loaded: before Python loads torch.
    first = ":".join(printed([name, f"-print-file-name={file}"]) for file in (runtime, "libstdc++.so.6"))
    subprocess.run(command, check=True, env=os.environ | {"LD_PRELOAD": first}, cwd=TESTS.parent)


def runs() -> Iterator[tuple[str, Callable[[Path], object] | None]]:
    """What is checked: its name, and what to call with an empty folder; None if a program for it is missing."""
    expected: dict[str, Results] = {}
    for real in ROUNDING:

        def plain(folder: Path, real: str = real) -> None:
            words = compiler.command()
            assert words is not None, "there is no C compiler"
            expected[real] = results([*words, "-O3", *compiler._processor_flags()], real, folder)

        yield f"every kernel, {real}", plain
        for name in ("gcc", "clang"):
            for sanitizer in ("address", "thread"):

                def check(folder: Path, name: str = name, sanitizer: str = sanitizer, real: str = real) -> None:
                    compare(sanitized([name], sanitizer, real, folder), expected[real], real)

                yield f"every kernel, {real}, {name}, {sanitizer} sanitizer", check if shutil.which(name) else None

        def arm(folder: Path, real: str = real) -> None:
            words = ["aarch64-linux-gnu-gcc", "-O3", "-static"]
            compare(results(words, real, folder, ("qemu-aarch64-static",)), expected[real], real)

        installed = shutil.which("aarch64-linux-gnu-gcc") and shutil.which("qemu-aarch64-static")
        yield f"every kernel, {real}, arm64, emulated", arm if installed else None
    for name, sanitizer, flags, runtime in (
        ("gcc", "address", ADDRESS, "libasan.so"),
        ("clang", "address", (*ADDRESS, "-shared-libsan"), f"libclang_rt.asan-{platform.machine()}.so"),
        ("gcc", "thread", (*THREAD, str(POSIX_THREADS)), "libtsan.so"),
    ):

        def tests(folder: Path, name: str = name, flags: tuple[str, ...] = flags, runtime: str = runtime) -> None:
            python_tests(name, flags, runtime, folder)

        yield f"tests in Python, {name}, {sanitizer} sanitizer", tests if shutil.which(name) else None


def main() -> None:
    failed = 0
    for name, call in runs():
        if not all(word in name for word in sys.argv[1:]):
            continue
        if call is None:
            print(f"LEFT OUT, not installed: {name}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                call(Path(folder))
                print(f"clean: {name}", flush=True)
            except (AssertionError, subprocess.CalledProcessError) as error:
                failed += 1
                print(f"FAILED: {name}\n{error}\n{getattr(error, 'stderr', None) or ''}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
