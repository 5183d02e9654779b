"""An MCP server on standard input and output, with one tool: the weather of a city."""

import json
import sys
from typing import Any

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"name": "weather", "description": "Returns the weather of a city.", "inputSchema": _SCHEMA}
_FACTS: dict[str, Any] = {"capabilities": {"tools": {}}, "serverInfo": {"name": "demo", "version": "1.0.0"}}


def _result(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    match method:
        case "initialize":
            return {"protocolVersion": params["protocolVersion"], **_FACTS}
        case "tools/list":
            return {"tools": [_TOOL]}
        case "tools/call":
            text = f"Hail in {params['arguments']['city']}."
            return {"content": [{"type": "text", "text": text}]}
        case "ping":
            return {}
        case _:
            return None


def main() -> None:
    """Answer requests, one in each line, until the input ends."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        result = _result(message["method"], message.get("params") or {})
        answer = {"error": {"code": -32601, "message": "unknown method"}} if result is None else {"result": result}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)


if __name__ == "__main__":
    main()
