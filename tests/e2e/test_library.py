"""Models that `caravan serve` loads and unloads as requests ask for them, as processes of their own."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from caravan_testing.projectors import write_spelling_projector
from caravan_testing.serve_process import Served, serve, start, write_models
from caravan_testing.shard_models import WORDS_MODEL, fetched
from caravan_testing.waiting import DEADLINE_S, eventually, in_time

pytestmark = pytest.mark.e2e

NAMES = ("a", "b", "c")
# Toy shards have the name of their file for a fingerprint, and need none that llama.cpp can read.
TOY = ("--backend", "fake", "--models-max", "1", "--max-concurrent-requests", "1000")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A host with room for one of three models, each of which keeps its place for an hour while it has requests.

    A model answers one request at a time.
    """
    file = write_models(tmp_path_factory.mktemp("toys"), *NAMES)
    flags = ("--models-file", str(file), "--models-turn-s", "3600", "--fake-step-ms", "5", "--max-total-tokens", "8192")
    with serve(*flags, *TOY, "-np", "1", models=()) as served:
        yield served


@pytest.fixture
async def client(toys: Served) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(toys.url, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def complete(client: aiohttp.ClientSession, model: str, tokens: int = 8) -> str:
    body = {"model": model, "prompt": "hello there", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    async with client.post("/v1/completions", json=body) as response:
        reply = await response.json()
        assert response.status == 200, reply
        assert reply["model"] == model
        return str(reply["choices"][0]["text"])


async def states(client: aiohttp.ClientSession) -> dict[str, str]:
    async with client.get("/models") as response:
        return {model["id"]: model["status"]["value"] for model in (await response.json())["data"]}


async def in_progress(client: aiohttp.ClientSession) -> int:
    async with client.get("/v1/requests") as response:
        return len((await response.json())["data"])


def loads(served: Served) -> list[str]:
    return [line.partition("model=")[2].split()[0] for line in served.log if ": loading a model" in line]


async def test_requests_of_one_model_are_collected_so_that_each_is_loaded_once(
    toys: Served, client: aiohttp.ClientSession
) -> None:
    """A B A A B A C with 8 requests each, and room for one model. All are there before the first of them ends."""
    before = len(loads(toys))
    order = [model for model in "abaabac" for _ in range(8)]
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(complete(client, "a", 8000))
        # It runs, and the others wait for it.
        await eventually(lambda: states(client), "a is loaded", lambda found: found["a"] == "loaded")
        for model in order:
            tasks.create_task(complete(client, model))
        await eventually(lambda: in_progress(client), "all are there", lambda found: found > len(order))
        first.cancel()
    assert sorted(loads(toys)[before:]) == ["a", "b", "c"]


async def test_operators_load_and_unload_and_are_told_what_happens(client: aiohttp.ClientSession) -> None:
    async with client.get("/models/sse") as events:

        async def until(model: str, status: str) -> None:
            async for line in events.content:
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if (event["model"], event["data"]["status"]) == (model, status):
                        return

        (loaded,) = [name for name, state in (await states(client)).items() if state == "loaded"] or ["a"]
        other = next(name for name in NAMES if name != loaded)
        for path, model, status in (("load", other, "loaded"), ("unload", other, "unloaded")):
            async with client.post(f"/models/{path}", json={"model": model}) as response:
                assert (response.status, await response.json()) == (200, {"success": True})
            async with in_time(f"{model} is {status}"):
                await until(model, status)
    assert (await states(client))[other] == "unloaded"
    for path in ("load", "unload"):
        async with client.post(f"/models/{path}", json={"model": "../../etc/passwd"}) as response:
            assert response.status == 404


async def test_ollamas_routes_list_load_and_keep(client: aiohttp.ClientSession) -> None:
    async def ask(path: str, **body: object) -> dict[str, Any]:
        async with client.post(path, json=body) if body else client.get(path) as response:
            assert response.status == 200, await response.text()
            found: dict[str, Any] = await response.json()
            return found

    assert sorted(model["name"] for model in (await ask("/api/tags"))["models"]) == list(NAMES)
    await ask("/api/generate", model="b", prompt="hello", keep_alive="1h", stream=False, options={"num_predict": 2})
    (running,) = (await ask("/api/ps"))["models"]
    assert running["name"] == "b"
    assert running["expires_at"] < "2100"
    assert (await ask("/api/generate", model="b", keep_alive=0))["done_reason"] == "unload"
    await eventually(lambda: ask("/api/ps"), "no model is loaded", lambda found: not found["models"])
    assert (await ask("/api/generate", model="b", keep_alive=-1))["done_reason"] == "load"
    assert [model["name"] for model in (await ask("/api/ps"))["models"]] == ["b"]
    async with client.post("/api/generate", json={"model": "b", "keep_alive": "2 weeks"}) as response:
        assert response.status == 400
        assert "`keep_alive` must be" in (await response.json())["error"]


async def test_a_loaded_model_with_requests_makes_room_after_its_turn_and_goes_on_later(tmp_path: Path) -> None:
    file = write_models(tmp_path, "a", "b")
    flags = ("--models-file", str(file), "--models-turn-s", "2", "--fake-step-ms", "10", "--drain-timeout-s", "0.5")
    with serve(*flags, *TOY, "-c", "262144", "--max-total-tokens", "65536", models=()) as served:
        async with aiohttp.ClientSession(served.url) as client:
            # A turn takes as long as a load, so the output has to take longer, however slow this machine is.
            began_s = time.monotonic()
            await complete(client, "a", 1)
            tokens = 600 + int(2 * (time.monotonic() - began_s) / 0.01)
            alone = await complete(client, "a", tokens)
            long = asyncio.create_task(complete(client, "a", tokens))
            await complete(client, "b")
            assert not long.done()
            assert await long == alone
    assert loads(served) == ["a", "b", "a"]


async def test_a_stream_of_changes_does_not_hold_up_the_end_of_the_server(tmp_path: Path) -> None:
    # Far longer than the wait for its end.
    grace = ("--graceful-termination-timeout", str(10 * DEADLINE_S))
    with start("--models-file", str(write_models(tmp_path, "a")), *TOY, *grace, models=()) as served:
        async with aiohttp.ClientSession(served.url) as client, client.get("/models/sse") as events:
            served.process.terminate()
            await events.content.read()
            assert await asyncio.to_thread(served.process.wait, DEADLINE_S) == 0


async def test_a_model_that_cannot_be_loaded_fails_its_requests_and_no_others(tmp_path: Path) -> None:
    file = write_models(tmp_path, "a", "broken")
    (tmp_path / "broken.gguf").unlink()
    file.write_text(file.read_text() + '\n[[models]]\nname = "huge"\nmodel = "a.gguf"\nmemory_mib = 5000\n')
    with serve("--models-file", str(file), "--models-memory", "1000", *TOY, models=()) as served:
        async with aiohttp.ClientSession(served.url) as client:
            for model, told in (("broken", "could not be loaded"), ("huge", "it needs 5000 MiB")):
                async with client.post("/v1/completions", json={"model": model, "prompt": "x"}) as response:
                    assert response.status == 503
                    message = (await response.json())["error"]["message"]
                assert told in message
                assert str(tmp_path) not in message
            # For some seconds: then they may be tried again.
            assert await states(client) == {"a": "unloaded", "broken": "failed", "huge": "failed"}
            assert await complete(client, "a")
            assert (await states(client))["a"] == "loaded"


async def test_requests_load_nothing_where_only_operators_do(tmp_path: Path) -> None:
    file = write_models(tmp_path, "a")
    with serve("--models-file", str(file), "--models-autoload", "off", *TOY, models=()) as served:
        async with aiohttp.ClientSession(served.url) as client:
            async with client.post("/v1/completions", json={"model": "a", "prompt": "x"}) as response:
                assert response.status == 503
                assert "requests load no models" in (await response.json())["error"]["message"]
            async with client.post("/models/load", json={"model": "a"}) as response:
                assert response.status == 200
            assert await complete(client, "a")


@pytest.mark.slow
@pytest.mark.model
async def test_what_a_model_had_cached_is_there_when_it_is_loaded_again(tmp_path: Path) -> None:
    model = fetched(WORDS_MODEL)
    (tmp_path / "one.gguf").symlink_to(model)
    (tmp_path / "two.gguf").write_bytes(model.read_bytes())
    write_spelling_projector(tmp_path / "mmproj-one.gguf", model, range(4))
    flags = ("--models-dir", str(tmp_path), "--models-max", "1", "-np", "2", "-c", "2048", "-t", "1")
    prompt = "".join(f"{number} little ducks went out one day. " for number in range(40))
    with serve(*flags, models=()) as served:
        async with aiohttp.ClientSession(served.url) as client:
            assert set(await states(client)) == {"one", "two"}
            assert await _cached(client, "one", prompt) == 0
            assert await _cached(client, "two", f"Listen: {prompt}") == 0
            assert await _cached(client, "one", prompt) > 300


async def _cached(client: aiohttp.ClientSession, model: str, prompt: str) -> int:
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    async with client.post("/v1/completions", json=body) as response:
        reply = await response.json()
        assert response.status == 200, reply
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.slow
async def test_random_loads_at_the_edge_of_memory_fail_no_request(tmp_path: Path) -> None:
    """Requests of six models, of which two or three fit, until there were forty loads."""
    file = write_models(tmp_path, *"abcdef")
    sizes = iter((100, 150, 200, 250, 300, 350))
    file.write_text(
        "\n".join(
            f"memory_mib = {next(sizes)}" if line.startswith("memory_mib") else line
            for line in file.read_text().split("\n")
        )
    )
    flags = ("--models-file", str(file), "--models-memory", "500", "--models-turn-s", "0.2", "--backend", "fake")
    source = random.Random(1)
    with serve(*flags, "--max-concurrent-requests", "1000", models=()) as served:
        async with aiohttp.ClientSession(served.url, connector=aiohttp.TCPConnector(limit=0)) as client:
            while len(loads(served)) < 40:
                asked = [source.choice("abcdef") for _ in range(source.randint(1, 30))]
                await asyncio.gather(*(complete(client, model, source.randint(1, 40)) for model in asked))
