"""Each example in openapi.json, sent to a running server as `/docs` sends it."""

import asyncio
import io
import json
import wave
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import ClientResponse, ClientSession, FormData
from yarl import URL

from caravan_router.http.docs.examples import EXAMPLES, MODEL, REQUEST_ID
from caravan_router.http.openapi import document
from caravan_router.http.server.form import FORM
from caravan_testing.serve_process import Served, serve
from caravan_testing.shard_tiny_llama import write_tiny_llama
from caravan_testing.stand_in_hub import stand_in_hub
from caravan_testing.waiting import eventually

pytestmark = pytest.mark.e2e

TOY = ("--backend", "fake", "--ctx-size", "262144", "--kv-layout", "unified", "--embeddings", "--mmproj", "toy")
# Files of the page, whose paths have the digest of their content, and connections that are upgraded.
WITHOUT = {"page_file", "open_socket", "open_socket_unversioned"}
ENDLESS = {"timeline", "model_changes"}
# The shard is gone after it.
LAST = "drain"
REPOSITORY = "bartowski/SmolLM2-135M-Instruct-GGUF"
OPERATIONS = {
    operation["operationId"]: (method.upper(), path, operation)
    for path, methods in document()["paths"].items()
    for method, operation in methods.items()
    if operation["operationId"] not in WITHOUT
}
# In this order, on a server without a model.
ON_DEMAND = ("pull", "load", "model_changes", "create", "copy", "delete", "unload")
# They end what is in progress.
ENDING = ("abort_request", "control", "cancel_response")
# They need requests that were uploaded, or a batch that has ended.
PREPARED = ("create_batch", "get_batch", "cancel_batch", "delete_message_batch", "get_results")
LOADED = [name for name in OPERATIONS if name not in (*ON_DEMAND, *ENDING, *PREPARED, LAST)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    # The toy loads any file.
    (folder / "poet.gguf").write_bytes(b"poet")
    with serve(*TOY, "--lora-dir", str(folder), models=("toy.gguf",)) as served:
        yield served


class Sender:
    """Sends examples as the page does: with values from other operations, and the name of a model of the server."""

    def __init__(self, client: ClientSession, url: str, model: str) -> None:
        self._client = client
        self._url = url
        self._model = model
        self._sources = {
            (link["operationId"], parameter): (name, expression.partition("#")[2])
            for name, (_, _, operation) in OPERATIONS.items()
            for link in operation["responses"]["200"].get("links", {}).values()
            for parameter, expression in link["parameters"].items()
        }

    @asynccontextmanager
    async def send(self, name: str, body: str = "", **values: str) -> AsyncIterator[ClientResponse]:
        """``body``: the name of the example; "" for the first. ``values``: of parameters in place of the example's."""
        await self._find(name, values)
        async with self._request(name, body, values) as response:
            yield response

    def _request(self, name: str, body: str, values: Mapping[str, str]) -> Any:
        method, path, operation = OPERATIONS[name]
        queries = {
            one["name"]: one["example"]
            for one in operation.get("parameters", ())
            if one["in"] == "query" and "example" in one
        }
        url = URL(self._url + path.format_map(values), encoded=True).update_query(queries)
        content = self._content(operation, body)
        kind = {"Content-Type": "application/json"} if isinstance(content, str) else {}
        return self._client.request(method, url, data=content, headers={"X-Request-Id": REQUEST_ID, **kind})

    async def _find(self, name: str, values: dict[str, str]) -> None:
        _, _, operation = OPERATIONS[name]
        for parameter in operation.get("parameters", ()):
            key = parameter["name"]
            if parameter["in"] != "path" or key in values:
                continue
            if "example" in parameter:
                found = parameter["example"].replace(MODEL, self._model)
            else:
                found = await self._value(*self._sources[name, key], values)
            values[key] = quote(found, safe="")

    async def _value(self, source: str, pointer: str, values: dict[str, str]) -> str:
        await self._find(source, values)
        async with self._request(source, "", values) as response:
            found: Any = await response.json()
        for step in pointer.split("/")[1:]:
            found = found[int(step)] if isinstance(found, list) else found[step]
        assert isinstance(found, str)
        return found

    def _content(self, operation: Mapping[str, Any], body: str) -> str | FormData | None:
        """Return the body of a request."""
        content = operation.get("requestBody", {}).get("content", {})
        if FORM in content:
            form = FormData(content[FORM]["example"])
            form.add_field("file", _tone(), filename="tone.wav")
            return form
        if not content:
            return None
        examples = _examples(operation)
        text = json.dumps(examples[body or next(iter(examples))]["value"])
        return text.replace(MODEL, self._model)


def _examples(operation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the examples of a body by their names; none if there is no body, or a form."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return content["examples"] if content else {}


def _tone() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, 16_000, 16_000, "NONE", ""))
        written.writeframes(b"\0\x10" * 16_000)
    return file.getvalue()


async def check(name: str, response: ClientResponse) -> None:
    """Check that an operation answers as the document says."""
    _, _, operation = OPERATIONS[name]
    assert response.status == 200, await response.text()
    if name in ENDLESS:
        assert response.content_type == "text/event-stream"
        return
    text = await response.text(errors="replace")  # The content of a file is any bytes.
    if response.method == "HEAD" or not (kinds := operation["responses"]["200"].get("content", {})):
        assert text == ""
    elif response.content_type == "application/json":
        assert "error" not in json.loads(text) or json.loads(text)["error"] is None, text
    elif text:
        assert response.content_type in kinds
        assert '"error":{' not in text
        assert '"error":"' not in text


def test_each_operation_has_a_tag_a_summary_and_an_example() -> None:
    tags = {tag["name"] for tag in document()["tags"]}
    used = set()
    for name, (_, _, operation) in OPERATIONS.items():
        assert operation["summary"], name
        assert len(operation["tags"]) == 1, name
        used.update(operation["tags"])
        assert _examples(operation) or FORM in operation.get("requestBody", {}).get("content", {FORM: 0}), name
    assert used == tags
    assert all(tag["description"] for tag in document()["tags"])
    handlers = {
        name for example in EXAMPLES for name in OPERATIONS if name == example or name.startswith(f"{example}_")
    }
    assert handlers == set(OPERATIONS)


@pytest.mark.parametrize("name", LOADED)
async def test_an_example_is_answered(name: str, loaded: Served) -> None:
    async with ClientSession() as client:
        sender = Sender(client, loaded.url, "toy.gguf")
        for body in _examples(OPERATIONS[name][2]) or [""]:
            async with sender.send(name, body) as response:
                await check(name, response)
                assert (response.content_type in {"text/event-stream", "application/x-ndjson"}) or body != "Streamed"


@pytest.mark.slow
async def test_examples_of_models_on_demand_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_llama(tmp_path / "tiny.gguf")
    with stand_in_hub() as hub:
        hub.add(REPOSITORY, {"SmolLM2-135M-Instruct-Q4_K_M.gguf": (tmp_path / "tiny.gguf").read_bytes()})
        for variable, value in (("HF_ENDPOINT", hub.url), ("HF_HUB_CACHE", str(tmp_path)), ("NO_PROXY", "127.0.0.1")):
            monkeypatch.setenv(variable, value)
        with serve("--models-hub", "on", "-np", "1", "-c", "256", "-t", "1", models=()) as served:
            async with ClientSession() as client:
                sender = Sender(client, served.url, MODEL)
                for name in ON_DEMAND:
                    for body in _examples(OPERATIONS[name][2]) or [""]:
                        async with sender.send(name, body) as response:
                            await check(name, response)


async def test_examples_end_what_is_in_progress(loaded: Served) -> None:
    async with ClientSession(loaded.url) as client:
        sender = Sender(client, loaded.url, "toy.gguf")
        endless = {"inputs": "a", "parameters": {"max_new_tokens": 100_000, "min_new_tokens": 100_000}}
        generating = asyncio.create_task(_read(client, "/generate_stream", endless))
        await eventually(
            lambda: _in_progress(client), "a generation runs", unless=lambda: generating.done() and generating.result()
        )
        async with sender.send("abort_request") as response:
            await check("abort_request", response)
        assert "aborted" in await generating
        streamed = {"input": "a", "max_output_tokens": 100_000, "ignore_eos": True, "stream": True}
        async with client.post("/v1/responses", json=streamed) as streaming:
            await streaming.content.readline()
            created = json.loads((await streaming.content.readline()).removeprefix(b"data: "))
            async with sender.send("cancel_response", response_id=created["response"]["id"]) as response:
                await check("cancel_response", response)
        # No chat reasons.
        async with sender.send("control") as response:
            await check("control", response)


async def _read(client: ClientSession, path: str, body: Mapping[str, Any]) -> str:
    async with client.post(path, json=body, headers={"X-Request-Id": REQUEST_ID}) as response:
        return await response.text()


async def _in_progress(client: ClientSession) -> bool:
    async with client.get("/v1/requests") as response:
        return bool((await response.json())["data"])


async def test_the_last_example_drains_a_shard(loaded: Served) -> None:
    async with ClientSession() as client, Sender(client, loaded.url, "toy.gguf").send(LAST) as response:
        await check(LAST, response)
