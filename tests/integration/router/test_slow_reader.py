"""A client that reads nothing takes bounded memory and is then cut off. Other clients are not slowed down."""

import asyncio
import gc
import socket

from aiohttp import ClientSession

from caravan_dialects.api.limits import Limits
from caravan_router.http.server.connection import Connection
from caravan_testing.cluster import Cluster, ClusterConfig, cluster
from caravan_testing.raw_http import HOST, port_of, post
from caravan_testing.waiting import eventually

NEIGHBOURS, TOKENS = 3, 100
FLOOD = b'{"prompt":"ab","max_tokens":20000,"ignore_eos":true,"stream":true,"logprobs":5}'
BUFFER_BYTES = 256 * 1024


async def _neighbours(running: Cluster) -> None:
    """Read some streams to their end."""
    body = {"prompt": "ab", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    async with ClientSession() as session:

        async def one() -> None:
            async with session.post(f"{running.url}/v1/completions", json=body) as response:
                assert (await response.text()).count('"finish_reason":"length"') == 1

        await asyncio.gather(*(one() for _ in range(NEIGHBOURS)))


def _transport_of(peer: socket.socket) -> asyncio.Transport:
    """Return the server's transport of the connection."""
    for found in gc.get_objects():
        if isinstance(found, Connection) and found.transport is not None and found.peername == peer.getsockname():
            return found.transport
    raise AssertionError("no connection to it")


async def test_a_client_that_reads_nothing() -> None:
    limits = Limits(slow_client_timeout_s=5.0)
    async with cluster(ClusterConfig(cells=24_576, step_s=0.0002, limits=limits)) as running:
        with socket.socket() as stuck:
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stuck.connect((HOST, port_of(running.url)))
            stuck.sendall(post("/v1/completions", FLOOD))
            await eventually(lambda: bool(running.engine.scheduler.sequences), "it runs")
            (sequence,) = running.engine.scheduler.sequences.values()
            transport = _transport_of(stuck)
            # Otherwise the kernel buffers some megabytes.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            await eventually(lambda: transport.get_write_buffer_size() > 0, "its buffers are full")
            # The client is cut five seconds later. If its neighbours waited for it, they would end no sooner.
            await _neighbours(running)
            assert 0 < transport.get_write_buffer_size() < BUFFER_BYTES
            assert sequence in running.engine.scheduler.sequences.values()
            await eventually(lambda: not running.engine.scheduler.sequences, "it was cut")
            assert len(sequence.output) < 20_000
        await running.wait_until_at_rest()
        await _neighbours(running)
