"""Tools of MCP servers in a request: which servers it names, which of their tools it may use, and with whose approval.

Servers are those of the operator, by name. A client cannot name a URL or hand over credentials.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from caravan_dialects.api.body import mismatch
from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.messages import MAX_DEPTH, check_depth
from caravan_dialects.api.openai.responses.rules import repeated_server_error, unknown_server_error
from caravan_dialects.conversations.nodes import Json
from caravan_dialects.tool_servers import McpTool

_NAME_A_SERVER = "name a server of the operator in `server_label`"
_REFUSED = ("server_url", "connector_id", "tunnel_id", "authorization", "headers")


class ToolFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Tools of these names, and with this ``readOnlyHint``. What is None matches all."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    def matches(self, tool: McpTool) -> bool:
        reads = (tool.annotations or {}).get("readOnlyHint") is True
        named = self.tool_names is None or tool.name in self.tool_names
        return named and (self.read_only is None or self.read_only == reads)


class ApprovalFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Tools that are called only with approval, and others that are called at once."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of ``tools``. By default all tools of a server are allowed, and each call needs approval."""

    server_label: str
    allowed_tools: list[str] | ToolFilter | None = None
    require_approval: Literal["always", "never"] | ApprovalFilter | None = None

    def allows(self, tool: McpTool) -> bool:
        match self.allowed_tools:
            case None:
                return True
            case ToolFilter() as allowed:
                return allowed.matches(tool)
            case names:
                return tool.name in names

    def needs_approval(self, tool: McpTool) -> bool:
        match self.require_approval:
            case ApprovalFilter(always=always, never=never):
                always_asked = always is not None and always.matches(tool)
                return always_asked or never is None or not never.matches(tool)
            case asked:
                return asked != "never"


def mcp_entries(given: Sequence[Mapping[str, Any]], servers: Sequence[str]) -> dict[str, McpEntry]:
    """Return the entries of ``tools`` for MCP servers by their labels. ``servers``: the names of all that there are.

    Raises ValidationError.
    """
    found: dict[str, McpEntry] = {}
    for number, tool in enumerate(given):
        if tool.get("type") != "mcp":
            continue
        field = f"tools[{number}]"
        for name in _REFUSED:
            if tool.get(name):
                # It may be a secret.
                shown = tool[name] if name in {"server_url", "connector_id"} else "..."
                raise unsupported_field_error(f"{field}.{name}", _NAME_A_SERVER, shown)
        try:
            entry = msgspec.convert(tool, McpEntry)
        except msgspec.ValidationError as error:
            raise mismatch(error, field) from error
        if entry.server_label not in servers:
            raise unknown_server_error(f"{field}.server_label", servers, entry.server_label)
        if entry.server_label in found:
            raise repeated_server_error(f"{field}.server_label", entry.server_label)
        found[entry.server_label] = entry
    return found


def listed_tools(items: Iterable[Json]) -> dict[str, list[McpTool]]:
    """Return the tools of each server that ``items`` list. Lists that failed, or have another form, do not count."""
    found: dict[str, list[McpTool]] = {}
    for item in items:
        if item["type"] == "mcp_list_tools" and isinstance(label := item.get("server_label"), str):
            try:
                tools = msgspec.convert(item.get("tools"), list[McpTool])
            except (msgspec.ValidationError, RecursionError):
                continue
            if not item.get("error"):
                found[label] = [tool for tool in tools if _is_shallow(tool)]
    return found


def _is_shallow(tool: McpTool) -> bool:
    """Whether recursive functions can walk the schema, as those of functions that clients send."""
    try:
        check_depth("tools", tool.input_schema, MAX_DEPTH)
    except ValidationError:
        return False
    return True


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A client's answer to a request for approval. ``name``, ``arguments``: of the call, as the model wrote it."""

    request_id: str
    server_label: str
    name: str
    arguments: str
    approve: bool
    reason: str | None


def decisions(own: Sequence[Json], items: Sequence[Json], labels: Iterable[str]) -> list[Decision]:
    """Return the decisions among ``own``, the items of a request, whose calls ``items`` do not have yet.

    ``items``: all of the conversation. ``labels``: of the servers that the request names.
    """
    known = {*labels}
    made = {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}
    requests = {item["id"]: item for item in items if item["type"] == "mcp_approval_request"}
    found: dict[str, Decision] = {}
    for item in own:
        asked = requests.get(item.get("approval_request_id")) if item["type"] == "mcp_approval_response" else None
        match asked:
            case {"id": str(name), "server_label": str(label), "name": str(tool), "arguments": str(arguments)}:
                if name not in made and label in known and isinstance(approve := item.get("approve"), bool):
                    reason = item.get("reason")
                    found[name] = Decision(
                        request_id=name,
                        server_label=label,
                        name=tool,
                        arguments=arguments,
                        approve=approve,
                        reason=reason if isinstance(reason, str) else None,
                    )
            case _:
                pass
    return [*found.values()]
