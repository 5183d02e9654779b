"""A gRPC channel to a servicer in this process: calls hand the messages over, and nothing is encoded or sent.

It carries what the router's client uses: unary calls, and streams of replies. A call starts as soon as it is made, and
calls start in the order in which they were made.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NoReturn

import grpc
import grpc.aio

_Method = Callable[[Any, "_Context"], Any]


class _Context:
    """The part of a gRPC ServicerContext that the shard's servicer uses."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[_Context], None]] = []
        self.started = asyncio.Event()

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise _error(code, details)

    async def send_initial_metadata(self, _metadata: object) -> None:
        self.started.set()

    def add_done_callback(self, callback: Callable[["_Context"], None]) -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        self.started.set()
        for callback in self._callbacks:
            callback(self)


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class _StreamCall:
    """A stream of replies. ``read`` returns the next one, `grpc.aio.EOF` at the end, or raises AioRpcError."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._end: object | None = None

    async def fill(self, replies: AsyncIterator[Any]) -> None:
        """Read ``replies`` to their end."""
        end: object = _error(grpc.StatusCode.CANCELLED, "the call was cancelled")
        try:
            async for reply in replies:
                self._arrived.put_nowait(reply)
            end = grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            end = error
        finally:
            self._arrived.put_nowait(end)
            self._context.end()

    async def initial_metadata(self) -> None:
        await self._context.started.wait()

    async def read(self) -> Any:
        if self._end is None:
            reply = await self._arrived.get()
            if reply is not grpc.aio.EOF and not isinstance(reply, grpc.aio.AioRpcError):
                return reply
            self._end = reply
        if isinstance(self._end, grpc.aio.AioRpcError):
            raise self._end
        return self._end


class LocalChannel(grpc.aio.Channel):
    """Calls the methods of ``servicer``, whose names are those of the calls. Use it on one event loop."""

    def __init__(self, servicer: object) -> None:
        self._servicer = servicer
        self._tasks: set[asyncio.Task[Any]] = set()

    def unary_unary(self, method: str, *_: Any, **__: Any) -> Any:
        """Return a function that starts a call with one reply and returns it as an awaitable."""
        function = self._method(method)

        async def answer(request: Any) -> Any:
            context = _Context()
            try:
                return await function(request, context)
            finally:
                context.end()

        return lambda request: self._start(answer(request))

    def unary_stream(self, method: str, *_: Any, **__: Any) -> Any:
        """Return a function that starts a call with a stream of replies."""
        function = self._method(method)

        def start(request: Any) -> _StreamCall:
            context = _Context()
            call = _StreamCall(context)
            _ = self._start(call.fill(function(request, context)))
            return call

        return start

    def stream_unary(self, method: str, *_: Any, **__: Any) -> Any:
        """Not carried: no call has a stream of requests."""
        raise NotImplementedError(method)

    stream_stream = stream_unary

    async def close(self, grace: float | None = None) -> None:
        """Cancel all calls, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _method(self, path: str) -> _Method:
        method: _Method = getattr(self._servicer, path.rpartition("/")[2])
        return method

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aenter__(self) -> "LocalChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return READY: the servicer is always there."""
        return grpc.ChannelConnectivity.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Never return: the state does not change."""
        await asyncio.get_running_loop().create_future()

    async def channel_ready(self) -> None:
        """Return at once."""
