"""What holds for all tests."""

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

# How long an example takes says more about the machine than about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

# On a busy host a request may take longer than aiohttp's five minutes. The limit of the test ends it.
with contextlib.suppress(ModuleNotFoundError):  # The unit tests of pure packages run without it.
    import aiohttp.client

    setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(sock_connect=30))  # noqa: B010 - mypy: Final

# What is remembered of the files of models. Each process of the tests, and what it starts, has a folder of its own.
_remembered = tempfile.mkdtemp(prefix="caravan-tests-")
atexit.register(shutil.rmtree, _remembered, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = _remembered

# What a shell starts in the background ignores Ctrl-C, and under nohup the end of the terminal. The programs that tests
# start would inherit both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Last, when the tests that `-m` leaves out are gone.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the files with slow tests go first, so that no process begins with minutes of work when the others end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


# Files that share the server of `tests/e2e/conftest.py`, whose start costs more than most of them.
_SHARING = {f"tests/e2e/test_{name}.py" for name in ("clients", "greedy_equality", "http_fields")}


class OneServer(LoadFileScheduling):  # type: ignore[misc]
    """Has one process run each file, and one all files that share a server."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "files that share a server" if file in _SHARING else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Return the scheduler of `--dist loadfile`."""
    return OneServer(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Return a place for a store: a new file of SQLite, or the URL of a new database of PostgreSQL."""
    if request.param == "sqlite":
        return tmp_path / "state"
    from caravan_testing.postgres import cluster

    return cluster().new_database()
