"""What every test shares: the table of tolerances, and models with weights large enough that nothing is nearly zero."""

import pytest
import torch

import handgrad as hg
from handgrad.verify import TOLERANCE as TOLERANCE  # the one table: of whole models

torch.set_num_threads(1)  # the matrices are small: a second thread would only wait

# A single op rounds a few times only, whatever the size of its inputs.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
SCALES = [1e-8, 1e-4, 1.0, 1e3]


def rounded(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Random numbers that `dtype` holds exactly, in float64: the op and its judge read the same."""
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
