from collections.abc import AsyncIterator

import pytest

from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def service(engine: ScriptedEngine) -> AsyncIterator[Service]:
    async with serving(engine) as running:
        yield running
        assert running.is_idle()
