"""The MCP servers as the router asks them: each through a process, which is started when it is first needed."""

import asyncio
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_dialects.guarded_child import LENGTH_BYTES, framed
from caravan_dialects.tool_servers import NO_CONNECTION, TIMED_OUT, CallResult, McpTool, ToolServerError
from caravan_router.mcp.config import McpLimits, McpServer
from caravan_router.mcp.messages import (
    ALL,
    Answered,
    Asked,
    Call,
    Called,
    Cancel,
    Failed,
    ListTools,
    Start,
    Tools,
)
from caravan_router.mcp.restarts import Restarts

_log = logging.getLogger(__name__)

# For the start of a process and the connection to its server, whose package may have to be downloaded first.
_START_S = 30.0
# How much longer than its request a process may take, for hosts that have no processor free.
_GRACE_S = 10.0
# For a server to end by itself, as MCP wants it.
_CLOSING_S = 8.0
# What a process may answer: the longest list of tools.
_MAX_REPLY_BYTES = 16 << 20
# What the SDK hands to commands, what Python and TLS read, and proxies: nothing that may be a secret of the router.
_VARIABLES = (
    "HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LC_ALL", "TZ", "PYTHONPATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
_DECODER: msgspec.msgpack.Decoder[Answered] = msgspec.msgpack.Decoder(Answered)


class McpServers:
    """All servers of a configuration, which disturb each other in nothing. Call ``close`` when nothing is asked."""

    def __init__(self, servers: Mapping[str, McpServer], limits: McpLimits) -> None:
        self._limits = limits
        self._servers = {name: _Server(name, server, limits) for name, server in servers.items()}
        self._numbers = itertools.count(ALL + 1)

    @property
    def names(self) -> Sequence[str]:
        return [*self._servers]

    @property
    def max_calls(self) -> int:
        return self._limits.max_calls

    async def list_tools(self, server: str) -> Sequence[McpTool]:
        """Raises ToolServerError."""
        asked = ListTools(number=next(self._numbers), timeout_s=self._limits.call_timeout_s)
        answered = await self._servers[server].ask(asked)
        assert isinstance(answered, Tools)
        return answered.tools

    async def call(self, server: str, tool: str, arguments: dict[str, Any]) -> CallResult:
        """Raises ToolServerError."""
        timeout_s = self._limits.call_timeout_s
        asked = Call(number=next(self._numbers), timeout_s=timeout_s, tool=tool, arguments=arguments)
        answered = await self._servers[server].ask(asked)
        assert isinstance(answered, Called)
        return answered.result

    @property
    def pids(self) -> dict[str, int]:
        """The processes that run, by the names of their servers."""
        return {name: process.pid for name, server in self._servers.items() if (process := server.process) is not None}

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()


class _Server:
    """One server. ``process``: the one that speaks to it, if one runs."""

    def __init__(self, name: str, server: McpServer, limits: McpLimits) -> None:
        self._name = name
        self._start = Start(server=server, start_timeout_s=_START_S, max_result_bytes=limits.max_result_bytes)
        self._starting = asyncio.Lock()
        self._restarts = Restarts()
        # Why the last start failed.
        self._failure = ToolServerError(NO_CONNECTION, "")
        self.process: _Process | None = None

    async def ask(self, asked: ListTools | Call) -> Answered:
        """Raises ToolServerError."""
        async with self._starting:
            if self.process is None or self.process.ended:
                if wait_s := self._restarts.wait_s(time.monotonic()):
                    failure = self._failure
                    raise ToolServerError(
                        failure.code, f"{failure.message}; it is not started again for {wait_s:.1f} s"
                    )
                self.process = await self._begin()
            process = self.process
        return await process.ask(asked)

    def _ended(self, error: ToolServerError) -> None:
        """Note that a process ended before its server has answered."""
        self._failure = error
        self._restarts.failed(time.monotonic())

    async def _begin(self) -> "_Process":
        """Raises ToolServerError."""
        await self.close()
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        try:
            started = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "caravan_router.mcp.process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                # Ctrl-C is for the router, which drains first.
                start_new_session=True,
            )
        except OSError as error:
            failure = ToolServerError(NO_CONNECTION, f"its process could not be started: {error.strerror}")
            self._ended(failure)
            raise failure from None
        _log.info("an MCP server is started", extra={"server": self._name})
        return _Process(self._name, started, self._start, _Told(self._restarts.worked, self._ended))

    async def close(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            await process.close()


@dataclass(frozen=True, slots=True)
class _Told:
    """Who is told of the first answer of a process, or that it ended without one."""

    answered: Callable[[], None]
    ended: Callable[[ToolServerError], None]


class _Process:
    """A process that speaks to a server. Requests are answered in any order, and those it leaves fail with its end."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, start: Start, told: _Told) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._name = name
        self._told = told
        self._process = process
        self._requests, self._replies = process.stdin, process.stdout
        self._waiting: dict[int, asyncio.Future[Answered]] = {}
        self._error = ToolServerError(NO_CONNECTION, "its process ended")
        # Set before it has ended, so that it gets no request that would end with it.
        self.ended = False
        self._closing = False
        # Whether its server has answered.
        self._connected = False
        self._send(start)
        self._reading = asyncio.create_task(self._read_all())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, asked: ListTools | Call) -> Answered:
        """Raises ToolServerError."""
        limit_s = asked.timeout_s + _GRACE_S + (0 if self._connected else _START_S)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._waiting[asked.number] = answer
        try:
            self._send(asked)
            async with asyncio.timeout(limit_s):
                answered = await answer
        except TimeoutError:
            # It does not even keep the limit that it was given.
            self._kill()
            raise ToolServerError(TIMED_OUT, f"no answer within {limit_s:g} s") from None
        finally:
            del self._waiting[asked.number]
            if not answer.done() or answer.cancelled():
                self._send(Cancel(number=asked.number))
        if isinstance(answered, Failed):
            raise ToolServerError(answered.code, answered.message)
        return answered

    def _send(self, message: Start | Asked) -> None:
        # To one that ended, which may not be known yet, the transports of uvloop would raise RuntimeError.
        if not self._requests.is_closing():
            # Arguments are as short as outputs, so that nobody waits until they are written.
            self._requests.write(framed(msgspec.msgpack.encode(message)))

    async def _read_all(self) -> None:
        try:
            while True:
                size = int.from_bytes(await self._replies.readexactly(LENGTH_BYTES), "big")
                if size > _MAX_REPLY_BYTES:
                    break
                answered = _DECODER.decode(await self._replies.readexactly(size))
                if isinstance(answered, Failed) and answered.ends:
                    self.ended = True
                    self._error = ToolServerError(answered.code, answered.message)
                    if answered.number == ALL:
                        break
                elif not self._connected:
                    self._connected = True
                    self._told.answered()
                if (waiting := self._waiting.get(answered.number)) is not None and not waiting.done():
                    waiting.set_result(answered)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError, RecursionError):
            pass
        finally:
            self.ended = True
            self._kill()
            if not self._closing:
                if not self._connected:
                    self._told.ended(self._error)
                _log.warning("the process for an MCP server ended: %s", self._error, extra={"server": self._name})
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._error)

    def _kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End the process; its server ends with it."""
        self._closing = True
        if self.ended:
            self._kill()
        self._requests.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_S):
                await self._process.wait()
        self._kill()
        self._reading.cancel()
        await asyncio.wait({self._reading})
        await self._process.wait()
