"""Servers of tools, which speak MCP, as the dialects see them."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

NO_CONNECTION = -32000
"""JSON-RPC's code of an error that MCP's SDKs use for a connection that has ended."""
TIMED_OUT = -32001
INVALID_ARGUMENTS = -32602
UNUSABLE = -32603


class McpTool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool as its server describes it. ``input_schema``: of its arguments."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    annotations: dict[str, Any] | None = None


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool returned, as text. ``failed``: whether the text is an error that the tool reports."""

    text: str
    failed: bool = False


class ToolServerError(Exception):
    """A server could not be asked, or did not answer in time or as MCP wants. ``code``: JSON-RPC's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ToolServers(Protocol):
    """The servers that the operator has configured."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def max_calls(self) -> int:
        """Maximum number of calls for one response."""
        ...

    async def list_tools(self, server: str) -> Sequence[McpTool]:
        """Raises ToolServerError."""
        ...

    async def call(self, server: str, tool: str, arguments: dict[str, Any]) -> CallResult:
        """Raises ToolServerError."""
        ...

    async def close(self) -> None:
        """Release what asking has started. Call this when nothing is asked any more."""


class NoToolServers:
    """None are configured."""

    names: Sequence[str] = ()
    max_calls = 0

    async def list_tools(self, server: str) -> Sequence[McpTool]:
        raise ToolServerError(NO_CONNECTION, f"there is no server {server}")

    async def call(self, server: str, tool: str, arguments: dict[str, Any]) -> CallResult:
        raise ToolServerError(NO_CONNECTION, f"there is no server {server}")

    async def close(self) -> None:
        pass


NO_TOOL_SERVERS = NoToolServers()
