"""Requests as bytes on a socket, for what no client library would send."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from caravan_testing.waiting import in_time

HOST = "127.0.0.1"


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a complete, well-formed request that keeps the connection open."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}"]).encode() + b"\r\n\r\n" + body


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: bytes
    body: bytes

    def json(self) -> dict[str, object]:
        return msgspec.json.decode(self.body, type=dict[str, object])


def replies_in(data: bytes) -> list[Reply]:
    """Parse consecutive replies with a Content-Length. Fails if the last one is incomplete."""
    replies = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        length = next(
            int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        )
        assert len(rest) >= length, data
        replies.append(Reply(int(head.split(b" ")[1]), head, rest[:length]))
        data = rest[length:]
    return replies


async def exchange(url: str, parts: Iterable[bytes], *, pause_s: float = 0.0) -> bytes:
    """Send the parts with pauses, read until the server closes or resets the connection, and return what it sent."""
    reader, writer = await asyncio.open_connection(HOST, port_of(url))
    received = bytearray()

    async def send() -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    sending = asyncio.create_task(send())
    try:
        async with in_time("the server closes the connection"):
            while data := await reader.read(65536):
                received += data
    except ConnectionResetError:
        pass
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
    return bytes(received)


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
