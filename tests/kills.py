"""kill -9 placed at system calls: before and after every rename, fsync, unlink, … of a run's life.

    python tests/kills.py --command train --processes 1 --kills 100

A first run is traced: every call that changes names or flushes data, in order. Then runs are started that end by SIGKILL
just before or just after one of these calls, spread evenly over the trace, and each is continued by the same command with
--resume (several processes: as torchrun restarts a group). It has to end with the weights of the undisturbed run, the same
files, and nothing left behind. Runs are forked from this process, which spares the seconds that importing torch takes.
"""

import argparse
import contextlib
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

CALLS = ("rename", "replace", "fsync", "unlink", "remove", "rmdir", "mkdir", "chmod")
TEXT = "".join(f"{n} green bottles hanging on the wall\n" for n in range(200))
SHAPE = ["--n-blocks", "1", "--d-model", "8", "--n-heads", "1", "--n-context", "8", "--batch-tokens", "32"]
OFTEN = [
    "--steps",
    "3",
    "--save-every",
    "1",
    "--eval-every",
    "2",
    "--log-every",
    "1",
    "--keep",
    "1",
    "--eval-batches",
    "1",
]
OFTEN += ["--sample-tokens", "0", "--dtype", "float64"]


class Hooks:
    """Count the calls of this process that change names or flush data; note each, or die at one of them."""

    def __init__(self, log: Path | None = None, die_at: int = -1):
        self.log, self.die_at, self.point = log, die_at, 0

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._wrap(name, getattr(os, name)))
        handgrad.files.atomic.exchange = self._wrap("exchange", handgrad.files.atomic.exchange)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._reach(f"before {name} {args}")
            try:
                return call(*args, **kwargs)
            finally:
                self._reach(f"after {name} {args}")

        return wrapped

    def _reach(self, what: str) -> None:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(what + "\n")
        if self.point == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.point += 1


def run(arguments: list[str], processes: int, hooks: Hooks | None = None, attempt: int = 0) -> int:
    """Run the command in one process or several, the first with hooks, and wait. Returns its exit code."""

    def act(first: bool) -> None:
        with open("log.txt", "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if first and hooks is not None:
            hooks.install()
        command(*arguments)()

    return forked.run([functools.partial(act, rank == 0) for rank in range(processes)], attempt)[0]


def outcome(folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The names of all files, and all weights."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    found = {
        f"{file.relative_to(folder)} {name}": tensor.clone()
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return names, found


def check(command: str, processes: int, kills: int) -> dict[str, Any]:
    """Kill so many runs at calls spread over the trace. Returns what was seen; raises at the first difference."""
    arguments = prepare(command)
    base = fresh("base")
    hooks = Hooks(Path("trace.txt").absolute())
    assert run([*arguments, "--out", str(base / "run")], processes, hooks) == 0, Path("log.txt").read_text()
    points = Path("trace.txt").read_text().splitlines()
    truth = outcome(base)
    chosen = sorted({round(i * (len(points) - 1) / max(1, kills - 1)) for i in range(kills)})
    for point in chosen:
        folder = fresh(f"killed-{point}")
        out = ["--out", str(folder / "run")]
        killed = run([*arguments, *out], processes, Hooks(die_at=point))
        assert killed == -signal.SIGKILL, f"point {point} of {len(points)} was not reached: {killed}"
        again = arguments if processes > 1 else [*arguments, "--resume"]
        done = run([*again, *out], processes, attempt=1)
        assert done == 0, f"{points[point]}: {done}\n{Path('log.txt').read_text()[-2000:]}"
        names, weights = outcome(folder)
        assert names == truth[0], f"{points[point]}: {set(names) ^ set(truth[0])}"
        wrong = [name for name, tensor in truth[1].items() if not torch.equal(tensor, weights[name])]
        assert not wrong, f"{points[point]}: {wrong[0]} differs"
        shutil.rmtree(folder)
    return {"command": command, "processes": processes, "points": len(points), "kills": len(chosen)}


def fresh(name: str) -> Path:
    """A folder for a run and an empty cache beside it."""
    Path(name).mkdir()
    os.environ["HANDGRAD_CACHE"] = str(Path(name, "cache").absolute())
    return Path(name)


def prepare(command: str) -> list[str]:
    """The data, and for finetune the base model. The arguments of the command."""
    Path("text.txt").write_text(TEXT)
    lines = [json.dumps({"prompt": f"{i} + 1 =", "completion": f" {i + 1}"}) for i in range(30)]
    Path("examples.jsonl").write_text("\n".join(lines))
    train = ["train", "--data", "text.txt", *SHAPE, *OFTEN]
    if command == "train":
        return train
    assert run([*train, "--out", "model"], 1) == 0, Path("log.txt").read_text()
    return ["finetune", "--model", "model", "--data", "examples.jsonl", "--batch-examples", "4", "--rank", "2", *OFTEN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--command", choices=("train", "finetune"), default="train")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    forked.warm_up()
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        os.environ["HANDGRAD_CACHE"] = f"{place}/cache"
        print(json.dumps(check(options.command, options.processes, options.kills)))


if __name__ == "__main__":
    main()
