"""`/docs` in a browser, behind a proxy that puts a prefix before all paths, on a server with API keys."""

import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import ClientConnectionResetError, ClientSession, web
from e2e.test_page import _seen, told

from caravan_testing.http_server import keys, serving
from caravan_testing.page_engine import PageEngine

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium: apt-get install chromium"),
]


@asynccontextmanager
async def under_a_prefix(upstream: str) -> AsyncIterator[str]:
    """Yield the URL at which ``upstream`` is to be found, with a prefix that it does not know of."""

    async def forward(request: web.Request) -> web.StreamResponse:
        sent = {name: value for name, value in request.headers.items() if name != "Content-Length"}
        url = f"{upstream}/{request.match_info['path']}"
        async with client.request(request.method, url, headers=sent, data=await request.read()) as answer:
            got = {
                name: value
                for name, value in answer.headers.items()
                if name not in {"Transfer-Encoding", "Content-Length"}
            }
            response = web.StreamResponse(status=answer.status, headers=got)
            await response.prepare(request)
            # A browser that stops an answer closes the connection.
            with suppress(ClientConnectionResetError):
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
        return response

    app = web.Application()
    app.router.add_route("*", "/some/prefix/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    async with ClientSession(auto_decompress=False) as client:
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/some/prefix"
        finally:
            await runner.cleanup()


async def test_examples_are_found_sent_and_streamed() -> None:
    async with serving(PageEngine(), access=keys("alice")) as service, under_a_prefix(service.url) as url:
        got = told(await _seen(url, "docs"), "docs")
    assert got["groups"][:3] == ["OpenAI", "OpenAI responses and conversations", "Files and batches"]
    # The route has two paths.
    assert (got["shown"], got["model"]) == (2, True)
    events = re.findall(r"^data: (.+)$", got["streamed"], re.MULTILINE)
    assert events[-1] == "[DONE]"
    texts = [json.loads(event)["choices"] for event in events[:-1]]
    assert "".join(choice[0]["delta"].get("content") or "" for choice in texts if choice) == "You said **hello**."
    assert got["curl"].startswith(f"curl -N -X POST '{url}/v1/chat/completions' -H \"Authorization: Bearer $CARAVAN")
    assert "alice" not in got["curl"]
    # A response was created first.
    assert got["id"].startswith("resp_")
    assert json.loads(got["stored"])["id"] == got["id"]
    assert got["unreadable"] == []
    assert got["wide"] == []
    assert got["contents"] == [True, False]
