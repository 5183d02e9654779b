"""A pytest plugin that reports what tests cost: `make slowest`.

It counts the processor time of the test's process and of all processes below it, so that a server that a fixture starts
counts for the test during which it computed. The start of a server that a file shares counts for the file's first test.
"""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_SHOWN_TESTS = 50
_SHOWN_FILES = 30


@dataclass(frozen=True, slots=True)
class Cost:
    """Core-seconds and wall seconds of one test, with its fixtures."""

    test: str
    core_s: float
    wall_s: float


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--costs``."""
    parser.addoption("--costs", metavar="FILE", help="also write the costs of all tests to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Measure in each process that runs tests, report in the one that was started."""
    config.pluginmanager.register(CostReport(config), "cost report")


class CostReport:
    """Measures tests in a worker of xdist, and collects what the workers measured in the main process."""

    def __init__(self, config: pytest.Config) -> None:
        self._file: str | None = config.getoption("--costs")
        self._costs: list[Cost] = []
        self._started_s = time.monotonic()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Measure one test."""
        core_s, wall_s = _tree_s(), time.monotonic()
        result = yield
        self._costs.append(Cost(item.nodeid, max(0.0, _tree_s() - core_s), time.monotonic() - wall_s))
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the costs to the main process."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["costs"] = [asdict(cost) for cost in self._costs]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the costs that a worker measured."""
        self._costs += [Cost(**cost) for cost in getattr(node, "workeroutput", {}).get("costs", [])]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the tables."""
        if self._file is not None:
            Path(self._file).write_text(json.dumps([asdict(cost) for cost in self._costs], indent=0))
        wall_s = time.monotonic() - self._started_s
        terminalreporter.section("core-seconds, tests")
        for line in _lines(self._costs):
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            f"{_tree_s():9.1f}  the whole run, with collection and idle servers, in {wall_s:.0f} s"
        )


def _lines(costs: list[Cost]) -> Iterator[str]:
    yield from _table(costs, lambda cost: "/".join(PurePosixPath(_file(cost)).parts[1:-1][:2]), None)
    yield from _table(costs, _file, _SHOWN_FILES)
    yield from _table(costs, lambda cost: cost.test, _SHOWN_TESTS)


def _file(cost: Cost) -> str:
    return cost.test.partition("::")[0]


def _table(costs: list[Cost], group: Callable[[Cost], str], shown: int | None) -> Iterator[str]:
    """Yield the ``shown`` most expensive groups."""
    core_s: dict[str, float] = defaultdict(float)
    tests: Counter[str] = Counter()
    for cost in costs:
        core_s[group(cost)] += cost.core_s
        tests[group(cost)] += 1
    for name in sorted(core_s, key=core_s.__getitem__, reverse=True)[:shown]:
        yield f"{core_s[name]:9.1f}  {tests[name]:5}  {name}"
    yield ""


def _tree_s() -> float:
    """Return the processor time in seconds of this process, its children that ended and all that live below it."""
    waiting, ticks = [os.getpid()], 0
    while waiting:
        process = Path("/proc") / str(waiting.pop())
        try:
            # What follows the name, which is in parentheses and may contain anything.
            fields = (process / "stat").read_text().rpartition(") ")[2].split()
            # utime, stime, and those of children that were waited for: fields 14 to 17 of proc(5).
            ticks += sum(map(int, fields[11:15]))
            for task in (process / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return ticks / _TICKS_A_SECOND
