"""A TCP proxy in front of a shard, whose link a test can slow down, stall and cut."""

import asyncio
import contextlib
import math

_CHUNK = 16_384


class LinkProxy:
    """Forwards connections from `address` to ``target`` (host:port). Use it as a context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._delay_s = 0.0
        self._bytes_per_s = math.inf
        self._cut = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._busy: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> "LinkProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._end_connections()

    def slow(self, delay_s: float, bytes_per_s: float) -> None:
        """Delay every chunk of bytes by ``delay_s`` and by its size over ``bytes_per_s``."""
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

    def stall(self) -> None:
        """Let no byte through. Connections stay open, and new ones are accepted."""
        self._flowing.clear()

    async def cut(self) -> None:
        """Reset all connections, and each new one."""
        self._cut = True
        await self._end_connections()

    def mend(self) -> None:
        """Forward bytes as they come again."""
        self.slow(0.0, math.inf)
        self._cut = False
        self._flowing.set()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._busy.add(task)
        task.add_done_callback(self._busy.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            if self._cut:
                return
            up_reader, up_writer = await asyncio.open_connection(*self._target)
            writers.append(up_writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(up_reader, writer))
                tasks.create_task(self._copy(reader, up_writer))
        except* OSError:
            pass
        finally:
            for one in writers:
                one.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            await self._flowing.wait()
            if self._delay_s:
                await asyncio.sleep(self._delay_s + len(data) / self._bytes_per_s)
            sink.write(data)
            await sink.drain()
        # One side has ended, and so does the other.
        raise ConnectionResetError

    async def _end_connections(self) -> None:
        for task in list(self._busy):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._busy, return_exceptions=True)
