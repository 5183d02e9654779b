import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import ScriptedEngine


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the tests on the event loop that the program has."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def service(engine: ScriptedEngine) -> AsyncIterator[Service]:
    async with serving(engine) as running:
        yield running
        assert running.is_idle()
