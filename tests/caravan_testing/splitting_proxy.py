"""A TCP proxy that forwards the server's bytes in small pieces, because clients must not rely on packet borders."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from caravan_testing.raw_http import HOST, port_of


@asynccontextmanager
async def splitting(url: str, most_bytes: int, seed: int = 0) -> AsyncIterator[str]:
    """Run the proxy and yield its URL. It writes pieces of 1 to ``most_bytes`` bytes separately."""
    chance = random.Random(seed)
    busy: set[asyncio.Task[None]] = set()

    async def split(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            while data:
                size = chance.randint(1, most_bytes)
                sink.write(data[:size])
                data = data[size:]
                await sink.drain()
                # Without a turn of the loop, the transport would join this piece with the next.
                await asyncio.sleep(0)
        sink.close()

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(HOST, port_of(url))
        try:
            await asyncio.gather(split(up_reader, writer), copy(reader, up_writer))
        except ConnectionError:
            pass
        finally:
            for one in (writer, up_writer):
                one.close()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(forward(reader, writer))
        busy.add(task)
        task.add_done_callback(busy.discard)

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(busy):
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
