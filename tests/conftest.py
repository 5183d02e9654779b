"""What holds for all tests."""

import signal

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

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
