"""A server of MCP's own SDK, started as a program: over standard input and output, or over HTTP at a port."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

app = MCPServer("demo", log_level="CRITICAL")


@app.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@app.tool()
def variables() -> list[str]:
    """Name the variables of the environment, and the limit on memory."""
    return [*os.environ]


@app.tool()
async def sleep(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "awake"


@app.tool()
def huge(size: int) -> str:
    """Return so many letters."""
    return "x" * size


@app.tool()
def crash() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        app.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        app.run()
