"""Answers written to break out: sixty escapes and more, none with an effect outside, also from another user's process."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from handgrad.learn.course import COURSE
from handgrad.sandbox import tensor_client
from handgrad.sandbox.tensor_client import Limits, Run, confined_by_kernel, run

X = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)

# An answer finds Python's modules through any function of ours, and then takes the refusals of the audit hook away: what is
# left is what the kernel enforces.
PRELUDE = """
ours = print.__globals__
os, sys, socket, importlib = (ours[name] for name in ("os", "sys", "socket", "importlib"))
gc, ctypes, types = importlib.import_module("gc"), sys.modules["ctypes"], ours["types"]
for function in gc.get_objects():
    if isinstance(function, types.FunctionType) and function.__name__ == "hook":
        for cell in function.__closure__ or ():
            cell.cell_contents = frozenset()
libc = ctypes.CDLL(None, use_errno=True)
def c(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
def call(number, *arguments):
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), number)
def attempt(name, escape):
    try:
        escape()
    except BaseException as reason:
        print(f"{name}: {type(reason).__name__} {getattr(reason, 'errno', '')}")
    else:
        print(f"{name}: DONE")
def f(x):
"""

# {d} is a folder of ours with a file, {v} a process of ours, {p} a port on which we listen, {b} the folder as bytes.
FILES = """
os.open('{d}/precious', os.O_RDONLY) | os.open('{d}/precious', os.O_WRONLY + os.O_TRUNC)
os.open('{d}/new', os.O_CREAT, 0o777) | os.remove('{d}/precious') | os.rename('{d}/precious', '{d}/stolen')
os.replace('{d}/precious', '{d}/other') | os.chmod('{d}/precious', 0o777) | os.chown('{d}/precious', 1, 1)
os.utime('{d}/precious', (0, 0)) | os.truncate('{d}/precious', 0) | os.link('{d}/precious', '{d}/link')
os.symlink('{d}/precious', '{d}/link') | os.mkdir('{d}/folder') | os.rmdir('{d}/empty') | os.listdir('{d}')
os.stat('{d}/precious') | os.readlink('{d}/pointer') | os.chdir('{d}') | os.setxattr('{d}/precious', 'user.a', b'1')
c('open', {b}, 1) | c('creat', {b} + b'/new', 0o777) | c('unlink', {b} + b'/precious')
c('rename', {b} + b'/precious', {b} + b'/a') | c('chmod', {b} + b'/precious', 0) | c('mkfifo', {b} + b'/fifo', 0o666)
c('mknod', {b} + b'/node', 0o100666, 0) | c('truncate', {b} + b'/precious', 0) | c('memfd_create', b'a', 0)
call(437, -100, {b} + b'/precious', (ctypes.c_uint64 * 3)(2), 24) | ctypes.CDLL('{d}/precious')
importlib.import_module('sqlite3') | c('access', {b}, 0) | c('chroot', {b})
"""
PROCESSES = """
os.kill({v}, 9) | os.kill(-1, 0) | os.killpg({v}, 9) | os.kill({w}, 9) | os.kill({t}, 9) | c('kill', {v}, 9)
c('killpg', {v}, 15) | os.fork() | c('fork') | os.execv('/bin/sh', ['sh', '-c', 'touch {d}/new'])
os.posix_spawn('/bin/sh', ['sh', '-c', 'touch {d}/new'], {{}}) | c('execv', b'/bin/sh', None)
c('ptrace', 16, {v}, 0, 0) | call(434, {v}, 0) | call(424, {v}, 9, 0, 0) | os.setuid(0) | c('setuid', 0) | os.nice(-5)
c('setpriority', 0, {v}, 19) | os.sched_setaffinity({v}, {{0}}) | os.setpgid({v}, 0) | c('prctl', 4, 1, 0, 0, 0)
c('setrlimit', 7, (ctypes.c_uint64 * 2)(99, 99)) | c('prlimit', {v}, 0, (ctypes.c_uint64 * 2)(1, 1), None)
c('unshare', 0x10000000) | c('setns', 0, 0) | c('personality', 0) | c('process_vm_writev', {v}, None, 0, None, 0, 0)
"""
CHANNELS = """
socket.socket() | socket.create_connection(('127.0.0.1', {p})) | socket.socket(socket.AF_UNIX) | socket.socketpair()
c('socket', 2, 1, 0) | c('socket', 1, 2, 0) | os.pipe() | os.eventfd(0) | os.write(99, b'x') | os.dup(0)
c('shmget', 77, 4096, 0o1666) | c('msgget', 77, 0o1666) | c('semget', 77, 1, 0o1666) | c('inotify_init')
c('epoll_create1', 0) | call(425, 8, (ctypes.c_uint64 * 15)()) | call(438, 3, 1, 0)
call(435, (ctypes.c_uint64 * 11)(), 88) | c('dup2', 3, 1) | c('fcntl', 3, 0, 0) | c('ioctl', 0, 0x5412, b'x')
c('setitimer', 2, None, None) | c('sigaction', 27, (ctypes.c_uint64 * 20)(), None)
"""
# Through the pipe to the process that computes: what a forged message could ask for.
MESSAGES = """
ask('torch', 'load', ('{d}/precious',), {{}}) | ask('torch', 'save', (x, '{d}/new'), {{}})
ask('torch', 'from_file', ('{d}/precious',), {{}}) | ask('torch', '_C', (), {{}}) | ask('torch', 'os', (), {{}})
ask('torch.os', 'remove', ('{d}/precious',), {{}}) | ask('os', 'remove', (), {{}})
ask('torch', 'os.remove', ('{d}/precious',), {{}}) | ask('builtins', 'eval', ('1',), {{}})
ask('Tensor', '__class__', (x,), {{}}) | ask('Tensor', '__getattribute__', (x, 'sum'), {{}})
ask('Tensor', '__reduce_ex__', (x, 2), {{}}) | ask('Tensor', '__dict__', (x,), {{}})
ask('Tensor', '__init__.__globals__', (x,), {{}}) | ask('Tensor', 'sum', (1,), {{}})
ask('Tensor', 'numpy', (x,), {{}}) | ask('Tensor', 'untyped_storage', (x,), {{}})
ask('Tensor', 'share_memory_', (x,), {{}}) | ask('torch', 'ops', (), {{}}) | ask('torch.nn', 'Module', (), {{}})
ask('torch.nn.functional', '__builtins__', (), {{}}) | ask('torch.hub', 'load', (), {{}}) | remote._exchange(['call'])
remote._exchange(['look', 7, []]) | remote._exchange(['call', 'torch', 'add', 3, 4, 5])
remote._exchange(['call', 'Tensor', 'sum', ['list', ['tensor', 99]], ['list'], []]) | remote._exchange({{}})
remote._exchange(None)
remote._exchange(['call', 'torch', 'zeros', ['list', 3], ['list', ['tuple', 'dtype', ['dtype', 'os']]], []])
"""


def entries(table: str) -> list[str]:
    return [entry.strip() for line in table.strip().splitlines() for entry in line.split(" | ")]


ESCAPES = {name: entries(table) for name, table in
           (("files", FILES), ("processes", PROCESSES), ("channels", CHANNELS), ("messages", MESSAGES))}  # fmt: skip


def test_there_are_sixty_and_more() -> None:
    assert sum(map(len, ESCAPES.values())) > 100 and len({x for table in ESCAPES.values() for x in table}) > 100


def call(body: str, **about: object) -> Run:
    return run(PRELUDE + body, "f", ["x"], [[X]], [["y"]], limits=Limits(printed=20_000), **about)  # type: ignore[arg-type]


@dataclass
class Outside:
    """What an escape could change: files, a process, sockets, and the processes of the sandbox."""

    folder: Path
    victim: subprocess.Popen[bytes]
    listener: socket.socket
    worker: int

    def state(self) -> object:
        files = [(str(p), p.lstat().st_mode, p.lstat().st_mtime_ns, p.lstat().st_uid, p.is_file() and p.read_bytes())
                 for p in sorted(self.folder.rglob("*"))]  # fmt: skip
        return files, os.getpriority(os.PRIO_PROCESS, self.victim.pid), os.sched_getaffinity(self.victim.pid)

    def untouched(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()
            return False
        assert tensor_client._service.child is not None
        return self.victim.poll() is None and tensor_client._service.child._process.poll() is None


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    assert run("def f(x): return x", "f", ["x"], [[X]], [["y"]]).problem is None
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "pointer").symlink_to("precious")
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener, subprocess.Popen(["sleep", "1000"]) as victim:
        listener.setblocking(False)
        assert tensor_client._service.child is not None
        yield Outside(tmp_path, victim, listener, tensor_client._service.child._process.pid)
        victim.kill()


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not confined_by_kernel(), reason="this system has no seccomp: SECURITY.md says what holds there")
@pytest.mark.parametrize("kind", ESCAPES)
def test_no_escape_has_an_effect_outside(kind: str, outside: Outside) -> None:
    named = {"d": outside.folder, "b": repr(str(outside.folder).encode()), "v": outside.victim.pid, "w": outside.worker,
             "t": os.getpid(), "p": outside.listener.getsockname()[1]}  # fmt: skip
    before, helpers = outside.state(), children(outside.worker)
    lines = [f"    attempt({i}, lambda: {escape.format(**named)})" for i, escape in enumerate(ESCAPES[kind])]
    made = call(
        "    remote, ask = ours['remote_torch'], ours['remote_torch'].ask\n" + "\n".join([*lines, "    return x"])
    )
    assert made.problem is None and made.kernel, made
    said = made.printed.splitlines()
    assert len(said) == len(ESCAPES[kind]), made.printed
    assert [f"{line} {ESCAPES[kind][i]}" for i, line in enumerate(said) if "DONE" in line] == []
    assert outside.untouched() and outside.state() == before and children(outside.worker) == helpers
    if kind == "files":
        assert sum("PermissionError 1" in line for line in said) > 20, "the kernel refuses, not only Python"
    assert run("def f(x): return x", "f", ["x"], [[X]], [["y"]]).problem is None


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("    os.write(remote.pipe, b'\\xff\\xff\\xff\\xff')\n    return x", "crash"),
        ("    os.write(remote.pipe, b'\\0\\0\\0\\3abc')\n    return x", "crash"),
        ("    os.write(remote.pipe, b'\\0\\0\\x27\\x10' + b'[' * 10000)\n    return x", "crash"),
        ("    ours['send'](remote.pipe, ['end', {'printed': [], 'problem': None, 'outputs': [[99]]}])", "crash"),
        ("    ours['send'](remote.pipe, ['end', {'printed': [], 'problem': None, 'outputs': [[0, 0]]}])", "crash"),
        ("    ours['send'](remote.pipe, ['end', {'printed': [], 'problem': None, 'outputs': []}])", "crash"),
        ("    ours['send'](remote.pipe, ['end', {'printed': [], 'problem': {'kind': 'right'}}])", "crash"),
        ("    ours['send'](remote.pipe, ['end'])", "crash"),
        ("    ctypes.string_at(0)", "crash"),
        ("    libc.abort()", "crash"),
        ("    os._exit(0)", "exit"),
        ("    libc._exit(0)", "exit"),
    ],
)
def test_a_forged_or_missing_result_is_a_crash(body: str, kind: str) -> None:
    made = call(f"    remote = ours['remote_torch']\n{body}\n")
    assert made.problem is not None and made.problem.kind == kind, made


def test_the_answers_process_has_neither_torch_nor_the_solution() -> None:
    body = """
    loaded = sorted(name for name in sys.modules if "torch" in name or "handgrad" in name)
    names = {function.__code__.co_name for function in gc.get_objects() if isinstance(function, types.FunctionType)}
    print(loaded, "delta_causal" in names, "backward" in names, "delta_prev" in names)
    return x
"""
    exercise = COURSE["attention"]
    made = call(body, modules=[*exercise.importable(), "handgrad.paper.gated"], hidden=exercise.hidden())
    assert "'handgrad.paper.attention'" in made.printed and "handgrad.paper.transformer" not in made.printed
    assert "'torch', 'torch.nn', 'torch.nn.functional']" in made.printed and "torch_server" not in made.printed
    assert made.printed.endswith("] True False True\n"), made


# ── another user of the machine ─────────────────────────────────────────────────────────────────────────────────────

NOBODY = 65534


def as_another_user(task: Callable[[], object]) -> str:
    """What the task returns, or the error it ends with, in a process of another user."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                said = f"DONE {task()}"
            except BaseException as reason:
                said = f"{type(reason).__name__} {reason}"
            os.write(writing, said.encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(pid, 0)
    return found


@pytest.mark.skipif(os.getuid() != 0 or sys.platform != "linux", reason="only root can become another user")
def test_another_user_gets_nothing_from_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "explain"))
    from tiny_session import TEXT, make_session

    from handgrad.cli.explain import _doorway
    from handgrad.explain_page.server import Server

    monkeypatch.setenv("HANDGRAD_DATA", str(tmp_path))
    private = tmp_path / "private"
    private.mkdir(0o700)
    os.chmod(tmp_path, 0o755)
    server = Server(make_session(n_blocks=1))
    answer = "print.__globals__['os'].remove('precious')\ndef backward(delta_rho, rho): return rho"
    body = {"id": "x", "exercise": "softmax", "code": answer}
    with server:
        port, door = server._socket.getsockname()[1], _doorway(private, server.url).removeprefix("file://")
        assert tensor_client._service.child is not None
        worker = tensor_client._service.child._process.pid

        def request(method: str, path: str, sent: object = None, **headers: str) -> str:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            raw = None if sent is None else json.dumps(sent)
            connection.request(method, path, raw, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return f"{response.status} {response.read().decode()}"

        web: list[Callable[[], str]] = [
            lambda: request("GET", "/"), lambda: request("GET", "/api/learn"), lambda: request("GET", "/api/table"),
            lambda: request("GET", "/?key="), lambda: request("GET", "/?key=" + "A" * 32),
            lambda: request("POST", "/api/learn/grade", body), lambda: request("POST", "/api/step", {"id": "x", "lr": 1}),
            lambda: request("POST", "/api/learn/grade", body, **{"X-Handgrad-Key": "guess"}),
            lambda: request("POST", "/api/learn/grade", body, Cookie="key=guess", Origin=f"http://127.0.0.1:{port}"),
            lambda: request("POST", "/api/sentence", {"text": TEXT}), lambda: request("GET", "/assets/../api/learn"),
        ]  # fmt: skip
        for number, ask in enumerate(web):
            found = as_another_user(ask)
            assert found.startswith(("DONE 403", "DONE 404")) and server.key not in found, (number, found)
        local: list[Callable[[], object]] = [
            lambda: Path(door).read_text(), lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
            lambda: Path(f"/proc/{os.getppid()}/mem").read_bytes(), lambda: os.listdir(f"/proc/{os.getppid()}/fd"),
            lambda: os.kill(os.getppid(), 0), lambda: os.kill(worker, 9), lambda: Path(f"/proc/{worker}/mem").read_bytes(),
            lambda: os.listdir(private), lambda: (tmp_path / "learn.json").write_text("{}"),
        ]  # fmt: skip
        for number, attempt in enumerate(local):
            found = as_another_user(attempt)
            assert found.startswith("PermissionError"), (number, found)
        command = as_another_user(lambda: Path(f"/proc/{os.getppid()}/cmdline").read_bytes())
        assert command.startswith("DONE") and server.key not in command
    assert not (tmp_path / "learn.json").exists()
