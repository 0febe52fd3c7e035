"""Kill runs with SIGKILL before and after system calls that rename, flush or delete, and check that they resume.

    python tests/kills.py --command train --processes 1 --kills 100
    python tests/kills.py --command train --processes 1 --kills 100 --errors

A first run records every call that changes names or flushes data. Further runs are killed just before or just after one
of these calls, spread evenly over the record, and resumed by the same command with --resume (several processes: as
torchrun restarts a group). A resumed run must end with the weights and exactly the files of the uninterrupted run. Runs
are forked from this process, so that torch is imported only once. With --errors the call fails with EIO instead, as on a
failing disk: the run ends with one line or continues.
"""

import argparse
import contextlib
import errno
import functools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import forked
import handgrad.files.atomic
from forked import command
from handgrad.kernels import library

CALLS = ("rename", "replace", "fsync", "unlink", "remove", "rmdir", "mkdir", "chmod")
TEXT = "".join(f"{n} green bottles hanging on the wall\n" for n in range(200))
SHAPE = ["--n-blocks", "1", "--d-model", "8", "--n-heads", "1", "--n-context", "8", "--batch-tokens", "32"]
SCHEDULE = ["--steps", "3", "--save-every", "1", "--eval-every", "2", "--log-every", "1", "--keep", "1"]
SCHEDULE += ["--eval-batches", "1", "--sample-tokens", "0", "--dtype", "float64"]


class Hooks:
    """Count the calls of this process that change names or flush data; log each call, or kill the process at one, or let
    it fail."""

    def __init__(self, log: Path | None = None, kill_at: int = -1, error: bool = False):
        self.log, self.kill_at, self.error, self.count = log, kill_at, error, 0

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._wrap(name, getattr(os, name)))
        handgrad.files.atomic.exchange = self._wrap("exchange", handgrad.files.atomic.exchange)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._on_event(f"before {name} {args}")
            try:
                return call(*args, **kwargs)
            finally:
                self._on_event(f"after {name} {args}")

        return wrapped

    def _on_event(self, event: str) -> None:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(event + "\n")
        self.count += 1
        if self.count - 1 == self.kill_at:
            if self.error:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            os.kill(os.getpid(), signal.SIGKILL)


def run(arguments: list[str], processes: int, hooks: Hooks | None = None, attempt: int = 0) -> int:
    """Run the command in one or several processes, the first with hooks. Returns the exit code of the first."""

    def task(first: bool) -> None:
        with open("log.txt", "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if first and hooks is not None:
            hooks.install()
        command(*arguments)()

    return forked.run([functools.partial(task, rank == 0) for rank in range(processes)], attempt)[0]


def snapshot(folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Names of all files and copies of all tensors below a folder."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    tensors = {
        f"{file.relative_to(folder)} {name}": tensor.clone()
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return names, tensors


def check(command: str, processes: int, kills: int, errors: bool, optimizer: str) -> dict[str, Any]:
    """Kill `kills` runs at calls spread over the record. Returns the counts; raises at the first difference."""
    arguments = [*prepare(command), "--optimizer", optimizer]
    base = new_run_folder("base")
    hooks = Hooks(Path("trace.txt").absolute())
    assert run([*arguments, "--out", str(base / "run")], processes, hooks) == 0, Path("log.txt").read_text()
    points = Path("trace.txt").read_text().splitlines()
    expected_names, expected_tensors = snapshot(base)
    candidates = [i for i, point in enumerate(points) if not errors or point.startswith("before")]
    chosen = sorted({candidates[round(i * (len(candidates) - 1) / max(1, kills - 1))] for i in range(kills)})
    for point in chosen:
        folder = new_run_folder(f"killed-{point}")
        out = ["--out", str(folder / "run")]
        killed = run([*arguments, *out], processes, Hooks(kill_at=point, error=errors))
        expected = (0, 1) if errors else (-signal.SIGKILL,)  # an error that matters ends in one line
        assert killed in expected, f"{points[point]}, {point} of {len(points)}: {killed}\n{log_end()}"
        resume = arguments if processes > 1 else [*arguments, "--resume"]
        code = run([*resume, *out], processes, attempt=1)
        assert code == 0, f"{points[point]}: {code}\n{log_end()}"
        names, tensors = snapshot(folder)
        assert names == expected_names, f"{points[point]}: {set(names) ^ set(expected_names)}"
        wrong = [name for name, tensor in expected_tensors.items() if not torch.equal(tensor, tensors[name])]
        assert not wrong, f"{points[point]}: {wrong[0]} differs"
        shutil.rmtree(folder)
    return {"command": command, "processes": processes, "points": len(points), "kills": len(chosen)}


def log_end() -> str:
    return Path("log.txt").read_text()[-2000:]


def new_run_folder(name: str) -> Path:
    """Create a folder for a run, with an empty cache inside."""
    Path(name).mkdir()
    os.environ["HANDGRAD_CACHE"] = str(Path(name, "cache").absolute())
    return Path(name)


def prepare(command: str) -> list[str]:
    """Write the data, and for finetune the base model. Returns the arguments of the command."""
    Path("text.txt").write_text(TEXT)
    lines = [json.dumps({"prompt": f"{i} + 1 =", "completion": f" {i + 1}"}) for i in range(30)]
    Path("examples.jsonl").write_text("\n".join(lines))
    train = ["train", "--data", "text.txt", *SHAPE, *SCHEDULE]
    if command == "train":
        return train
    assert run([*train, "--out", "model"], 1) == 0, Path("log.txt").read_text()
    finetune = ["finetune", "--model", "model", "--data", "examples.jsonl", "--batch-examples", "4", "--rank", "2"]
    return [*finetune, *SCHEDULE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--command", choices=("train", "finetune"), default="train")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--compile", action="store_true", help="let every run compile its kernels, and be killed meanwhile"
    )
    parser.add_argument("--errors", action="store_true", help="let the call fail instead, with EIO")
    parser.add_argument("--optimizer", default="AdamW")
    options = parser.parse_args()
    forked.warm_up()
    if not options.compile:
        library.load(torch.float64)  # once, for all forks
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["HANDGRAD_CACHE"] = f"{folder}/cache"
        print(json.dumps(check(options.command, options.processes, options.kills, options.errors, options.optimizer)))


if __name__ == "__main__":
    main()
