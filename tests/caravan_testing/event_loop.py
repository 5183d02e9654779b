"""Fixtures about the event loop: a folder of tests imports them in its conftest.py."""

import asyncio
from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture(autouse=True, scope="session")
def grpc_stays_up() -> None:
    """Keep gRPC initialized: otherwise the garbage collection of the last channel waits for gRPC's poller thread."""
    # Not all who import this module have it.
    import grpc.aio

    async def start() -> None:
        grpc.aio.init_grpc_aio()

    # Initialization needs an event loop.
    asyncio.run(start())


@pytest.fixture(autouse=True, scope="session")
def router_files_are_read() -> None:
    """Read the files that a router also reads before its event loop runs."""
    from caravan_router.http.ops import read_document
    from caravan_router.http.page import page

    read_document("")
    page()


@pytest.fixture(autouse=True)
def loop_is_never_blocked() -> Iterator[BlockBuster]:
    """Make a test fail that blocks its event loop."""
    with blockbuster_ctx() as blockbuster:
        # A loop that closes waits for the thread that ends its executor.
        blockbuster.functions["threading.Lock.acquire"].can_block_in("asyncio/runners.py", "close")
        yield blockbuster
