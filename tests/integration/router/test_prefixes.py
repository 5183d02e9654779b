"""One prefix of ``/admin/prefixes`` over a whole Caravan: its id, its text, its end."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_proto.messages.limits import KvLayout
from caravan_scheduler.config import SchedulerConfig
from caravan_testing.cluster import Cluster, ClusterConfig, body, cluster, expected_text, generate
from caravan_testing.specs import read, spec, undisturbed
from caravan_testing.waiting import DEADLINE_S, eventually

PROMPT = "You answer in rhymes, whatever the question is about."


async def ask(session: ClientSession, running: Cluster, method: str, path: str = "", status: int = 200) -> Any:
    async with session.request(method, f"{running.url}/admin/prefixes{path}") as response:
        assert response.status == status, await response.text()
        return await response.json()


async def prefixes(session: ClientSession, running: Cluster) -> list[dict[str, Any]]:
    """All prefixes, of all shards."""
    return [prefix for shard in (await ask(session, running, "GET"))["shards"] for prefix in shard["prefixes"]]


async def remember(session: ClientSession, running: Cluster, prompt: str = PROMPT) -> None:
    """Let a shard compute a prompt, and keep what it computed."""
    await generate(session, running.url, body(prompt, 4))
    await running.wait_until_at_rest()


async def test_a_prefix_has_the_same_id_in_every_caravan_and_shows_its_text() -> None:
    ids = []
    for layout in KvLayout:  # unified cells are saved at once, split ones stay
        async with cluster(ClusterConfig(layout=layout)) as running, ClientSession() as session:
            await remember(session, running)
            [listed] = await prefixes(session, running)
            shown = await ask(session, running, "GET", f"/{listed['id']}")
            assert shown["model"] == "toy"
            assert len(shown["token_ids"]) == shown["tokens"] == listed["tokens"]
            # The last token was never computed.
            assert shown["text"].removeprefix("<s>") == PROMPT + expected_text(PROMPT, 3)
            [place] = shown["shards"]
            assert place["shard"] == running.addresses[0]
            in_memory = layout is KvLayout.UNIFIED
            assert (place["cells"] > 0, place["memory_bytes"] > 0, place["disk_bytes"]) == (not in_memory, in_memory, 0)
            ids.append(listed["id"])
    assert len(set(ids)) == 1


async def test_another_salt_is_another_prefix() -> None:
    async with cluster() as running, ClientSession() as session:
        for salt in ("a", "b"):
            await generate(session, running.url, body(PROMPT, 4) | {"cache_salt": salt})
        await running.wait_until_at_rest()
        assert len({prefix["id"] for prefix in await prefixes(session, running)}) == 2


async def test_one_prefix_is_dropped_and_what_another_shares_stays() -> None:
    async with cluster() as running, ClientSession() as session:
        await remember(session, running)
        [first] = await prefixes(session, running)
        await remember(session, running, PROMPT + " What is the weather like?")
        [second] = [one for one in await prefixes(session, running) if one["id"] != first["id"]]
        dropped = await ask(session, running, "DELETE", f"/{first['id']}")
        assert (dropped["id"], dropped["shards"][0]["memory_bytes"]) == (first["id"], first["memory_bytes"])
        await ask(session, running, "GET", f"/{first['id']}", status=404)
        await ask(session, running, "DELETE", f"/{first['id']}", status=404)
        assert [one["id"] for one in await prefixes(session, running)] == [second["id"]]
        shown = await ask(session, running, "GET", f"/{second['id']}")
        assert shown["text"].removeprefix("<s>").startswith(PROMPT + " What")
        await ask(session, running, "DELETE", f"/{second['id']}")
        await eventually(lambda: not running.saved_runs(running.addresses[0]), "the shard has neither")
        await running.wait_until_at_rest()


async def test_running_sequences_are_listed_by_their_request() -> None:
    async with cluster(ClusterConfig(step_s=0.002)) as running, ClientSession() as session:
        headers = {"X-Request-Id": "a-poem"}
        reading = asyncio.create_task(session.post(f"{running.url}/generate", json=body(PROMPT, 500), headers=headers))
        shard = running.engine.scheduler.shards[running.addresses[0]]
        await eventually(lambda: bool(shard.stays.decoding), "it decodes")
        [listed] = (await ask(session, running, "GET"))["shards"]
        [sequence] = listed["running"]
        assert (sequence["request_id"], sequence["tenant"], sequence["adapter"]) == ("a-poem", None, None)
        assert sequence["tokens"] > len(PROMPT)
        assert (await reading).status == 200


async def test_after_a_restart_a_file_has_its_old_id_and_its_text() -> None:
    async with cluster(ClusterConfig(run_files=True)) as running, ClientSession() as session:
        await remember(session, running)
        [before] = await prefixes(session, running)
        await running.stop_shard(running.addresses[0])
        await running.start_shard(running.addresses[0])
        await eventually(lambda: bool(running.engine.scheduler.shards), "it has joined again")
        await running.wait_until_at_rest()
        [after] = await prefixes(session, running)
        assert (after["id"], after["tokens"]) == (before["id"], before["tokens"])
        assert (after["memory_bytes"], after["disk_bytes"]) == (0, before["memory_bytes"])
        assert PROMPT in (await ask(session, running, "GET", f"/{after['id']}"))["text"]
        await ask(session, running, "DELETE", f"/{after['id']}")
        await eventually(lambda: not running.saved_runs(running.addresses[0]), "the file is gone")


# A cell of the toy model takes 8 bytes. To compute a token takes long enough that prefixes are loaded instead.
SLOW = ClusterConfig(token_s=0.001)
SMALL = replace(SLOW, saved_bytes=8 * 400)
SYSTEM = "You are a pirate, and you never say anything that a pirate would not say, whoever asks."


async def pin(session: ClientSession, running: Cluster, status: int = 200, **fields: Any) -> dict[str, Any]:
    async with session.post(f"{running.url}/admin/prefixes", json=fields) as response:
        shown: dict[str, Any] = await response.json()
        assert response.status == status, shown
        return shown


async def flood(session: ClientSession, running: Cluster, requests: int = 8) -> None:
    """Let shards save more than they have memory for."""
    for number in range(requests):
        await generate(session, running.url, body(f"{number}" * 90, 4))
        await running.wait_until_at_rest()


async def cached_tokens(session: ClientSession, running: Cluster, prompt: str, salt: str | None = None) -> int:
    """Ask, and return how many tokens of the prompt were not computed."""
    asked = {"prompt": prompt, "max_tokens": 2, "cache_salt": salt}
    async with session.post(f"{running.url}/v1/completions", json=asked) as response:
        reply = await response.json()
        assert response.status == 200, reply
        found: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found


async def test_a_pinned_prefix_is_there_before_anybody_asks_and_after_all_others_have_gone() -> None:
    async with cluster(SMALL) as running, ClientSession() as session:
        pinned = await pin(session, running, prompt=SYSTEM)
        await running.wait_until_at_rest()
        assert pinned["pinned"]
        shown = await ask(session, running, "GET", f"/{pinned['id']}")
        assert (shown["text"].removeprefix("<s>"), shown["tokens"]) == (SYSTEM, pinned["tokens"])
        await flood(session, running)
        [place] = (await ask(session, running, "GET", f"/{pinned['id']}"))["shards"]
        assert place["memory_bytes"] == 8 * pinned["tokens"]
        assert await cached_tokens(session, running, SYSTEM + " Who are you?") == pinned["tokens"]
        await running.wait_until_at_rest()
        await ask(session, running, "DELETE", f"/{pinned['id']}/pin")
        await flood(session, running, 12)
        await ask(session, running, "GET", f"/{pinned['id']}", status=404)


async def test_a_prefix_in_use_is_pinned_by_its_id_and_dropped_with_its_pin() -> None:
    async with cluster(SMALL) as running, ClientSession() as session:
        await remember(session, running)
        [listed] = await prefixes(session, running)
        assert (await ask(session, running, "POST", f"/{listed['id']}/pin"))["pinned"]
        await flood(session, running)
        [found] = [prefix for prefix in await prefixes(session, running) if prefix["pinned"]]
        assert found["id"] == listed["id"]
        [shard] = (await ask(session, running, "GET"))["shards"]
        assert shard["pinned_bytes"] == found["memory_bytes"] == 8 * listed["tokens"]
        running.engine.tick()
        gauge = f'caravan_pinned_bytes{{shard="{running.addresses[0]}"}}'
        assert await running.metric(gauge) == found["memory_bytes"]
        await ask(session, running, "DELETE", f"/{listed['id']}")
        assert (await ask(session, running, "GET"))["pins"] == []
        await ask(session, running, "POST", f"/{listed['id']}/pin", status=404)


async def test_pins_beyond_half_of_the_memory_are_refused() -> None:
    async with cluster(SMALL) as running, ClientSession() as session:
        await remember(session, running)
        refused = await pin(session, running, 422, prompt="x" * 300)
        assert refused["error"] == (
            "Input validation error: all pinned prefixes together may take 1600 bytes, half of the smallest "
            "shard's memory for saved prefixes (--cache-ram). With this one, they would take 2408"
        )
        assert (await ask(session, running, "GET"))["pins"] == []


async def test_a_pin_whose_prompt_cannot_be_computed_is_taken_back() -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(no_shard_grace_s=0.1))
    async with cluster(config) as running, ClientSession() as session:
        engine = running.engine
        await running.stop_shard(running.addresses[0])
        await eventually(lambda: not engine.scheduler.shards, "the shard is gone")
        await pin(session, running, 503, prompt=list(range(40, 80)))
        await eventually(lambda: not list(engine.scheduler.pins), "nothing is pinned")
        assert not engine.prefixes._pins_asked


async def listed_prefixes(
    session: ClientSession, running: Cluster, method: str = "GET", query: str = ""
) -> dict[str, Any]:
    """What each shard is said to keep, or to have kept until it was flushed."""
    async with session.request(method, f"{running.url}/admin/prefixes{query}") as response:
        assert response.status == 200
        return {one["shard"]: one for one in (await response.json())["shards"]}


async def flushed(session: ClientSession, running: Cluster, query: str = "") -> dict[str, int]:
    """How many cells each shard is said to have given up."""
    return {name: one["cells"] for name, one in (await listed_prefixes(session, running, "DELETE", query)).items()}


def held(running: Cluster, address: str) -> int:
    """Tokens that a shard holds."""
    backend = running.backends[address]
    return sum(backend.length(sequence_id) for sequence_id in range(running.config.max_sequences))


async def serve_some(session: ClientSession, running: Cluster) -> None:
    bodies: list[dict[str, object]] = [
        {"inputs": f"{number}" * 30, "parameters": {"max_new_tokens": 5}} for number in range(4)
    ]
    await asyncio.gather(*(generate(session, running.url, body) for body in bodies))
    await running.wait_until_at_rest()


async def test_idle_shards_give_up_all_at_once() -> None:
    config = ClusterConfig(shards=2, step_s=0.002, layout=KvLayout.SPLIT)
    async with cluster(config) as running, ClientSession() as session:
        await serve_some(session, running)
        listed = await listed_prefixes(session, running)
        kept = {name: sum(prefix["tokens"] for prefix in one["prefixes"]) for name, one in listed.items()}
        assert all(kept.values())
        assert kept == {name: held(running, name) for name in running.addresses}
        fuller, other = sorted(running.addresses, key=lambda name: -kept[name])
        assert await flushed(session, running, f"?shard={fuller}") == {fuller: listed[fuller]["cells"]}
        await eventually(lambda: held(running, fuller) == 0, "the shard gave them up")
        assert held(running, other) == kept[other]
        assert await flushed(session, running) == {fuller: 0, other: listed[other]["cells"]}
        await eventually(lambda: held(running, other) == 0, "the other shard gave them up, too")
        assert not any(one["prefixes"] for one in (await listed_prefixes(session, running)).values())
        await serve_some(session, running)


@pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
async def test_a_running_stream_notices_nothing(layout: KvLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy host, the shard could have been idle for long enough to save at the end.
    monkeypatch.setattr("caravan_scheduler.planning.planner._IDLE_S", DEADLINE_S)
    shares = layout is KvLayout.UNIFIED
    async with cluster(ClusterConfig(step_s=0.002, layout=layout)) as running, ClientSession() as session:
        await serve_some(session, running)
        wanted = spec([1, 2, 3], 400)
        reading = asyncio.create_task(read(running.engine.submit(wanted)))
        shard = running.engine.scheduler.shards[running.addresses[0]]
        await eventually(lambda: bool(shard.stays.decoding), "it decodes")
        gone = (await listed_prefixes(session, running, "DELETE"))[shard.name]
        assert len(gone["prefixes"]) == 4
        # Unified cells are saved and released when nobody waits, split ones saved where they are between running ones.
        in_cells, in_memory = gone["cells"], sum(prefix["memory_bytes"] for prefix in gone["prefixes"])
        assert (in_cells == 0) is shares
        assert in_memory == gone["memory_bytes"]
        assert not reading.done()
        # The shard hears of it with the next command.
        assert await reading == undisturbed(wanted)
        await running.wait_until_at_rest()
        assert (len(shard.stays.parked), len(shard.runs.keys)) == ((0, 1) if shares else (1, 0))


async def test_an_operator_that_leaves_leaves_nothing() -> None:
    async with cluster() as running:
        waiting = asyncio.create_task(running.fleet.prefix_cache.flush_prefixes(running.addresses))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert [
            one.shard for one in await running.fleet.prefix_cache.flush_prefixes(running.addresses)
        ] == running.addresses
        assert not running.engine.prefixes._flushes
