"""`caravan serve` with two models on four shards, as processes with the toy model; a fifth shard joins at run time."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.cluster import expected_text
from caravan_testing.metrics_text import total
from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import DEADLINE_S, eventually

FLAGS = ("--backend", "fake", "--fake-step-ms", "5", "--parallel", "2", "--max-concurrent-requests", "30")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """A server with two shards for each of two models. Its list of further shards is empty."""
    (folder / "shards").write_text("")
    listed = ("--shard", f"file:{folder / 'shards'}", "--shard-refresh-s", "0.1")
    with serve(*FLAGS, "--shards", "2", *listed, models=("models/first.gguf", "models/second.gguf")) as running:
        yield running


async def get(session: ClientSession, served: Served, path: str) -> Any:
    async with session.get(f"{served.url}{path}") as response:
        return await response.json()


async def models(session: ClientSession, served: Served) -> list[str]:
    return [entry["id"] for entry in (await get(session, served, "/v1/models"))["data"]]


async def until_serving(session: ClientSession, served: Served, shards: int) -> None:
    async def states() -> list[str]:
        return [shard["state"] for shard in (await get(session, served, "/admin/shards"))["shards"]]

    await eventually(states, f"{shards} shards serve", lambda found: found.count("serving") == shards)


async def until_waiting(session: ClientSession, served: Served, requests: int) -> None:
    """Wait until so many requests wait in the queue."""

    async def waiting() -> float:
        async with session.get(f"{served.url}/metrics") as response:
            return total(await response.text(), "tgi_queue_size")

    await eventually(waiting, f"{requests} requests wait", lambda found: found >= requests)


async def steps(session: ClientSession, served: Served) -> dict[str, int]:
    """Return the number of steps of each shard, by its address."""
    async with session.get(f"{served.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if line.startswith("caravan_batch_size_count{"):
            labels, _, value = line.rpartition(" ")
            found[labels.partition('shard="')[2].partition('"')[0]] += int(value)
    return dict(found)


async def ask(
    session: ClientSession, served: Served, model: str, prompt: str, tokens: int, **more: Any
) -> tuple[int, str, str]:
    """Return the status, the model and the text of a completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0} | more
    async with session.post(f"{served.url}/v1/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            return response.status, "", answer["error"]["code"]
        return 200, answer["model"], answer["choices"][0]["text"]


async def test_mixed_load_is_served_by_the_shards_of_each_model(served: Served) -> None:
    async with ClientSession() as session:
        # The first --model is the default, whichever loads first.
        assert await models(session, served) == ["first.gguf", "second.gguf"]
        await until_serving(session, served, 4)
        by_model: dict[str, list[str]] = {"first.gguf": [], "second.gguf": []}
        for shard in (await get(session, served, "/admin/shards"))["shards"]:
            by_model[shard["model"]].append(shard["address"])
        assert [len(addresses) for addresses in by_model.values()] == [2, 2]
        for model, others in (("first.gguf", "second.gguf"), ("second.gguf", "first.gguf")):
            before = await steps(session, served)
            wanted = [(model, f"{model} {number}", 6 + number) for number in range(12)]
            answers = await asyncio.gather(*(ask(session, served, *one) for one in wanted))
            assert answers == [(200, model, expected_text(prompt, tokens)) for _, prompt, tokens in wanted]
            after = await steps(session, served)
            assert all(after[address] > before.get(address, 0) for address in by_model[model])
            assert all(after.get(address, 0) == before.get(address, 0) for address in by_model[others])
        mixed = [(list(by_model)[number % 2], f"mixed {number}", 6) for number in range(24)]
        answers = await asyncio.gather(*(ask(session, served, *one) for one in mixed))
        assert answers == [(200, model, expected_text(prompt, tokens)) for model, prompt, tokens in mixed]


async def test_a_flood_of_one_model_does_not_starve_the_other(served: Served) -> None:
    async with ClientSession() as session:
        # None of them ends while the test runs: an answer takes ten seconds, and the test aborts them.
        long = [ask(session, served, "first.gguf", f"{n}", 2000, ignore_eos=True) for n in range(60)]
        flood = [asyncio.create_task(one) for one in long]
        try:
            await until_waiting(session, served, 26)
            for number in range(5):
                answer = await ask(session, served, "second.gguf", f"{number}", 10)
                assert answer == (200, "second.gguf", expected_text(f"{number}", 10))
            first = [await ended for ended in itertools.islice(asyncio.as_completed(flood, timeout=DEADLINE_S), 30)]
            assert {status for status, _, _ in first} == {429}
            assert sum(task.done() for task in flood) == 30
        finally:
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)


@contextlib.contextmanager
def shard(address: str, model: str) -> Iterator[None]:
    command = [sys.executable, "-m", "caravan_shard", "--backend", "fake", "--model", model, "--address", address]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


async def test_a_shard_of_an_unknown_model_joins_at_run_time_and_is_listed(served: Served, folder: Path) -> None:
    address = f"unix:{folder / 'third.sock'}"
    async with ClientSession() as session:
        assert await ask(session, served, "third.gguf", "x", 5) == (404, "", "model_not_found")
        with shard(address, "third.gguf"):
            (folder / "shards").write_text(f"{address}\n")
            await until_serving(session, served, 5)
            assert await ask(session, served, "third.gguf", "x", 5) == (200, "third.gguf", expected_text("x", 5))
            listed = {one["address"]: one for one in (await get(session, served, "/admin/shards"))["shards"]}
            assert (listed[address]["model"], listed[address]["state"]) == ("third.gguf", "serving")
            assert await models(session, served) == ["first.gguf", "second.gguf", "third.gguf"]
