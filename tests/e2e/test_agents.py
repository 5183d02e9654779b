"""Coding agents as npm has them, each with a task of two tool calls, against a model that follows a script.

`make test-clients` installs them. Each has a home and a folder of its own.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.agent_host import Call, Exchange, Turns, hosting, run_agent
from caravan_testing.serve_process import ROOT

pytestmark = [pytest.mark.clients, pytest.mark.programs]

PROGRAMS = Path(__file__).parent / "programs"
INSTALLED = ROOT / ".cache/clients/agents/node_modules/.bin"
MCP_SERVER = [sys.executable, str(PROGRAMS / "agents/mcp_server.py")]
MODEL = "scripted"
TASK = "qztask: write a note, and read it."
NOTE = "hail and sleet"
DONE = "The note is written."


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent runs: ``home`` for its settings, ``work`` for its files, ``url`` of the server."""

    home: Path
    work: Path
    url: str = ""

    def settings(self, path: str, content: object) -> Path:
        """Write a file of ``home``: text, or JSON."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return file

    @property
    def note(self) -> Path:
        return self.work / "note.txt"


@dataclass(frozen=True, slots=True)
class Run:
    """How an agent is started."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent and its task.

    ``run``: writes its settings. ``turns``: what the model says. ``offered``: names of some tools that it must see.
    ``seen``: what the last tool returned. ``hosted``: types of tools that only the maker's own servers run. ``socket``:
    whether it asks over WebSocket.
    """

    name: str
    run: Callable[[Place], Run]
    turns: Callable[[Place], Turns]
    offered: Sequence[str]
    seen: str = NOTE
    hosted: Sequence[str] = ()
    socket: bool = False


def writing(write: str, read: str, path: str = "path", content: str = "content") -> Callable[[Place], Turns]:
    """Return a task in which a note is written with one tool and read with another."""

    def turns(place: Place) -> Turns:
        note = str(place.note)
        return {"qztask": [Call(write, {path: note, content: NOTE}), Call(read, {path: note}), DONE]}

    return turns


def codex(place: Place, *, more: str = "") -> Run:
    place.settings(
        ".codex/config.toml",
        f"""
model = "{MODEL}"
model_provider = "caravan"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.caravan]
name = "Caravan"
base_url = "{place.url}/v1"
wire_api = "responses"
{more}
[mcp_servers.demo]
command = {json.dumps(MCP_SERVER[0])}
args = {json.dumps(MCP_SERVER[1:])}
""",
    )
    return Run(["exec", "--skip-git-repo-check", TASK], {"CODEX_HOME": str(place.home / ".codex")})


def codex_on_websocket(place: Place) -> Run:
    return codex(place, more="supports_websockets = true")


def claude(place: Place) -> Run:
    servers = {"mcpServers": {"demo": {"command": MCP_SERVER[0], "args": MCP_SERVER[1:]}}}
    config = place.settings("mcp.json", servers)
    tools = [
        "--mcp-config",
        str(config),
        "--strict-mcp-config",
        "--allowedTools",
        "mcp__demo__weather,ToolSearch,Write",
    ]
    environment = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": "any",
        "ENABLE_TOOL_SEARCH": "true",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return Run(["-p", TASK, "--model", MODEL, *tools], environment)


def opencode(place: Place) -> Run:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "any"},
        "models": {MODEL: {"limit": {"context": 200_000, "output": 8_000}}},
    }
    config = {"provider": {"caravan": provider}, "autoupdate": False, "share": "disabled"}
    place.settings(".config/opencode/opencode.json", config)
    return Run(["run", "--model", f"caravan/{MODEL}", TASK], {"OPENCODE_DISABLE_MODELS_FETCH": "1"})


def pi(place: Place) -> Run:
    provider = {
        "baseUrl": f"{place.url}/v1",
        "api": "openai-completions",
        "apiKey": "any",
        "models": [{"id": MODEL, "contextWindow": 200_000, "maxTokens": 8_000}],
    }
    place.settings(".pi/agent/models.json", {"providers": {"caravan": provider}})
    return Run(["-p", "--provider", "caravan", "--model", MODEL, TASK], {"PI_OFFLINE": "1"})


def qwen(place: Place) -> Run:
    place.settings(".qwen/settings.json", {"security": {"auth": {"selectedType": "openai"}}})
    environment = {"OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_API_KEY": "any", "OPENAI_MODEL": MODEL}
    return Run(["--yolo", "-p", TASK], environment)


def cline(place: Place) -> Run:
    settings = {"provider": "openai-compatible", "apiKey": "any", "model": MODEL, "baseUrl": f"{place.url}/v1"}
    written = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": written}}
    place.settings("cline/settings/providers.json", providers)
    return Run(["--data-dir", str(place.home / "cline"), TASK])


def gemini(place: Place) -> Run:
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "telemetry": {"enabled": False}}
    place.settings(".gemini/settings.json", settings)
    environment = {
        "GOOGLE_GEMINI_BASE_URL": place.url,
        "GEMINI_API_KEY": "any",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    return Run(["--yolo", "--model", MODEL, "-p", TASK], environment)


def codex_turns(place: Place) -> Turns:
    """Return a task with the tool of the MCP server and a sub-agent, which writes and reads the note."""

    def wait(prompt: str) -> Call:
        (agent,) = set(re.findall(r"agent_id[^0-9a-f]+([0-9a-f-]{36})", prompt))
        return Call("multi_agent_v1__wait_agent", {"targets": [agent], "timeout_ms": 60_000})

    return {
        "qztask": [
            Call("mcp__demo__weather", {"city": "Bergen"}),
            Call("multi_agent_v1__spawn_agent", {"message": "qzpart: write the note."}),
            wait,
            DONE,
        ],
        "qzpart": [
            Call("exec_command", {"cmd": f"echo {NOTE} > {place.note}"}),
            Call("exec_command", {"cmd": f"cat {place.note}"}),
            f"It says {NOTE}.",
        ],
    }


def claude_turns(place: Place) -> Turns:
    """Return a task in which the tool of the MCP server has to be found first."""
    return {
        "qztask": [
            Call("Write", {"file_path": str(place.note), "content": NOTE}),
            Call("ToolSearch", {"query": "select:mcp__demo__weather"}),
            Call("mcp__demo__weather", {"city": "Bergen"}),
            DONE,
        ]
    }


def cline_turns(place: Place) -> Turns:
    write = Call("editor", {"path": str(place.note), "new_text": NOTE})
    return {"qztask": [write, Call("read_files", {"files": [{"path": str(place.note)}]}), DONE]}


AGENTS = (
    Agent("codex", codex, codex_turns, ["weather", "spawn_agent"], f"It says {NOTE}.", ["web_search"]),
    Agent(
        "codex",
        codex_on_websocket,
        codex_turns,
        ["weather", "spawn_agent"],
        f"It says {NOTE}.",
        ["web_search"],
        socket=True,
    ),
    Agent("claude", claude, claude_turns, ["mcp__demo__weather", "Bash", "Agent"], "Hail in Bergen."),
    Agent("opencode", opencode, writing("write", "read", "filePath"), ["bash", "task"]),
    Agent("pi", pi, writing("write", "read"), ["bash", "edit"]),
    Agent("qwen", qwen, writing("write_file", "read_file", "file_path"), ["run_shell_command", "agent"]),
    Agent("cline", cline, cline_turns, ["run_commands", "spawn_agent"]),
    Agent("gemini", gemini, writing("write_file", "read_file", "file_path"), ["run_shell_command"]),
)


def grown(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield the name of each tool, also of those in groups, with the tools up to it."""
    for place, tool in enumerate(tools):
        group = next((key for key in ("tools", "functionDeclarations") if key in tool), None)
        if group is None:
            name = tool.get("function", tool).get("name") or tool["type"]
            yield name, [*tools[: place + 1]]
        else:
            for count, member in enumerate(tool[group], 1):
                yield member["name"], [*tools[:place], {**tool, group: tool[group][:count]}]


async def prompt_tokens(client: ClientSession, request: Exchange, tools: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of prompt tokens of a recorded request if it had these tools."""
    path, body = request.path.partition("?")[0], {**request.body, "tools": tools}
    if path.startswith("/v1beta/"):
        name = f"models/{MODEL}"
        path, body = f"/v1beta/{name}:countTokens", {"generateContentRequest": {**body, "model": name}}
    else:
        path += "/count_tokens" if path == "/v1/messages" else "/input_tokens"
    async with client.post(path, json=body) as response:
        counted = await response.json()
        assert response.status == 200, counted
    for key in ("input_tokens", "totalTokens"):
        if key in counted:
            return int(counted[key])
    raise AssertionError(counted)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: f"{agent.name}{'-websocket' * agent.socket}")
async def test_an_agent_completes_a_task(agent: Agent, tmp_path: Path) -> None:
    place = Place(tmp_path / "home", tmp_path / "work")
    place.home.mkdir()
    place.work.mkdir()
    assert (INSTALLED / agent.name).exists(), f"{agent.name} is not installed: run `make test-clients`"
    async with hosting(agent.turns(place)) as host:
        place = replace(place, url=host.url)
        run = agent.run(place)
        command: list[str | Path] = [INSTALLED / agent.name, *run.arguments]
        printed = await run_agent(command, place.work, {"HOME": str(place.home), **run.environment})
        assert DONE in printed
        assert place.note.read_text().strip() == NOTE
        assert agent.seen in host.last_result, printed
        assert host.refused == []
        # Some ask for a title without tools, too.
        asking = [exchange for exchange in host.exchanges if exchange.body and exchange.body.get("tools")]
        assert {exchange.method for exchange in asking} == {"WS" if agent.socket else "POST"}
        # On a connection, the others continue the first one, and have a part of the prompt only.
        request = asking[0 if agent.socket else -1]
        async with ClientSession(host.url) as client:
            before = await prompt_tokens(client, request, [])
            adds: dict[str, int] = {}
            for name, tools in grown(request.body["tools"]):
                tokens = await prompt_tokens(client, request, tools)
                adds[name], before = tokens - before, tokens
    # Each tool is in the prompt, but for those that its maker's servers run.
    assert [name for name, more in adds.items() if more <= 0] == list(agent.hosted)
    assert set(agent.offered) <= adds.keys()


def shell_turns(place: Place) -> Turns:
    """Return a task in which the note is written and read with commands."""
    commands = (f"echo {NOTE} > {place.note}", f"cat {place.note}")
    return {"qztask": [*(Call("exec_command", {"cmd": command}) for command in commands), DONE]}


# By the agent: its own words on the command line, and what the model says.
LAUNCHED = {
    "codex": (["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK], shell_turns),
    "claude": (["-p", TASK, "--allowedTools", "Write,Read"], writing("Write", "Read", "file_path")),
    "opencode": (["run", TASK], writing("write", "read", "filePath")),
}


# They name other models, and stay as they are.
USERS_FILES = {
    ".codex/config.toml": 'model = "another"\n',
    ".claude/settings.json": '{"model": "another"}',
    # OpenCode adds the schema itself where it is missing.
    ".config/opencode/opencode.json": '{"$schema": "https://opencode.ai/config.json", "model": "another/model"}',
}


@pytest.mark.parametrize("name", LAUNCHED)
async def test_an_agent_that_is_launched_completes_a_task(name: str, tmp_path: Path) -> None:
    place = Place(tmp_path / "home", tmp_path / "work")
    words, turns = LAUNCHED[name]
    theirs = {place.settings(file, text): text for file, text in USERS_FILES.items()}
    place.work.mkdir()
    assert (INSTALLED / name).exists(), f"{name} is not installed: run `make test-clients`"
    async with hosting(turns(place)) as host:
        command = [sys.executable, "-m", "caravan_serve", "launch", name, *words]
        environment = {
            "HOME": str(place.home),
            "PATH": f"{INSTALLED}:{os.environ['PATH']}",
            "CARAVAN_SERVER": host.url,
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
        printed = await run_agent(command, place.work, environment)
        assert DONE in printed
        assert place.note.read_text().strip() == NOTE
        assert NOTE in host.last_result, printed
        assert host.refused == []
    assert {file: file.read_text() for file in theirs} == theirs


async def test_openai_node_and_the_ai_sdk_call_tools(tmp_path: Path) -> None:
    cities = ["Bergen", "Oslo"]
    turns: Turns = {"qztask": [*(Call("weather", {"city": city}) for city in cities), DONE]}
    async with hosting(turns) as host:
        # Packages are looked for beside the script.
        (tmp_path / "node_modules").symlink_to(ROOT / ".cache/clients/javascript/node_modules")
        script = shutil.copy(PROGRAMS / "javascript/session.mjs", tmp_path)
        command = ["node", script, host.url]
        got = json.loads(await run_agent(command, tmp_path, {"HOME": str(tmp_path)}))
        assert host.refused == []
    assert len(got) == 6
    for name, one in got.items():
        assert one["text"] == one.get("streamed", DONE) == DONE, name
        # Twice, if it was streamed as well.
        assert one["cities"][:2] == cities, name
        assert len(one["cities"]) == (4 if "streamed" in one else 2), name
        assert one["tokens"] > 0, name
