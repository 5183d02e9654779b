"""HTTP over a model in this process, on the model's event loop."""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, Protocol

from caravan.errors import ServerError
from caravan_proto.flags import from_values
from caravan_router.app import http_service
from caravan_router.cli import STARTUP_ERRORS, startup_problem
from caravan_router.config import RouterConfig
from caravan_router.engine.fleet import Fleet
from caravan_router.metrics.recorder import Metrics


class OpenPort(Protocol):
    """What a server needs of its port."""

    @property
    def url(self) -> str: ...

    def abort(self) -> None: ...

    async def stop_accepting(self) -> None: ...

    async def finish(self, timeout_s: float) -> None: ...


class LocalServer:
    """A server over the engines of a fleet. Use it on the event loop of the fleet."""

    def __init__(self, port: OpenPort, drain_s: float, listening: AsyncExitStack) -> None:
        """Use `started`. ``listening`` closes the port."""
        self._port = port
        self._drain_s = drain_s
        self._listening = listening

    @classmethod
    async def started(cls, fleet: Fleet, metrics: Metrics, options: Mapping[str, Any]) -> "LocalServer":
        """Open a port. ``options``: those of the fleet's engines and of the server.

        Raises ServerError, and TypeError or ValueError if an option is wrong.
        """
        config = from_values(RouterConfig, options)
        async with AsyncExitStack() as listening:
            try:
                service = await http_service(config, fleet, metrics)
                port = await listening.enter_async_context(service.listening())
            except STARTUP_ERRORS as error:
                raise ServerError(startup_problem(config, error)) from None
            return cls(port, config.graceful_termination_timeout, listening.pop_all())

    @property
    def url(self) -> str:
        """Its base URL, without a slash at the end."""
        return self._port.url

    def call_at_end(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the server ends."""
        self._listening.callback(call)

    async def stop(self) -> None:
        """Take no more requests, and let those that run end within the timeout. Cancelling it cuts them off."""
        try:
            await self._port.stop_accepting()
            await self._port.finish(self._drain_s)
        finally:
            await self.cut()

    async def cut(self) -> None:
        """Close the port and all connections at once. Doing it again does nothing."""
        self._port.abort()
        await self._listening.aclose()
