"""What agents talk to: the router on a real port, a model that follows a script, and a proxy that records both ways."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import ClientConnectionResetError, ClientSession, ClientTimeout, DummyCookieJar, web

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import serving
from caravan_testing.scripted_engine import MODEL, ScriptedEngine, Step, ids_of, letters
from caravan_testing.waiting import DEADLINE_S

# Marks that no agent writes itself.
_TOOLS, _TURN = "<|tools|>", "<|im_start|>"
TEMPLATE = (
    f"{{% if tools %}}{_TOOLS}{{% for tool in tools %}}{{{{ tool | tojson }}}}\n{{% endfor %}}"
    'Call one: <tool_call>{"name": "its name", "arguments": {}}</tool_call>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTEXT = 2_000_000
# Sent anew by each side of a proxy.
_OF_ONE_HOP = {"host", "content-length", "transfer-encoding", "connection", "keep-alive"}


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model writes."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        body = json.dumps({"name": self.name, "arguments": self.arguments})
        return f"<tool_call>\n{body}\n</tool_call>"


# What the model says: a call, a text, or what follows from the prompt.
Said = Call | str | Callable[[str], Call]
Turns = Mapping[str, Sequence[Said]]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request of an agent, and how it was answered."""

    method: str
    path: str
    body: Any
    status: int
    ignored: str
    text: str


@dataclass
class AgentHost:
    """``turns``: what the model says after each result of a tool, by the word in a user's turn that asks for it.

    A prompt without tools, such as one for a title, is answered by a title. ``prompts`` are all that were generated
    from.
    """

    turns: Turns
    url: str = ""
    prompts: list[str] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)

    def script(self, spec: GenerationSpec) -> list[Step]:
        prompt = "".join(chr(token - 100) for token in spec.prompt)
        self.prompts.append(prompt)
        return letters(self._said(prompt), 40)

    def _said(self, prompt: str) -> str:
        past = prompt.split(_TURN)
        asked = [
            (place, word)
            for place, turn in enumerate(past)
            for word in self.turns
            if turn.startswith("user\n") and word in turn
        ]
        if _TOOLS not in prompt or not asked:
            return "A title"
        # A sub-agent may see the conversation that it comes from.
        place, word = asked[-1]
        results = sum(turn.startswith("tool\n") for turn in past[place:])
        turns = self.turns[word]
        said = turns[min(results, len(turns) - 1)]
        return str(said(prompt) if callable(said) else said)

    @property
    def last_result(self) -> str:
        """What the model read last of a tool."""
        prompts = [prompt for prompt in self.prompts if _TOOLS in prompt]
        return [turn for turn in prompts[-1].split(_TURN) if turn.startswith("tool\n")][-1]

    @property
    def refused(self) -> list[Exchange]:
        """Requests that failed."""
        return [exchange for exchange in self.exchanges if exchange.status >= 400]


class _Reader(ScriptedEngine):
    """An engine that tokenizes long prompts at once."""

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> TokenizedText:
        ids = tuple(ids_of(text))
        return TokenizedText(ids, tuple(character.encode() for character in text), (False,) * len(ids))


@asynccontextmanager
async def hosting(turns: Turns) -> AsyncIterator[AgentHost]:
    """Run a host during the block."""
    host = AgentHost(turns)
    model = replace(
        MODEL,
        name="scripted",
        chat_template=TEMPLATE,
        max_sequence_tokens=_CONTEXT,
        total_cells=2 * _CONTEXT,
        max_tokenize_bytes=_CONTEXT,
    )
    engine = _Reader(script=host.script, model=model)
    async with serving(engine, Limits(payload_limit=20_000_000)) as service, _proxy(service.url, host) as url:
        host.url = url
        yield host


@asynccontextmanager
async def _proxy(upstream: str, host: AgentHost) -> AsyncIterator[str]:
    client = ClientSession(auto_decompress=False, cookie_jar=DummyCookieJar(), timeout=ClientTimeout(total=None))

    async def pass_on(request: web.Request) -> web.StreamResponse:
        """Forward the messages of a WebSocket connection both ways."""
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        names = ("Authorization", "OpenAI-Beta")
        sent = {name: request.headers[name] for name in names if name in request.headers}
        async with client.ws_connect(f"{upstream}{request.path_qs}", headers=sent, max_msg_size=0) as other:

            async def copy() -> None:
                async for message in other:
                    event = json.loads(message.data)
                    if event["type"] == "error":
                        host.exchanges.append(Exchange("WS", request.path_qs, None, event["status"], "", message.data))
                    await socket.send_str(message.data)

            copying = asyncio.create_task(copy())
            async for message in socket:
                host.exchanges.append(Exchange("WS", request.path_qs, json.loads(message.data), 200, "", ""))
                await other.send_str(message.data)
            copying.cancel()
        return socket

    async def forward(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await pass_on(request)
        body = await request.read()
        sent = {name: value for name, value in request.headers.items() if name.lower() not in _OF_ONE_HOP}
        async with client.request(request.method, f"{upstream}{request.path_qs}", headers=sent, data=body) as answer:
            got = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_ONE_HOP}
            response = web.StreamResponse(status=answer.status, headers=got)
            whole = b""
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                whole += chunk
                await response.write(chunk)
        ignored = answer.headers.get("X-Caravan-Ignored", "")
        decoded = json.loads(body) if body else None
        host.exchanges.append(
            Exchange(request.method, request.path_qs, decoded, answer.status, ignored, whole.decode(errors="replace"))
        )
        # Some clients close the connection after the last event.
        with suppress(ClientConnectionResetError):
            await response.write_eof()
        return response

    app = web.Application(client_max_size=0)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await client.close()


async def run_agent(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command in ``folder`` until it ends, with nothing of the user's environment; return what it prints.

    Its processes end with it. Raises AssertionError if it fails.
    """
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        cwd=folder,
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            printed = (await process.stdout.read()).decode()
            code = await process.wait()
    finally:
        # They are a group, which may have left something behind.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    assert code == 0, printed
    return printed
