"""Commands of handgrad, or a script, in one or several processes forked from this one, which imports torch once for all.

python tests/forked.py 4 train --data text.txt            four processes, as torchrun would start them
python tests/forked.py 2 script.py arguments
"""

import os
import runpy
import socket
import sys
from collections.abc import Callable

import torch

from handgrad.cli.app import main as handgrad
from handgrad.training.lifecycle import execute as execute  # whatever a command imports is imported before the fork

Act = Callable[[], object]


def start(act: Act, environment: dict[str, str] | None = None) -> int:
    """Fork a process that acts and ends. Returns its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    os.environ.update(environment or {})
    code = 0
    try:
        act()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as reason:
        print(f"{type(reason).__name__}: {reason}", file=sys.stderr)
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(acts: list[Act], attempt: int = 0) -> list[int]:
    """The processes of a group, each with its own act: rank, address and all. Returns their exit codes."""
    if len(acts) == 1:
        return [_wait(start(acts[0]))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(len(acts)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    children = [start(act, {**group, "RANK": str(rank)}) for rank, act in enumerate(acts)]
    return [_wait(child) for child in children]


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def command(*arguments: str) -> Act:
    """What `handgrad ARGUMENTS` does; or `python SCRIPT ARGUMENTS`."""

    def act() -> None:
        sys.argv = ["handgrad", *arguments]
        if arguments[0].endswith(".py"):
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            handgrad()

    return act


def warm_up() -> None:
    """What every run would do first: making an optimizer imports half of torch."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


if __name__ == "__main__":
    warm_up()
    sys.exit(max(map(abs, run([command(*sys.argv[2:])] * int(sys.argv[1])))))
