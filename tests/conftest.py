"""Shared helpers: tolerances, models and batches, and functions that run the command line."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import handgrad as hg
from forked import hurry
from handgrad.cli.app import main
from handgrad.files import manifest
from handgrad.files.cache import cache_path
from handgrad.kernels import library
from handgrad.model.config import ACTIVATIONS
from handgrad.text import tokenizer
from handgrad.tolerances import TOLERANCE as TOLERANCE
from processes import Processes, own_data
from spent import Spent

torch.set_num_threads(1)  # the matrices are too small to gain from more threads
hurry()

# Relative tolerance of a single op, by dtype. It does not depend on the scale of the inputs.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
ATTENTION_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}  # with large scores
COMPILED = cache_path("kernels")  # before a test chooses another cache
SCALES = [1e-8, 1e-4, 1.0, 1e3]
OTHER_ACTIVATIONS = [
    name for name in ACTIVATIONS if name != hg.preset("nano").activation
]  # of plain feed-forward layers
GOLDEN = (5**0.5 - 1) / 2  # the fractional parts of its multiples are even, and have no period
BROWSER_WANTED = os.environ.get("BROWSER") != "0"
CHROMIUM = next(
    (
        path
        for name in ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")  # fastest first
        if BROWSER_WANTED and (path := shutil.which(name))
    ),
    None,
)


def need_chromium() -> str:
    """The path of Chromium. Without it the test is skipped and named in the summary, or fails in CI."""
    if CHROMIUM is None and (os.environ.get("CI") != "true" or not BROWSER_WANTED):
        why = "no Chromium found" if BROWSER_WANTED else "BROWSER=0"
        pytest.skip(f"{why}: the tests in a real browser were LEFT OUT")
    assert CHROMIUM is not None, (
        "CI=true but no Chromium found: install it (apt-get install chromium), or set BROWSER=0"
    )
    return CHROMIUM


def need_node() -> str:
    """The path of node. Without it the test is skipped and named in the summary, or fails in CI."""
    node = shutil.which("node")
    if node is None and os.environ.get("CI") != "true":
        pytest.skip("no node found: the tests of the explain page's JavaScript were LEFT OUT")
    assert node is not None, "CI=true but node is missing: install it (apt-get install nodejs)"
    return node


def rounded(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Random float64 numbers that `dtype` represents exactly, so that an op and its reference get equal inputs."""
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype).double()


def norm_inputs(
    n: int, d: int, scale: float, shift: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, Δ (n, d) around `shift · scale` and gains w (d) around 1, in float64, as `dtype` represents them."""
    a, delta = (((shift + x) * scale).to(dtype).double() for x in torch.randn(2, n, d).double())
    return a, delta, (1 + rounded(d, dtype=dtype, scale=1e-2)).to(dtype).double()


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64, **shape: object) -> hg.GPT:
    """A small model with large random weights, biases and gains: errors would be invisible with N(0, 0.02)."""
    config = hg.preset("nano", **{"n_vocab": 11, "n_context": 16, "d_model": 12, "n_heads": 3, "n_blocks": 1, **shape})
    model = hg.GPT(config, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def perturb(network: torch.nn.Module, seed: int = 1, scale: float = 0.3) -> None:
    """Add N(0, scale²) to every trainable parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            if p.requires_grad:
                p.add_(scale * torch.randn(p.shape, generator=generator).to(p.dtype))


def link_kernels(cache: Path) -> None:
    """Let a new cache folder have the kernels of this machine, so that processes that use it need not compile them again."""
    cache.mkdir(parents=True, exist_ok=True)
    (cache / COMPILED.name).symlink_to(COMPILED)


def use_empty_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Set HANDGRAD_CACHE to a folder that is empty except for the kernels."""
    link_kernels(folder)
    monkeypatch.setenv("HANDGRAD_CACHE", str(folder))


def save_as_others(model: hg.GPT, folder: Path, **options: object) -> None:
    """Save a model without handgrad's manifest, as other tools do, so that a test may edit its files."""
    hg.save(model, folder, **options)  # type: ignore[arg-type]
    (folder / manifest.FILE).unlink()


def save_adapter(model: hg.GPT, folder: Path, seed: int = 1, scale: float = 0.3, **options: Any) -> None:
    """Inject an adapter of rank 2 unless the options say otherwise, move it away from its initial values, and save it."""
    hg.lora.inject(model, **{"rank": 2, **options})
    perturb(model, seed, scale)
    hg.lora.save(model, folder)


def save_with_bytes(model: hg.GPT, folder: Path) -> None:
    """Save a model whose tokens are bytes, with its tokenizer."""
    hg.save(model, folder)
    tokenizer.make("bytes", []).write(folder)


def handgrad(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `handgrad ARGUMENTS` in this process, which saves the start-up time of a new one."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["handgrad", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(["handgrad", *arguments], code, out.getvalue(), err.getvalue())


def succeed(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `handgrad ARGUMENTS`, which must not fail."""
    done = handgrad(*arguments)
    assert done.returncode == 0, done.stderr
    return done


def error_of(*arguments: object) -> str:
    """The line with which `handgrad ARGUMENTS` fails."""
    done = handgrad(*arguments)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, (done.stdout, done.stderr)
    return done.stderr


def plan_of(*arguments: object) -> dict[str, Any]:
    """What `handgrad plan ARGUMENTS` writes as JSON."""
    found: dict[str, Any] = json.loads(succeed("plan", *arguments, "--json", "-").stdout)
    return found


@cache
def fork_server() -> subprocess.Popen[str]:
    """A process that has imported what commands need, and forks: a new interpreter takes seconds to import it."""
    script = [sys.executable, str(Path(__file__).parent / "forked.py")]
    return subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def run_processes(
    n: int, *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command or a script in n processes of one group; much faster to start than torchrun."""
    server = fork_server()
    assert server.stdin is not None and server.stdout is not None
    words = list(map(str, arguments))
    environment = environment or os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "std"
        request = {"processes": n, "arguments": words, "folder": os.getcwd(), "output": str(output)}
        server.stdin.write(json.dumps({**request, "environment": dict(environment)}) + "\n")
        code = int(server.stdout.readline())
        shown = [output.with_suffix(suffix).read_text() for suffix in (".out", ".err")]
    return subprocess.CompletedProcess(words, code, *shown)


def make_batch(
    model: hg.GPT, lengths: list[int], seed: int = 0, ignored: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random packed tokens and targets; a fraction `ignored` of the targets, but never all, is -100."""
    generator = torch.Generator().manual_seed(seed)
    n, v = sum(lengths), model.config.n_vocab
    tokens = torch.randint(v, (n,), generator=generator)
    targets = torch.randint(v, (n,), generator=generator)
    targets[torch.rand(n, generator=generator) < ignored] = -100
    targets[n // 2] = tokens[0]
    return tokens, targets


def pytest_unconfigure() -> None:
    if fork_server.cache_info().currsize:
        fork_server().communicate()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, help="run the tests in so many processes")
    parser.addoption("--spent", type=int, default=0, help="show so many files and tests with the most processor time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In make test leave out the tests marked `long`, and of a test marked `some_cases(n)` keep about one case in n, the
    first among them. Their distances vary: at equal ones some values of a parameter might never be chosen."""
    if os.environ.get("HANDGRAD_CASES") != "some":
        return
    seen = Counter[str]()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        some = item.get_closest_marker("some_cases")
        chosen = some is None or seen[test] * GOLDEN % 1 < 1 / some.args[0]
        (kept if chosen and not item.get_closest_marker("long") else left).append(item)
        seen[test] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels once, before the workers start and before a test chooses another cache."""
    for dtype in library.REAL:
        library.load(dtype)
    own_data(config)
    if n := config.getoption("processes"):
        config.pluginmanager.register(Processes(n))
    if n := config.getoption("spent"):
        config.pluginmanager.register(Spent(n))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test of an op runs twice: with compiled kernels, and with torch calls only."""
    if metafunc.definition.path.parent.name == "ops":
        metafunc.parametrize("computed_by", ["kernels", "torch"], indirect=True)


@pytest.fixture(autouse=True)
def computed_by(request: pytest.FixtureRequest) -> Iterator[None]:
    with library.disabled() if getattr(request, "param", "") == "torch" else contextlib.nullcontext():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the reasons of tests that were LEFT OUT in red at the end."""
    reasons = {
        report.longrepr[2] for report in terminalreporter.stats.get("skipped", []) if "LEFT OUT" in str(report.longrepr)
    }
    for reason in sorted(reasons):
        terminalreporter.write_sep("!", reason.removeprefix("Skipped: "), red=True, bold=True)
