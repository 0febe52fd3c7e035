"""Show where the tests spend processor time, with that of the processes they start. `pytest --spent 30`

Wall time, which --durations shows, says little about tests that run beside others.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TICK = 1 / os.sysconf("SC_CLK_TCK")
NAME = "processor seconds"


def processor_seconds(process: str = "self") -> float:
    """Processor time of a process, of those it has waited for, and of its running descendants."""
    folder = Path("/proc", process)
    try:
        own = folder.joinpath("stat").read_text().rpartition(")")[2].split()
        children = [child for task in folder.glob("task/*/children") for child in task.read_text().split()]
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, own[11:15])) * TICK + sum(map(processor_seconds, children))


class Spent:
    """Attaches to each report the time since the one before, and sums it up at the end."""

    def __init__(self, shown: int) -> None:
        self.shown, self.before = shown, 0.0

    def pytest_runtest_logstart(self) -> None:
        self.before = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[misc]
        now = processor_seconds()
        report.user_properties.append((NAME, max(now - self.before, 0.0)))
        self.before = now
        return report  # type: ignore[return-value]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        tests, files = Counter[str](), Counter[str]()
        for report in (report for reports in terminalreporter.stats.values() for report in reports):
            seconds = dict(getattr(report, "user_properties", [])).get(NAME, 0.0)
            tests[report.nodeid] += seconds
            files[report.nodeid.partition("::")[0]] += seconds
        for title, spent in (("file", files), ("test", tests)):
            terminalreporter.section(f"processor seconds by {title}: {sum(spent.values()):.0f} in all")
            for name, seconds in spent.most_common(self.shown):
                terminalreporter.write_line(f"{seconds:7.2f} {name}")
