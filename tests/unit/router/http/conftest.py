import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
import uvloop

import caravan_router.http.app
from caravan_dialects.bulk.store import BulkSettings
from caravan_dialects.conversations.store import StoreSettings
from caravan_dialects.sql.connection import Place
from caravan_testing.http_server import Service, serving
from caravan_testing.kept_processes import idle_processes, kept_processes
from caravan_testing.scripted_engine import ScriptedEngine

__all__ = ["idle_processes", "kept_processes"]


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


@pytest.fixture
def either_store(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers keep what is stored in memory, or in a new database of PostgreSQL."""
    if isinstance(place, str):
        monkeypatch.setattr(caravan_router.http.app, "StoreSettings", partial(StoreSettings, place=place))
        monkeypatch.setattr(caravan_router.http.app, "BulkSettings", partial(BulkSettings, place=place))
