"""Fixtures that make a test fail when the router blocks its event loop."""

import asyncio
from collections.abc import Iterator

import grpc.aio
import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from caravan_router.http.ops.routes import openapi_document
from caravan_router.http.page.files import page


@pytest.fixture(autouse=True, scope="session")
def grpc_stays_up() -> None:
    """Keep gRPC initialized: otherwise the garbage collection of the last channel waits for gRPC's poller thread."""

    async def start() -> None:
        grpc.aio.init_grpc_aio()

    # Initialization needs an event loop.
    asyncio.run(start())


@pytest.fixture(autouse=True)
def loop_is_never_blocked() -> Iterator[BlockBuster]:
    # The program also reads these files before its event loop runs.
    openapi_document()
    page()
    with blockbuster_ctx() as blockbuster:
        yield blockbuster
