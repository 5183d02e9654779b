"""The messages between the router and a process that speaks to one MCP server, as MessagePack with their length."""

from typing import Any

import msgspec

from caravan_dialects.tool_servers import CallResult, McpTool
from caravan_router.mcp.config import McpServer

ALL = 0
"""In place of the number of a request: all of them fail."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a process. ``start_timeout_s``: for the connection to the server."""

    server: McpServer
    start_timeout_s: float
    max_result_bytes: int


class ListTools(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    timeout_s: float


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    timeout_s: float
    tool: str
    arguments: dict[str, Any]


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody waits for the answer to this request any more."""

    number: int


class Tools(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    tools: list[McpTool]


class Called(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    result: CallResult


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``ends``: whether the process ends, so that the next request is one for a new process."""

    number: int
    code: int
    message: str
    ends: bool = False


Asked = ListTools | Call | Cancel
Answered = Tools | Called | Failed
