"""Run handgrad or a script in one or several processes forked from this one, so that torch is imported only once.

As a program it carries out what each line of its standard input asks for (`run_processes` in conftest.py).
"""

import json
import os
import runpy
import socket
import sys
from collections.abc import Callable

import torch

from handgrad.cli.app import main as handgrad
from handgrad.plan import timing
from handgrad.training.lifecycle import execute as execute  # import what commands need before forking

Task = Callable[[], object]


def start(task: Task, environment: dict[str, str] | None = None) -> int:
    """Fork a process that runs the task and exits. Returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    os.environ.update(environment or {})
    code = 0
    try:
        task()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(tasks: list[Task], attempt: int = 0) -> list[int]:
    """Run each task in a process of one group, with the environment of torchrun. Returns the exit codes."""
    if len(tasks) == 1:
        return [_wait(start(tasks[0]))]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"WORLD_SIZE": str(len(tasks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    children = [start(task, {**environment, "RANK": str(rank)}) for rank, task in enumerate(tasks)]
    return [_wait(child) for child in children]


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(*arguments: str) -> Task:
    """A task that runs `handgrad ARGUMENTS`, or `python SCRIPT ARGUMENTS`."""

    def task() -> None:
        sys.argv = ["handgrad", *arguments]
        if arguments[0].endswith(".py"):
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            handgrad()

    return task


def hurry() -> None:
    """Let runs measure the machine by small products for a moment: otherwise a run of a test spends most of its time so."""
    timing.SHAPES, timing.SECONDS = ((16, 24, 32),), 0.001


def warm_up() -> None:
    """Import lazily loaded parts of torch before forking: creating an optimizer imports most of them."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    hurry()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def serve() -> None:
    """Carry out the requests on stdin one after another; print the exit code of each."""
    for line in sys.stdin:
        request = json.loads(line)
        print(_wait(start(lambda request=request: _carry_out(**request))), flush=True)  # type: ignore[misc]


def _carry_out(processes: int, arguments: list[str], folder: str, environment: dict[str, str], output: str) -> None:
    """Run a command with another folder and environment; its output goes to two files."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in enumerate((os.devnull, f"{output}.out", f"{output}.err")):
        file = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.exit(max(map(abs, run([command(*arguments)] * processes))))


if __name__ == "__main__":
    warm_up()
    serve()
