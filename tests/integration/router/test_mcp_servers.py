"""MCP servers as programs: those of MCP's own SDK, and hostile ones, each behind a process of its own."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from openai import AsyncOpenAI
from openai.types.responses.response_output_item import McpCall

import caravan_testing
from caravan_dialects.tool_servers import TIMED_OUT, UNUSABLE, CallResult, ToolServerError
from caravan_router.mcp.config import McpConfigError, McpLimits, McpServer, read_servers
from caravan_router.mcp.process import WITHOUT_LIMIT
from caravan_router.mcp.servers import McpServers
from caravan_testing.http_server import serving
from caravan_testing.programs import kept_ports
from caravan_testing.scripted_engine import MODEL, ScriptedEngine, letters
from caravan_testing.waiting import DEADLINE_S, eventually

_FOLDER = Path(caravan_testing.__file__).parent
_PROGRAM = str(_FOLDER / "mcp_server.py")
SDK = McpServer(command=sys.executable, args=[_PROGRAM], env={"GIVEN": "1"})


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers start slowly, as on a busy host."""
    monkeypatch.setattr("caravan_router.mcp.servers._START_S", DEADLINE_S)


def hostile(kind: str) -> McpServer:
    return McpServer(command=sys.executable, args=["-S", str(_FOLDER / "hostile_mcp_server.py"), kind])


@asynccontextmanager
async def running(servers: dict[str, McpServer], **limits: Any) -> AsyncIterator[McpServers]:
    made = McpServers(servers, McpLimits(**limits))
    try:
        yield made
    finally:
        await made.close()


async def error_of(servers: McpServers, name: str, tool: str, **arguments: Any) -> ToolServerError:
    with pytest.raises(ToolServerError) as caught:
        await servers.call(name, tool, arguments)
    return caught.value


async def test_a_server_is_started_when_it_is_first_asked() -> None:
    async with running({"demo": hostile("nothing")}) as servers:
        assert servers.pids == {}
        assert [tool.name for tool in await servers.list_tools("demo")] == ["ask"]
        assert await servers.call("demo", "ask", {}) == CallResult(text="fine")


def test_a_process_of_which_only_the_pipe_is_known_to_be_closed_is_replaced() -> None:
    """A process that is killed closes its pipes first. On the event loop that the router has.

    The call that finds it so may fail, as its tool may have been used.
    """

    async def ask() -> str:
        async with running({"demo": hostile("nothing")}) as servers:
            await servers.list_tools("demo")
            process = servers._servers["demo"].process
            assert process is not None
            process._requests.close()
            await asyncio.sleep(0)  # in the loop's next turn the pipe is closed
            with contextlib.suppress(ToolServerError):
                await servers.call("demo", "ask", {})
            return (await servers.call("demo", "ask", {})).text

    assert uvloop.run(ask()) == "fine"


@pytest.mark.slow
async def test_a_server_of_the_sdk_is_called_and_started_anew_when_it_ends() -> None:
    async with running({"demo": SDK}, call_timeout_s=DEADLINE_S, max_result_bytes=1000) as servers:
        [add, *_] = await servers.list_tools("demo")
        assert (add.name, add.description) == ("add", "Add two numbers.")
        assert add.input_schema["required"] == ["a", "b"]
        assert await servers.call("demo", "add", {"a": 1, "b": 2}) == CallResult(text="3")
        assert (await servers.call("demo", "add", {"a": "one"})).failed
        assert "nonesuch" in (await servers.call("demo", "nonesuch", {})).text
        variables = (await servers.call("demo", "variables", {})).text
        assert "GIVEN" in variables
        assert not {name for name in variables.split() if name.startswith(("CARAVAN", "PYTEST"))}
        assert (await servers.call("demo", "huge", {"size": 1000})).text == "x" * 1000
        error = await error_of(servers, "demo", "huge", size=1001)
        assert (error.code, error.message) == (UNUSABLE, "the result may have at most 1000 bytes. Given: 1001")
        before = servers.pids
        assert "closed" in str(await error_of(servers, "demo", "crash"))
        assert await servers.call("demo", "add", {"a": 3, "b": 4}) == CallResult(text="7")
        assert servers.pids != before
        os.kill(servers.pids["demo"], signal.SIGKILL)
        calls = [servers.call("demo", "add", {"a": 1, "b": 1}) for _ in range(3)]
        await asyncio.gather(*calls, return_exceptions=True)
        assert await servers.call("demo", "add", {"a": 5, "b": 6}) == CallResult(text="11")


@pytest.mark.slow
async def test_a_slow_call_ends_in_time_and_holds_nobody_up() -> None:
    async with running({"demo": SDK}, call_timeout_s=5.0) as servers:
        await servers.list_tools("demo")
        slow = asyncio.create_task(error_of(servers, "demo", "sleep", seconds=1000))
        left = asyncio.create_task(servers.call("demo", "sleep", {"seconds": 1000}))
        pid = servers.pids["demo"]
        assert (await servers.call("demo", "add", {"a": 1, "b": 2})).text == "3"
        left.cancel()
        assert ((await slow).code, (await slow).message) == (TIMED_OUT, "no answer within 5 s")
        assert (await servers.call("demo", "add", {"a": 1, "b": 2})).text == "3"
        assert servers.pids["demo"] == pid


@pytest.mark.slow
async def test_a_server_over_http_is_called_and_found_again_after_its_restart() -> None:
    with kept_ports(1) as [port]:

        async def started() -> asyncio.subprocess.Process:
            return await asyncio.create_subprocess_exec(sys.executable, _PROGRAM, str(port))

        async def sum_of(servers: McpServers) -> str:
            try:
                return (await servers.call("demo", "add", {"a": 1, "b": 2})).text
            except ToolServerError as error:
                return str(error)

        server = await started()
        try:
            url = f"http://127.0.0.1:{port}/mcp"
            async with running({"demo": McpServer(url=url)}, call_timeout_s=10.0) as servers:
                await eventually(lambda: sum_of(servers), "it answers", lambda text: text == "3")
                assert [tool.name for tool in await servers.list_tools("demo")][:1] == ["add"]
                server.kill()
                await server.wait()
                assert await sum_of(servers) != "3"
                server = await started()
                await eventually(lambda: sum_of(servers), "it answers again", lambda text: text == "3")
        finally:
            server.kill()
            await server.wait()


_LISTS = {
    "endless list": "64 pages",
    "huge list": "bytes",
    "wrong list": "list",
    "silent": "no ",
}
_CALLS = {
    "wrong result": "content",
    "endless line": "",
    "hanging": "no answer within 10 s",
    "ends": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*_LISTS, *_CALLS])
async def test_a_hostile_server_ends_in_an_error_and_disturbs_no_other(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_timeout_s = 10.0 if kind in ("hanging", "endless line") else DEADLINE_S
    async with running({"bad": hostile(kind), "good": hostile("good")}, call_timeout_s=call_timeout_s) as servers:
        assert (await servers.call("good", "ask", {})).text == "fine"
        if kind == "silent":
            monkeypatch.setattr("caravan_router.mcp.servers._START_S", 5.0)
        asking = asyncio.create_task(_error_of_all(servers))
        assert (await servers.call("good", "ask", {})).text == "fine"
        error = await asking
        assert (_LISTS | _CALLS)[kind] in error.message
        assert len(error.message) <= 600
        assert (await servers.call("good", "ask", {})).text == "fine"


async def _error_of_all(servers: McpServers) -> ToolServerError:
    try:
        await servers.list_tools("bad")
        await servers.call("bad", "ask", {})
    except ToolServerError as error:
        return error
    raise AssertionError("it did nothing wrong")


@pytest.mark.slow
async def test_noise_between_answers_is_skipped() -> None:
    async with running({"bad": hostile("noise")}) as servers:
        assert (await servers.call("bad", "ask", {})).text == "fine"


async def test_what_cannot_be_started_is_an_error_of_the_call() -> None:
    async with running({"none": McpServer(command="/nonesuch")}) as servers:
        error = await error_of(servers, "none", "ask")
        assert "closed" in error.message
        [pid] = servers.pids.values()
        # It is not started again for each request.
        again = await error_of(servers, "none", "ask")
        assert (again.code, again.message[: len(error.message)]) == (error.code, error.message)
        assert "it is not started again for" in again.message
        assert [*servers.pids.values()] == [pid]


def test_a_command_is_run_where_there_is_no_prctl() -> None:
    elsewhere = 'import ctypes, sys\nsys.platform = "darwin"\nctypes.CDLL = None\n'
    subprocess.run([sys.executable, "-I", "-S", "-c", elsewhere + WITHOUT_LIMIT, "true"], check=True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "truncated"),
        ("{}", "mcpServers"),
        ('{"mcpServers": {"a b": {"command": "x"}}}', "'a b' must have a name of at most 64 letters"),
        ('{"mcpServers": {"a": {}}}', "'a' must have either `command` or `url`"),
        ('{"mcpServers": {"a": {"command": "x", "url": "http://x"}}}', "'a' must have either `command` or `url`"),
        ('{"mcpServers": {"a": {"url": "ftp://x"}}}', "`url` must begin with http:// or https://"),
        ('{"mcpServers": {"a": {"url": "http://x", "type": "sse"}}}', "sse"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(McpConfigError, match="--mcp-config") as caught:
        read_servers(file)
    assert problem in str(caught.value)


def test_servers_that_other_programs_know_are_read(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(
        '{"mcpServers": {"files": {"command": "npx", "args": ["-y", "x"], "env": {"A": "b"}, "alwaysAllow": []},'
        ' "off": {"command": "x", "disabled": true}, "web": {"type": "http", "url": "https://example.com/mcp"}}}'
    )
    found = read_servers(file)
    assert [*found] == ["files", "web"]
    assert found["files"] == McpServer(command="npx", args=["-y", "x"], env={"A": "b"})


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caravan_proto.packages.missing", lambda _: ["mcp"])
    with pytest.raises(McpConfigError, match=r"--mcp-config needs packages that are not installed: pip install .*mcp"):
        read_servers(tmp_path / "mcp.json")


@pytest.mark.slow
async def test_openai_python_reads_a_loop_over_a_server() -> None:
    written = [
        f'<tool_call>\n{{"name": "demo__{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in (("add", '{"a": 1, "b": 2}'), ("variables", "{}"))
    ]
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{# <tool_call> #}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
    )
    engine = ScriptedEngine(model=replace(MODEL, chat_template=template, max_sequence_tokens=4096))
    engine.script = lambda _: letters([written[0], "3", written[1]][len(engine.streams)])
    tools: Any = [{"type": "mcp", "server_label": "demo", "require_approval": {"never": {"tool_names": ["add"]}}}]
    servers = McpServers({"demo": SDK}, McpLimits(call_timeout_s=DEADLINE_S))
    async with serving(engine, tool_servers=servers) as service:
        client = AsyncOpenAI(base_url=f"{service.url}/v1", api_key="any")
        found = await client.responses.create(model="scripted", input="Hi", tools=tools)
        assert [type(item).__name__ for item in found.output] == ["McpListTools", "McpCall", "ResponseOutputMessage"]
        assert isinstance(found.output[1], McpCall)
        assert found.output[1].output == "3"
        async with client.responses.stream(
            model="scripted", input="Again", previous_response_id=found.id, tools=tools
        ) as stream:
            names = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert names[-1] == "response.completed"
        assert [type(item).__name__ for item in final.output] == ["McpApprovalRequest"]
        await client.close()
