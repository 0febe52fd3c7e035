"""What every test shares: the table of tolerances, and models with weights large enough that nothing is nearly zero."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import handgrad as hg
from handgrad.cli.app import main
from handgrad.files import manifest
from handgrad.tolerances import TOLERANCE as TOLERANCE

torch.set_num_threads(1)  # the matrices are small: a second thread would only wait

# Largest relative error of a single op, which rounds only a few times, for inputs of any size.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
ATTENTION_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}  # with large scores
SCALES = [1e-8, 1e-4, 1.0, 1e3]


def rounded(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Random numbers in float64 that `dtype` represents exactly, so that the op and its reference read the same."""
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype).double()


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64, **shape: object) -> hg.GPT:
    """A small model whose weights are drawn afresh, biases and gains included: N(0, 0.02) would hide mistakes."""
    config = hg.preset("nano", **{"n_vocab": 11, "n_context": 16, "d_model": 12, "n_heads": 3, "n_blocks": 1, **shape})
    model = hg.GPT(config, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(dtype)
    return model


def save_as_others(model: hg.GPT, folder: Path, **options: object) -> None:
    """A model directory as another tool leaves it, without handgrad's manifest: a test may change its files."""
    hg.save(model, folder, **options)  # type: ignore[arg-type]
    (folder / manifest.FILE).unlink()


def handgrad(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in this process, which spares the seconds that starting one takes."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["handgrad", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        sys.argv = before
    return subprocess.CompletedProcess(["handgrad", *arguments], code, out.getvalue(), err.getvalue())


def group(n: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command, or a script, in n processes of one group, without what torchrun takes to start them."""
    script = Path(__file__).parent / "forked.py"
    return subprocess.run(
        [sys.executable, script, str(n), *map(str, arguments)], capture_output=True, text=True, check=False
    )


def make_batch(
    model: hg.GPT, lengths: list[int], seed: int = 0, ignored: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed tokens and targets, some of the targets ignored, at least one not."""
    generator = torch.Generator().manual_seed(seed)
    n, v = sum(lengths), model.config.n_vocab
    tokens = torch.randint(v, (n,), generator=generator)
    targets = torch.randint(v, (n,), generator=generator)
    targets[torch.rand(n, generator=generator) < ignored] = -100
    targets[n // 2] = tokens[0]
    return tokens, targets


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left out is said where it cannot be missed."""
    reasons = {
        report.longrepr[2] for report in terminalreporter.stats.get("skipped", []) if "LEFT OUT" in str(report.longrepr)
    }
    for reason in sorted(reasons):
        terminalreporter.write_sep("!", reason.removeprefix("Skipped: "), red=True, bold=True)
