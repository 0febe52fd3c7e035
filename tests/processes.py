"""Run tests in several processes that are forked after collection: a new process needs 15 seconds to import what tests need
and to collect them. `pytest --processes 3`"""

import gc
import json
import os
import selectors
import struct
import sys
import tempfile
import traceback
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NoReturn

import pytest

AT_ONCE = 8  # tests that a process takes at a time: of one file, so that few processes make the fixtures of a module
NUMBER = struct.Struct("i")


def groups_of(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Consecutive tests of one file. Those in no folder are first: they are the longest, and at the end of a run one core
    would wait for them."""
    files = [list(tests) for _, tests in groupby(items, lambda item: item.path)]
    files.sort(key=lambda tests: len(tests[0].path.parts))
    return [tests[i : i + AT_ONCE] for tests in files for i in range(0, len(tests), AT_ONCE)]


class Sender:
    """Writes what pytest reports in a process to a pipe, a line of JSON each."""

    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self.config, self.pipe = config, os.fdopen(pipe, "w")

    def send(self, **fields: Any) -> None:
        self.pipe.write(json.dumps(fields) + "\n")
        self.pipe.flush()

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.send(start=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.send(report=data)


def own_data(config: pytest.Config) -> None:
    """The user's progress in exercises stays unchanged: each process has a temporary data folder."""
    data = tempfile.TemporaryDirectory(prefix="handgrad-data-")
    config.add_cleanup(data.cleanup)
    os.environ["HANDGRAD_DATA"] = data.name


class Processes:
    """Shares the tests among processes; each takes the next group when it has begun the last test of its own."""

    def __init__(self, n: int) -> None:
        self.n = n

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly or not session.items:
            return None
        groups = groups_of(session.items)
        tasks, numbers = os.pipe()
        os.write(numbers, b"".join(map(NUMBER.pack, range(len(groups)))))  # at most 16 384 fit into a pipe
        os.close(numbers)
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all, which this process removes
        gc.collect()
        gc.freeze()  # otherwise each process copies, and searches again and again, all that was imported
        pipes: dict[int, int] = {}
        for _ in range(self.n):
            reports, pipe = os.pipe()
            child = os.fork()
            if not child:
                run(session.config, groups, tasks, pipe)
            os.close(pipe)
            pipes[reports] = child
        gc.unfreeze()
        os.close(tasks)
        try:
            self.listen(session, pipes)
        finally:
            for child in pipes.values():
                os.kill(child, 9)
        return True

    def listen(self, session: pytest.Session, pipes: dict[int, int]) -> None:
        """Hand on what the processes report until all have ended; a test in which one dies has failed."""
        hook, config = session.config.hook, session.config
        ready, running, rest = selectors.DefaultSelector(), dict.fromkeys(pipes, ""), dict.fromkeys(pipes, b"")
        for pipe in pipes:
            ready.register(pipe, selectors.EVENT_READ)
        while pipes:
            for key, _ in ready.select():
                pipe = key.fd
                data = os.read(pipe, 1 << 20)
                *lines, rest[pipe] = (rest[pipe] + data).split(b"\n")
                for told in map(json.loads, lines):
                    if "start" in told:
                        running[pipe] = told["start"]
                        hook.pytest_runtest_logstart(nodeid=told["start"], location=tuple(told["location"]))
                    else:
                        report = hook.pytest_report_from_serializable(config=config, data=told["report"])
                        hook.pytest_runtest_logreport(report=report)
                if not data:
                    ready.unregister(pipe)
                    os.close(pipe)
                    code = os.waitstatus_to_exitcode(os.waitpid(pipes.pop(pipe), 0)[1])
                    if code:
                        hook.pytest_runtest_logreport(report=ended(running[pipe] or "a process", code))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)


def ended(nodeid: str, code: int) -> pytest.TestReport:
    why = f"the process that ran this test ended with {code}"
    return pytest.TestReport(nodeid, (nodeid, None, nodeid), {}, "failed", why, "call")


def run(config: pytest.Config, groups: list[list[pytest.Item]], tasks: int, pipe: int) -> NoReturn:
    """In a forked process: run groups of tests until none is left."""
    code = 70
    try:
        own_data(config)
        manager = config.pluginmanager
        capture = manager.getplugin("capturemanager")
        capture.stop_global_capturing()  # into files of its own
        capture.start_global_capturing()
        for name in ("terminalreporter", "cacheprovider", "lfplugin", "nfplugin"):
            manager.unregister(name=name) if manager.hasplugin(name) else None
        manager.register(Sender(config, pipe))
        item = next(mine := taken(groups, tasks), None)
        while item is not None:
            following = next(mine, None)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        config._ensure_unconfigure()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def taken(groups: list[list[pytest.Item]], tasks: int) -> Iterator[pytest.Item]:
    """The tests of the groups that this process takes."""
    while data := os.read(tasks, NUMBER.size):
        yield from groups[NUMBER.unpack(data)[0]]
