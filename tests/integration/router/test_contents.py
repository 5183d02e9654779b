"""What shards do before and after they know what is in their files, on toy models over real gRPC."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_models.contents import Contents, SeenFiles
from caravan_testing.cluster import Cluster, ClusterConfig, body, cluster, expected_text, generate
from caravan_testing.specs import read, spec, undisturbed
from caravan_testing.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.usefixtures("copies_cost_as_guessed")

# Computing takes long enough that moving cells is faster.
CONFIG = ClusterConfig(shards=0, listed=True, step_s=0.004, token_s=0.002, drain_timeout_s=DEADLINE_S)
PROMPT = list(range(60, 200))
TEXT = "a prompt in common, which is long enough to be worth a transfer " * 3


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "remembered"))


@pytest.fixture
def may_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Shards read their files once this is set."""
    allowed = Event()
    read_files = SeenFiles.read

    def wait_and_read(files: SeenFiles, is_wanted: Callable[[], bool]) -> Contents | None:
        allowed.wait(DEADLINE_S)
        return read_files(files, is_wanted)

    monkeypatch.setattr(SeenFiles, "read", wait_and_read)
    yield allowed
    allowed.set()


async def start(running: Cluster, weights: Path) -> str:
    """Start a shard, list it with the others and wait until it serves."""
    address = running.add_address()
    await running.start_shard(address, weights=weights)
    running.list_shards(running.servers)
    await eventually(lambda: any(address in one.scheduler.shards for one in running.every_engine), "it serves")
    return address


async def shown(running: Cluster, session: ClientSession) -> list[Any]:
    async with session.get(f"{running.url}/admin/shards") as response:
        return [shard["model_fingerprint"] for shard in (await response.json())["shards"]]


async def model_sha(running: Cluster, session: ClientSession) -> Any:
    async with session.get(f"{running.url}/info") as response:
        return (await response.json())["model_sha"]


def file_of(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("is_same", [True, False])
async def test_cells_move_to_a_shard_of_the_same_bytes_only(
    is_same: bool, tmp_path: Path, may_read: Event, caplog: pytest.LogCaptureFixture
) -> None:
    old = file_of(tmp_path, "old", "weights")
    new = file_of(tmp_path, "new", "weights" if is_same else "WEIGHTS")
    async with cluster(CONFIG) as running, ClientSession() as session:
        leaving = await start(running, old)
        staying = await start(running, new)
        # What tells files apart at once says that they are one.
        assert len(running.every_engine) == 1
        assert await shown(running, session) == [None, None]
        assert await model_sha(running, session) is None
        with caplog.at_level(logging.WARNING):
            may_read.set()
            await eventually(
                lambda: all(report.model_fingerprint for report in running.fleet.shards()), "both are known"
            )
            await running.wait_until_up(2)
        assert await model_sha(running, session) in await shown(running, session)
        first, second = await shown(running, session)
        assert (first == second, len(running.every_engine)) == (is_same, 1 if is_same else 2)
        assert any("other weights" in record.message for record in caplog.records) == (not is_same)
        engine = next(one for one in running.every_engine if leaving in one.scheduler.shards)
        wanted = [spec([number, *PROMPT], 200) for number in range(3)]
        streams = [engine.submit(one) for one in wanted]
        await eventually(lambda: all(s.output for s in engine.scheduler.sequences.values()), "all generate")
        await running.drain_shard(leaving)
        running.list_shards([staying])
        assert [await read(stream) for stream in streams] == [undisturbed(one) for one in wanted]
        assert (await running.metric("caravan_prefix_fetched_bytes_total") > 0) is is_same


async def test_saved_cells_are_used_once_it_is_known_that_they_are_of_these_weights(
    tmp_path: Path, may_read: Event
) -> None:
    weights = file_of(tmp_path, "weights", "some weights")
    may_read.set()
    async with cluster(replace(CONFIG, shards=0)) as running, ClientSession() as session:

        async def cached(text: str) -> float:
            before = await running.metric("caravan_prompt_cached_tokens_total")
            assert (await generate(session, running.url, body(text, 5)))["generated_text"] == expected_text(text, 5)
            return await running.metric("caravan_prompt_cached_tokens_total") - before

        async def known() -> None:
            await eventually(lambda: all(one.model_fingerprint for one in running.fleet.shards()), "it is known")

        address = await start(running, weights)
        await known()
        assert await cached(TEXT) == 0
        assert await cached(TEXT + "!") > len(TEXT) - 20
        await running.drain_shard(address)
        assert any(running.cache_dir.rglob("*.run"))

        # The file has another inode, and must be read again.
        file_of(tmp_path, "copy", "some weights").replace(weights)
        may_read.clear()
        await running.start_shard(address, weights=weights)
        await running.wait_until_up(1)
        assert await cached(TEXT + "?") == 0
        may_read.set()
        await known()
        await eventually(lambda: len(running.saved_runs(address)), "it has found them", lambda found: found > 0)
        await eventually(
            lambda: set(running.engine.scheduler.shards[address].runs.keys) >= running.saved_runs(address),
            "the router knows them",
        )
        longer = TEXT + "! And"
        assert await cached(longer) > len(TEXT) - 20
        await running.drain_shard(address)

        file_of(tmp_path, "weights", "SOME weights")
        await running.start_shard(address, weights=weights)
        await running.wait_until_up(1)
        await known()
        assert running.saved_runs(address) == set()
        assert await cached(TEXT) == 0


async def test_a_file_that_was_replaced_after_it_was_loaded_stays_unknown(
    tmp_path: Path, may_read: Event, caplog: pytest.LogCaptureFixture
) -> None:
    weights = file_of(tmp_path, "weights", "old weights")
    async with cluster(CONFIG) as running, ClientSession() as session:
        await start(running, weights)
        file_of(tmp_path, "other", "new weights").replace(weights)
        with caplog.at_level(logging.WARNING):
            may_read.set()
            await eventually(lambda: "cannot be identified" in caplog.text, "it says so")
        assert await shown(running, session) == [None]
        assert (await generate(session, running.url, body("x", 5)))["generated_text"] == expected_text("x", 5)
        assert not [*running.cache_dir.rglob("*.run")]
