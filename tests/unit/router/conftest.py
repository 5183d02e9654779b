"""Nothing in the router may block its loop."""

import asyncio
from collections.abc import Iterator

import grpc.aio
import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from caravan_router.http.ops.routes import openapi_document


@pytest.fixture(autouse=True, scope="session")
def grpc_stays_up() -> None:
    """Else the last channel to be collected, whenever that is, has gRPC wait for its poller's thread."""

    async def start() -> None:
        grpc.aio.init_grpc_aio()

    # It wants a loop, whatever the tests before have left.
    asyncio.run(start())


@pytest.fixture(autouse=True)
def loop_is_never_blocked() -> Iterator[BlockBuster]:
    # Read where the program reads it: before there is a loop.
    openapi_document()
    with blockbuster_ctx() as blockbuster:
        yield blockbuster
