"""The file of ``--mcp-config``: servers in the form that other programs read, under ``mcpServers``."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from caravan_proto.packages import Part, lack

# It is a part of the names by which the model knows the tools.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)


class McpConfigError(Exception):
    """The file cannot be used, or packages are missing."""


class McpServer(msgspec.Struct, frozen=True, kw_only=True):
    """Either a ``command``, which speaks MCP over its standard input and output, or the ``url`` of a server.

    ``env``: added to the few variables that a command gets. ``headers``: of each request to ``url``, such as keys.
    """

    command: str | None = None
    args: list[str] = msgspec.field(default_factory=list)
    env: dict[str, str] = msgspec.field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    type: Literal["stdio", "http", "streamable-http", "streamable_http"] | None = None
    disabled: bool = False


class _File(msgspec.Struct, frozen=True, kw_only=True):
    mcp_servers: dict[str, McpServer] = msgspec.field(name="mcpServers")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpLimits:
    """``call_timeout_s``: for each call, and for each list of tools. ``max_result_bytes``: of a result as UTF-8."""

    max_calls: int = 32
    call_timeout_s: float = 60.0
    max_result_bytes: int = 64 << 10


def read_servers(path: Path) -> dict[str, McpServer]:
    """Return the servers of a file by their names, without those that are disabled. It blocks.

    Raises McpConfigError.
    """
    if lacking := lack(Part.MCP):
        raise McpConfigError(f"--mcp-config {lacking}")
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File).mcp_servers
    except OSError as error:
        raise McpConfigError(f"--mcp-config: {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise McpConfigError(f"--mcp-config: {path}: {error}") from None
    for name, server in found.items():
        place = f"--mcp-config: {path}: the server {name!r}"
        if not _NAME.fullmatch(name):
            raise McpConfigError(f"{place} must have a name of at most 64 letters, digits, '_', '-' and '.'")
        if (server.command is None) == (server.url is None):
            raise McpConfigError(f"{place} must have either `command` or `url`")
        if server.url is not None and not server.url.startswith(("http://", "https://")):
            raise McpConfigError(f"{place}: `url` must begin with http:// or https://. Given: {server.url!r}")
    return {name: server for name, server in found.items() if not server.disabled}
