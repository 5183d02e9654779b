"""MCP servers whose tools are functions of the test."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from caravan_dialects.tool_servers import CallResult, McpTool, ToolServerError

Function = Callable[..., str | ToolServerError | CallResult]


def tool(name: str, *, reads: bool = False, **properties: str) -> McpTool:
    """Return a tool with arguments of these types. ``reads``: it changes nothing."""
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    annotations = {"readOnlyHint": True} if reads else None
    return McpTool(name=name, description=f"Does {name}.", input_schema=schema, annotations=annotations)


@dataclass
class ScriptedServers:
    """``tools``: of each server, or why they cannot be listed. ``functions``: by the names of the tools.

    ``made`` has the calls and the lists, in their order. A call waits for ``resume`` if it is there.
    """

    tools: Mapping[str, Sequence[McpTool] | ToolServerError]
    functions: Mapping[str, Function] = field(default_factory=dict)
    max_calls: int = 8
    made: list[Any] = field(default_factory=list)
    resume: asyncio.Event | None = None
    under_way: int = 0

    @property
    def names(self) -> Sequence[str]:
        return [*self.tools]

    async def list_tools(self, server: str) -> Sequence[McpTool]:
        self.made.append(server)
        found = self.tools[server]
        if isinstance(found, ToolServerError):
            raise found
        return found

    async def call(self, server: str, tool: str, arguments: dict[str, Any]) -> CallResult:
        self.made.append((server, tool, arguments))
        self.under_way += 1
        try:
            if self.resume is not None:
                await self.resume.wait()
        finally:
            self.under_way -= 1
        result = self.functions[tool](**arguments)
        if isinstance(result, ToolServerError):
            raise result
        return result if isinstance(result, CallResult) else CallResult(text=result)

    async def close(self) -> None:
        pass
