"""The program that speaks to one MCP server, with MCP's own SDK. The router starts it, and ends it with its own end.

A server may be slow, send anything of any size, or end. So it has this process to itself, with a limit on its memory:
what goes wrong here reaches no other server, and never the router.
"""

import asyncio
import json
import os
import resource
import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import BinaryIO

import msgspec
from mcp import MCPError
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp_types import CallToolResult, ContentBlock, EmbeddedResource, ResourceLink, TextContent, TextResourceContents

from caravan_dialects.guarded_child import LENGTH_BYTES, framed
from caravan_dialects.tool_servers import NO_CONNECTION, TIMED_OUT, UNUSABLE, CallResult, McpTool, ToolServerError
from caravan_router.mcp.config import McpServer
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

# Address space, which Python, the SDK and threads take a third of.
_MEMORY_BYTES = 1 << 30
# A server that has not answered in time may be busy with that request alone.
_PING_S = 5.0
_MAX_TOOLS, _MAX_PAGES, _MAX_LIST_BYTES = 1024, 64, 1 << 20
_MAX_MESSAGE = 500
# Runs a command without this process's limit on memory. Linux ends it with this process; elsewhere, its input ends.
WITHOUT_LIMIT = """
import ctypes, os, resource, signal, sys
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error.strerror}")
"""


async def serve(requests: asyncio.StreamReader, replies: BinaryIO) -> None:
    """Answer requests until there are no more, or the server is of no use any more."""
    start = msgspec.msgpack.decode(await _read(requests), type=Start)
    speaker = _Speaker(start, replies)
    try:
        async with AsyncExitStack() as held:
            async with asyncio.timeout(start.start_timeout_s):
                speaker.client = await held.enter_async_context(await _client(start.server, held))
            await speaker.run(requests)
    except TimeoutError:
        speaker.tell(_broken(TIMED_OUT, f"no connection within {start.start_timeout_s:g} s"))
    except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  whatever the SDK or the server raise
        speaker.tell(_broken(NO_CONNECTION, _words(error)))


async def _client(server: McpServer, held: AsyncExitStack) -> Client:
    if server.url is not None:
        http = await held.enter_async_context(create_mcp_http_client(headers=server.headers))
        return Client(streamable_http_client(server.url, http_client=http), cache=None)
    assert server.command is not None
    arguments = ["-I", "-S", "-c", WITHOUT_LIMIT, server.command, *server.args]
    return Client(
        StdioServerParameters(command=sys.executable, args=arguments, env=server.env, cwd=server.cwd), cache=None
    )


class _Speaker:
    client: Client

    def __init__(self, start: Start, replies: BinaryIO) -> None:
        self._replies = replies
        self._max_bytes = start.max_result_bytes
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._broken = asyncio.Event()

    async def run(self, requests: asyncio.StreamReader) -> None:
        reading = asyncio.create_task(self._take_requests(requests))
        broken = asyncio.create_task(self._broken.wait())
        await asyncio.wait({reading, broken}, return_when=asyncio.FIRST_COMPLETED)
        ended = [reading, broken, *self._tasks.values()]
        for task in ended:
            task.cancel()
        await asyncio.wait(ended)

    async def _take_requests(self, requests: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(Asked)
        while data := await _read(requests):
            asked = decoder.decode(data)
            if isinstance(asked, Cancel):
                if (task := self._tasks.get(asked.number)) is not None:
                    task.cancel()
            else:
                self._tasks[asked.number] = asyncio.create_task(self._answer(asked))

    async def _answer(self, asked: ListTools | Call) -> None:
        try:
            async with asyncio.timeout(asked.timeout_s):
                self.tell(await self._reply(asked))
        except TimeoutError:
            self.tell(Failed(number=asked.number, code=TIMED_OUT, message=f"no answer within {asked.timeout_s:g} s"))
            await self._check()
        except ToolServerError as error:
            self.tell(Failed(number=asked.number, code=error.code, message=error.message))
        except MCPError as error:
            code = error.error.code
            self.tell(Failed(number=asked.number, code=code, message=_words(error), ends=code == NO_CONNECTION))
            if code == NO_CONNECTION:
                self._broken.set()
        except Exception as error:  # noqa: BLE001  whatever the SDK makes of a wrong answer
            self.tell(Failed(number=asked.number, code=UNUSABLE, message=_words(error)))
        finally:
            del self._tasks[asked.number]

    async def _reply(self, asked: ListTools | Call) -> Answered:
        if isinstance(asked, ListTools):
            return Tools(number=asked.number, tools=await self._list())
        return Called(
            number=asked.number, result=self._result(await self.client.call_tool(asked.tool, asked.arguments))
        )

    async def _list(self) -> list[McpTool]:
        found: list[McpTool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await self.client.list_tools(cursor=cursor)
            found += [
                McpTool(
                    name=tool.name,
                    description=tool.description,
                    input_schema=tool.input_schema,
                    annotations=None
                    if tool.annotations is None
                    else tool.annotations.model_dump(by_alias=True, exclude_none=True),
                )
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if not cursor or len(found) > _MAX_TOOLS:
                break
        size = len(msgspec.json.encode(found))
        if cursor or len(found) > _MAX_TOOLS or size > _MAX_LIST_BYTES:
            raise ToolServerError(
                UNUSABLE,
                f"the list of tools may have {_MAX_TOOLS} tools on {_MAX_PAGES} pages and {_MAX_LIST_BYTES} bytes. "
                f"Given: {len(found)} tools{' and more' if cursor else ''}, {size} bytes",
            )
        return found

    def _result(self, result: CallToolResult) -> CallResult:
        text = "\n".join(_texts(result.content))
        if not result.content and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        # Lone surrogates have no UTF-8.
        data = text.encode(errors="replace")
        if len(data) > self._max_bytes:
            raise ToolServerError(UNUSABLE, f"the result may have at most {self._max_bytes} bytes. Given: {len(data)}")
        return CallResult(text=data.decode(), failed=bool(result.is_error))

    async def _check(self) -> None:
        """End this process if the server does not answer at all, so that the next request starts it anew."""
        try:
            async with asyncio.timeout(_PING_S):
                await self.client.session.send_ping()
        except MCPError as error:
            # One that does not know the request does answer.
            if error.error.code != NO_CONNECTION:
                return
            self.tell(_broken(NO_CONNECTION, _words(error)))
            self._broken.set()
        except TimeoutError:
            self.tell(_broken(TIMED_OUT, f"the server has not answered for {_PING_S:g} s more"))
            self._broken.set()

    def tell(self, answered: Answered) -> None:
        self._replies.write(framed(msgspec.msgpack.encode(answered)))
        self._replies.flush()


def _texts(content: Iterable[ContentBlock]) -> Iterable[str]:
    for part in content:
        match part:
            case TextContent():
                yield part.text
            case EmbeddedResource(resource=TextResourceContents() as resource):
                yield resource.text
            case ResourceLink() | EmbeddedResource():
                yield f"[{part.type}]"
            case _:
                yield f"[{part.type}]"


def _broken(code: int, message: str) -> Failed:
    return Failed(number=ALL, code=code, message=message, ends=True)


def _words(error: BaseException) -> str:
    """Return what went wrong, in one line of limited length."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_MAX_MESSAGE].encode(errors="replace").decode()


async def _read(requests: asyncio.StreamReader) -> bytes:
    """Return the next message; nothing at the end."""
    try:
        head = await requests.readexactly(LENGTH_BYTES)
        return await requests.readexactly(int.from_bytes(head, "big"))
    except asyncio.IncompleteReadError:
        return b""


async def _main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Nobody else may write to the pipe to the router.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    await serve(requests, replies)


if __name__ == "__main__":
    asyncio.run(_main())
