"""A server over standard input and output that does what its argument says, once it has answered the handshake."""

import json
import sys
import time
from typing import Any

KIND = sys.argv[1]
TOOL = {"name": "ask", "inputSchema": {"type": "object"}}


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def result_of(method: str) -> Any:
    if method == "initialize":
        capabilities: dict[str, Any] = {"tools": {}}
        about = {"name": "hostile", "version": "0"}
        return {"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": about}
    if method == "tools/list":
        more = {"nextCursor": "again"} if KIND == "endless list" else {}
        tools = [{**TOOL, "description": "x" * (2 << 20)}] if KIND == "huge list" else [TOOL]
        return {"tools": 5 if KIND == "wrong list" else tools, **more}
    return {"content": "wrong"} if KIND == "wrong result" else {"content": [{"type": "text", "text": "fine"}]}


def main() -> None:
    if KIND == "silent":
        time.sleep(1000)
    for line in sys.stdin:
        message = json.loads(line)
        method = message.get("method", "")
        if "id" not in message:
            continue
        if method not in ("initialize", "tools/list", "tools/call"):
            say(id=message["id"], error={"code": -32601, "message": "no such method"})
        elif method == "tools/call" and KIND == "noise":
            sys.stdout.write("this is no JSON\n{}\n[]\n")
            say(id=12345, result={})
            say(id=message["id"], result=result_of(method))
        elif method == "tools/call" and KIND == "endless line":
            block = "x" * (1 << 20)
            while True:
                sys.stdout.write(block)
        elif method == "tools/call" and KIND == "ends":
            sys.exit(1)
        elif method == "tools/call" and KIND == "hanging":
            time.sleep(1000)
        else:
            say(id=message["id"], result=result_of(method))


main()
