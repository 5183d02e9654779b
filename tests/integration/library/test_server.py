"""`LLM.serve` over the toy model: HTTP and calls of the program on one model, and how both end."""

import asyncio
import gc
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import caravan
from caravan import LLM, AsyncClient, AsyncLLM, Client, SamplingParams, Server
from caravan_dialects.auth.key import digest_of
from caravan_testing.waiting import DEADLINE_S, eventually

_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_ENDLESS = SamplingParams(temperature=0, max_tokens=9000, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", backend="fake", parallel=4, ctx_size=40_000, fake_step_ms=2.0) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    with llm.serve(port=0) as started:
        yield started


def _ask(url: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | headers)
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
        return json.loads(reply.read() or b"null")


def _status(url: str, body: Any = None, **headers: str) -> int:
    try:
        _ask(url, body, **headers)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    return 200


def _refuses(url: str) -> bool:
    try:
        _ask(f"{url}/v1/models")
    except (urllib.error.URLError, ConnectionError):
        return True
    return False


def test_clients_and_the_program_use_one_model(llm: LLM, server: Server) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    assert [model["id"] for model in _ask(f"{server.url}/v1/models")["data"]] == ["toy.gguf"]
    prompt = "It is said twice, word for word. " * 4
    body = {"model": "any", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    (choice,) = _ask(f"{server.url}/v1/completions", body)["choices"]
    (own,) = llm.generate(prompt, _GREEDY)
    assert choice["text"] == own.outputs[0].text


def test_every_route_of_a_server_is_there(server: Server) -> None:
    with Client(server.url) as client:
        conversation = client.create_conversation([{"role": "system", "content": "Be brief."}])
        conversation.respond("Hello", SamplingParams(temperature=0, max_tokens=4))
        assert len(conversation.items()) == 3
    tgi = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
    for path, body in (
        ("/generate", tgi),
        ("/api/generate", {"model": "any", "prompt": "a", "stream": False, "options": {"num_predict": 2}}),
        ("/completion", {"prompt": "a", "n_predict": 2}),
    ):
        assert _status(server.url + path, body) == 200, path
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=DEADLINE_S) as metrics:
        assert b"tgi_request_success" in metrics.read()


def test_requests_of_both_run_in_the_same_steps(llm: LLM, server: Server) -> None:
    own = llm.stream("of the program", _ENDLESS)
    next(own)
    with Client(server.url) as client:
        asked = client.stream("of a client", _ENDLESS)
        next(asked)
        (shard,) = _ask(f"{server.url}/admin/shards")["shards"]
        assert shard["sequences"] == 2
        asked.close()  # type: ignore[attr-defined]
    own.close()  # type: ignore[attr-defined]


def test_the_model_cannot_be_drained_from_outside(server: Server) -> None:
    (shard,) = _ask(f"{server.url}/admin/shards")["shards"]
    assert _status(f"{server.url}/admin/shards/{shard['shard_id']}/drain", {}) == 404
    assert _ask(f"{server.url}/admin/shards")["shards"][0]["state"] == "serving"


def test_stopping_lets_streams_end(llm: LLM) -> None:
    server = llm.serve(port=0)
    whole = llm.generate("long", SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))[0].outputs[0].text
    with Client(server.url) as client:
        parts = client.stream("long", SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
        text = next(parts).outputs[0].text
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        text += "".join(part.outputs[0].text for part in parts)
    stopping.join()
    assert text == whole
    assert _refuses(server.url)
    server.stop()
    assert llm.generate("after", _GREEDY)[0].finished


def test_streams_that_take_too_long_are_cut_off(llm: LLM) -> None:
    with Client(url := (server := llm.serve(port=0, graceful_termination_timeout=0)).url) as client:
        parts = client.stream("endless", _ENDLESS)
        next(parts)
        server.stop()
        with pytest.raises(caravan.client.errors.ConnectionLostError):
            list(parts)
    assert _refuses(url)
    # Its sequence was released.
    assert len(llm.generate(["after"] * 4, _GREEDY)) == 4


def test_closing_the_model_ends_its_servers() -> None:
    llm = LLM("toy.gguf", backend="fake", ctx_size=40_000, fake_step_ms=2.0)
    servers = [llm.serve(port=0), llm.serve(port=0)]
    with Client(servers[0].url) as client:
        parts = client.stream("endless", _ENDLESS)
        next(parts)
        llm.close()
        with pytest.raises(caravan.client.errors.ConnectionLostError):
            list(parts)
    for server in servers:
        assert _refuses(server.url)
        server.stop()
    with pytest.raises(caravan.ClosedError):
        llm.serve(port=0)


def test_a_server_keeps_its_model_open() -> None:
    with LLM("toy.gguf", backend="fake").serve(port=0) as server:
        gc.collect()
        assert _status(f"{server.url}/health") == 200


def test_each_server_has_its_own_keys_and_limits(llm: LLM, server: Server, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\nname = "alice"\nsha256 = "{digest_of("secret").hex()}"\n')
    body = {"model": "any", "prompt": ["a", "b"], "max_tokens": 1}
    with llm.serve(port=0, api_keys_file=str(keys), max_client_batch_size=1) as other:
        assert _status(f"{other.url}/v1/completions", body) == 401
        assert _status(f"{other.url}/v1/completions", body, Authorization="Bearer secret") == 400
        assert _status(f"{other.url}/v1/completions", body | {"prompt": "a"}, Authorization="Bearer secret") == 200
    assert _status(f"{server.url}/v1/completions", body) == 200


def test_what_keeps_a_server_from_starting_is_named(llm: LLM, server: Server, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unknown options: shard"):
        llm.serve(shard=("a:1",))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="port must be >= 0 and <= 65535"):
        llm.serve(port=70_000)
    taken = int(server.url.rpartition(":")[2])
    with pytest.raises(caravan.ServerError, match=rf"cannot listen on 127\.0\.0\.1:{taken}: "):
        llm.serve(port=taken)
    (tmp_path / "keys.toml").write_text("[[keys]]\nname = 3\n")
    with pytest.raises(caravan.ServerError, match="api-keys-file"):
        llm.serve(port=0, api_keys_file=str(tmp_path / "keys.toml"))
    assert _status(f"{server.url}/health") == 200


async def test_an_asynchronous_model_is_served_too() -> None:
    async with AsyncLLM("toy.gguf", backend="fake", ctx_size=40_000, fake_step_ms=2.0) as llm:
        server = llm.serve(port=0)
        with pytest.raises(caravan.ClosedError, match="not started"):
            _ = server.url
        async with server, AsyncClient(server.url) as client:
            (own,), (asked,) = await asyncio.gather(llm.generate("same", _GREEDY), client.generate("same", _GREEDY))
            assert own.outputs[0].text == asked.outputs[0].text
        assert await asyncio.to_thread(_refuses, server.url)
        await server.stop()


async def test_a_stop_that_is_cancelled_cuts_streams_off() -> None:
    async with AsyncLLM("toy.gguf", backend="fake", ctx_size=40_000, fake_step_ms=2.0) as llm:
        async with llm.serve(port=0) as server, AsyncClient(server.url) as client:
            parts = client.stream("endless", _ENDLESS)
            await anext(parts)
            stopping = asyncio.create_task(server.stop())
            port = server._served._port  # type: ignore[union-attr]
            await eventually(lambda: not port._server.is_serving(), "it accepts no more connections")
            stopping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stopping
            with pytest.raises(caravan.client.errors.ConnectionLostError):
                async for _part in parts:
                    pass
        assert (await llm.generate("after", _GREEDY))[0].finished
