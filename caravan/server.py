"""An HTTP server as an object of a program, over the model that the program has opened."""

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, Self

from caravan.errors import ClosedError


class Served(Protocol):
    """A server on the event loop of its model."""

    @property
    def url(self) -> str: ...

    async def stop(self) -> None:
        """Take no more requests, and let those that run end."""
        ...

    async def cut(self) -> None:
        """End at once."""
        ...


class Server:
    """Serves the model of an `LLM` over HTTP, on all routes of ``caravan serve``. `LLM.serve` makes it.

    Requests of clients and calls of the program are batched together. Use it as a context manager, or `stop` it; else
    it ends with the model. Any thread may call.
    """

    def __init__(
        self, run: Callable[[Coroutine[Any, Any, Any]], Any], serve: Callable[[], Coroutine[Any, Any, Served]]
    ) -> None:
        """Use `LLM.serve`."""
        self._run = run
        self._served: Served = run(serve())

    def __repr__(self) -> str:
        return f"<Server {self.url}>"

    @property
    def url(self) -> str:
        """Its base URL, without a slash at the end."""
        return self._served.url

    def stop(self) -> None:
        """Take no more requests, and wait until those that run have ended.

        That may take ``graceful_termination_timeout`` seconds; then, and on an interrupt such as Ctrl-C, they are cut
        off. Stopping it again does nothing. The model stays open.
        """
        try:
            self._run(self._served.stop())
        except ClosedError:
            # It has ended with the model.
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class AsyncServer:
    """`Server` for asyncio, over an `AsyncLLM`: ``async with llm.serve() as server``."""

    def __init__(
        self,
        run: Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]],
        serve: Callable[[], Coroutine[Any, Any, Served]],
    ) -> None:
        """Use `AsyncLLM.serve`."""
        self._run = run
        self._serve = serve
        self._served: Served | None = None

    def __repr__(self) -> str:
        return f"<AsyncServer {'not started' if self._served is None else self.url}>"

    async def __aenter__(self) -> Self:
        """Open the port. Raises ServerError, and TypeError or ValueError if an option is wrong."""
        self._served = await self._run(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """Its base URL, without a slash at the end. Raises ClosedError before it is started."""
        if self._served is None:
            raise ClosedError("the server is not started: use `async with`")
        return self._served.url

    async def stop(self) -> None:
        """See `Server.stop`. Cancelling it cuts off the requests that run."""
        if self._served is not None:
            try:
                await self._run(self._served.stop())
            except ClosedError:
                # It has ended with the model.
                return
