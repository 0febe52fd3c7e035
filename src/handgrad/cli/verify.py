"""`handgrad verify`"""

import secrets
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import HandgradError
from . import console
from .console import JsonOption
from .options import MODEL, Precision

if TYPE_CHECKING:
    from ..proof.check_report import Report


def verify(
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of shapes and values. [default: random]")] = None,
    only: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Checks to run: E-ln-dx, 'T2-*', R1,R2 … [default: all]")
    ] = None,
    json_file: JsonOption = None,
    model: Annotated[str | None, typer.Option(help=f"{MODEL} [default: none, check the paper]")] = None,
    precision: Precision = None,
) -> None:
    """Prove every equation, number and claim of the paper on this machine.

    Runs one check for each line of the paper's ledger and one for each misprint that matters, on random shapes and
    values. With --model it checks every error signal and every parameter gradient of that model instead, against
    autograd and against finite differences, and every way to train and run it: in pieces, through the cache, in low bits,
    with adapters. A model that is too large for the memory in float64 is checked a block at a time.

    Exit status 1 if any check fails.

      handgrad verify
      handgrad verify --only 'E-ln-*,R8' --seed 5
      handgrad verify --model nano
    """
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    console.check_json_target(json_file)
    if model is not None and only is not None:
        raise HandgradError("--only selects the paper's checks; with --model every check runs: leave out --only")
    if model is None and precision is not None:
        raise HandgradError("--precision is that of a model: give --model as well")
    report = _verify_paper(seed, only) if model is None else _verify_model(model, seed, precision)
    console.conclude(report, json_file)


def _verify_paper(seed: int, only: str | None) -> "Report":
    import torch

    from .. import ledger
    from ..proof.check_report import progress_bar

    torch.set_num_threads(1)  # the matrices are tiny: a second thread would only wait
    return ledger.run(seed, only, progress_bar("checking"))


def _verify_model(name: str, seed: int, precision: str | None) -> "Report":
    from ..formats.models import find_model, open_folder
    from ..model.gpt import GPT
    from ..model.precision import without_mixing
    from ..proof.verify import verify_on_random_batch

    found = find_model(name)
    console.note(found.note)
    console.note(without_mixing(precision))
    if found.folder is None:
        model = GPT(found.config, seed=seed, precision=precision)
    else:
        model = open_folder(found.folder, precision=precision)
    report = verify_on_random_batch(model, seed)
    report.title = f"{name}: {report.title} (seed {seed})"
    return report
