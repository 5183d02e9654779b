"""A common prefix takes cells once and is computed once, when it is new and when it returns from host memory."""

import asyncio
import re
import threading
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_proto.messages.limits import KvLayout
from caravan_router.engine.streams import RequestStream
from caravan_shard.backends.base import TokenBatch
from caravan_testing.cluster import Cluster, ClusterConfig, StepLog, cluster
from caravan_testing.specs import read, run, spec, undisturbed
from caravan_testing.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.usefixtures("copies_cost_as_guessed")

LAYOUTS = pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
# Six steps of 16 tokens. A request does not wait for the last few tokens of a prefix, but computes them again.
PREFIX = list(range(1, 97))
NEW_TOKENS = 12
# Computing takes longer than loading what was saved.
TOKEN_S = 0.0002


@LAYOUTS
async def test_nothing_is_shared_between_namespaces(layout: KvLayout) -> None:
    """Neither with ended requests nor with those of the same instant."""
    log = StepLog()
    async with cluster(ClusterConfig(layout=layout, hook=log, token_s=TOKEN_S)) as running:
        at_once = [running.engine.submit(spec(PREFIX, NEW_TOKENS, namespace=name)) for name in ("", "a", "b")]
        await asyncio.gather(*map(read, at_once))
        assert [stream.cached_tokens for stream in at_once] == [0, 0, 0]
        assert log.computed_tokens == 3 * (len(PREFIX) + NEW_TOKENS - 1)
        for name, cached in (("c", 0), ("a", len(PREFIX) - 2), ("c", len(PREFIX) - 2)):
            later = running.engine.submit(spec(PREFIX, NEW_TOKENS, namespace=name))
            await read(later)
            assert later.cached_tokens == cached, name
        await running.wait_until_at_rest()


SAVED_PREFIX = list(range(1, 201)) * 2
REQUESTS = 6
# Computing takes longer than loading what was saved.
SAVED_TOKEN_S = 0.001


class CellLog:
    """A hook that records the most cells that the shard of a cluster holds, before each step.

    The first step in which so many sequences decode waits until `release`.
    """

    def __init__(self) -> None:
        self.running: Cluster | None = None
        self.most = 0
        # The most cells that the sequences of one step hold, without what others that ended have left.
        self.most_of_step = 0
        self.computed_tokens = 0
        self._waits_at = 0
        self.has_begun, self._released = threading.Event(), threading.Event()

    def __call__(self, batch: TokenBatch) -> None:
        """Look at the cells. Runs on the worker's thread."""
        self.computed_tokens += len(batch.tokens)
        if self.running is not None:
            self.most = max(self.most, self.cells)
            (backend,) = self.running.backends.values()
            of_step = [backend.cache.held.get(key, []) for key in set(batch.sequence_ids.tolist())]
            self.most_of_step = max(self.most_of_step, len({id(cell) for cells in of_step for cell in cells}))
        if len(batch.tokens) == len(set(batch.sequence_ids.tolist())) == self._waits_at:
            self._waits_at = 0
            self.has_begun.set()
            assert self._released.wait(DEADLINE_S)

    @property
    def cells(self) -> int:
        """The cells that the shard holds now."""
        assert self.running is not None
        (backend,) = self.running.backends.values()
        return backend.cache.used

    def start(self, running: Cluster) -> None:
        """Begin anew."""
        self.running, self.most, self.most_of_step, self.computed_tokens = running, 0, 0, 0

    def wait_at(self, sequences: int) -> None:
        """Let the next step wait in which so many sequences decode, and nothing else is computed."""
        self.has_begun.clear()
        self._released.clear()
        self._waits_at = sequences

    def release(self) -> None:
        """Let that step run."""
        self._waits_at = 0
        self._released.set()


async def until_saved(running: Cluster) -> None:
    """Wait until everything that ended is in host memory, and nothing in cells."""
    await running.wait_until_at_rest()
    await eventually(lambda: not any(one.cache.used for one in running.backends.values()), "no cells are held")
    assert all(running.saved_runs(address) for address in running.addresses)


async def burst(running: Cluster, log: CellLog, endings: list[list[int]]) -> list[RequestStream]:
    """Run requests at once that begin with PREFIX. Check that each gets the same tokens as alone."""
    log.start(running)
    wanted = [spec([*SAVED_PREFIX, *ending], NEW_TOKENS) for ending in endings]
    streams = [running.engine.submit(one) for one in wanted]
    assert await asyncio.gather(*map(read, streams)) == [undisturbed(one) for one in wanted]
    return streams


async def check_metric(running: Cluster, log: CellLog) -> None:
    """Check, in a step that waits, that the router counts the cells that the shard holds."""

    async def used() -> float | None:
        page = (await running.metrics.render()).decode()
        return next(map(float, re.findall(r"^caravan_kv_cells_used{.*} (.*)$", page, re.MULTILINE)), None)

    # Replies to steps before this one may be on their way, and the cells are measured twice a second.
    await eventually(used, f"{log.cells} cells are counted", lambda count: count == log.cells)


def most_cells(endings: list[list[int]]) -> int:
    """Return the cells of requests that share PREFIX, when each has all of its tokens; the last needs none."""
    return len(SAVED_PREFIX) + sum(max(2, len(ending)) + NEW_TOKENS - 1 for ending in endings)


EQUAL: list[list[int]] = [[]] * REQUESTS
UNEQUAL = [[150 + number] * (20 + number) for number in range(REQUESTS)]


async def test_equal_prompts_take_the_cells_of_their_prefix_once_when_new_and_from_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy host, the others would not wait until the first has computed it.
    monkeypatch.setattr("caravan_scheduler.planning.placement._MOST_WAIT", 1000.0)
    log = CellLog()
    async with cluster(ClusterConfig(hook=log, token_s=SAVED_TOKEN_S)) as running:
        await burst(running, log, EQUAL)
        computed = log.computed_tokens
        assert log.most <= most_cells(EQUAL)
        await until_saved(running)
        log.wait_at(REQUESTS)
        again = asyncio.create_task(burst(running, log, EQUAL))
        await eventually(log.has_begun.is_set, "all decode")
        await check_metric(running, log)
        log.release()
        streams = await again
        assert log.most <= most_cells(EQUAL)
        assert log.computed_tokens == computed - len(SAVED_PREFIX) + 2 + len(SAVED_PREFIX) % 16
        assert min(stream.cached_tokens for stream in streams) >= len(SAVED_PREFIX) - 16
        await until_saved(running)


async def test_prompts_of_which_each_has_more_in_memory_take_the_cells_of_the_common_part_once() -> None:
    """Each has a longer prefix in memory than the others have in cells."""
    log = CellLog()
    async with cluster(ClusterConfig(hook=log, token_s=SAVED_TOKEN_S)) as running:
        await burst(running, log, UNEQUAL)
        await until_saved(running)
        streams = await burst(running, log, UNEQUAL)
        assert log.most <= most_cells(UNEQUAL)
        assert [stream.cached_tokens for stream in streams] == [len(SAVED_PREFIX) + 16] * REQUESTS
        await until_saved(running)


async def test_a_prefix_takes_cells_once_after_a_change_of_the_layout() -> None:
    log = CellLog()
    layouts = {"layout": KvLayout.SPLIT, "other_layouts": (KvLayout.UNIFIED,)}
    async with cluster(ClusterConfig(hook=log, token_s=SAVED_TOKEN_S, cells=4096, **layouts)) as running:  # type: ignore[arg-type]
        await burst(running, log, EQUAL)
        (address,) = running.addresses
        assert log.most > 3 * len(SAVED_PREFIX), "in the split layout each has cells of its own"
        # Longer than its part of the cells, so that the shard changes its layout for it.
        long = spec([7] * 600, 200)
        reading = asyncio.create_task(run(running.engine, long))
        await eventually(lambda: bool(running.engine.scheduler.shards[address].stays.decoding), "it is decoding")
        assert running.engine.scheduler.shards[address].layout.shares_cells
        await burst(running, log, EQUAL)
        assert not reading.done()
        assert log.most <= most_cells(EQUAL) + 800
        assert await reading == undisturbed(long)
        await running.wait_until_at_rest()


async def test_choices_that_were_preempted_share_their_prompt_again() -> None:
    log = CellLog()
    choices, new_tokens = 3, 60
    # Room for a copy of the prompt for each choice, but not beside the rival.
    async with cluster(ClusterConfig(hook=log, token_s=SAVED_TOKEN_S, cells=1536, max_batch_tokens=2048)) as running:
        log.start(running)
        log.wait_at(choices)
        wanted = [spec(SAVED_PREFIX, new_tokens, seed=seed) for seed in range(choices)]
        streams = [running.engine.submit(one) for one in wanted]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        await eventually(log.has_begun.is_set, "all decode")
        rival = spec([9] * 1400, 20, priority=1)
        stream = running.engine.submit(rival)
        await eventually(lambda: running.queued_commands(running.addresses[0]) > 0, "a command for the rival")
        log.release()
        log.wait_at(choices)
        assert await read(stream) == undisturbed(rival)
        await eventually(log.has_begun.is_set, "all decode again")
        log.start(running)
        log.release()
        assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
        assert await running.metric('caravan_request_preemptions_total{how="swap"}') == choices
        # As many as if nobody had been preempted. Each computes the last two tokens of the prompt itself. The rival's
        # cells go as they are needed.
        assert 0 < log.most_of_step <= len(SAVED_PREFIX) + choices * (new_tokens + 1)
        assert await running.metric("caravan_tokens_recomputed_total") < len(SAVED_PREFIX)
        await until_saved(running)


# To compute a token takes long enough that prefixes are kept and loaded instead.
SLOW = ClusterConfig(token_s=0.001)


async def respond(session: ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post("/v1/responses", json=body) as response:
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = await response.json()
        return reply


@pytest.mark.parametrize("store", [False, True])
async def test_what_follows_a_prepared_prompt_computes_its_own_part_only(store: bool) -> None:
    items = [{"role": "system", "content": "Tell of the sea. " * 3}, {"role": "user", "content": "Is it deep?"}]
    more = {"max_output_tokens": 5, "temperature": 0, "store": store}
    async with cluster(SLOW) as running, ClientSession(running.url) as session:
        prepared = await respond(session, {"input": items, "generate": False, "store": store})
        assert (prepared["output"], prepared["usage"]["output_tokens"]) == ([], 0)
        known = prepared["usage"]["input_tokens"]
        await running.wait_until_at_rest()
        assert prepared["usage"]["input_tokens_details"]["cached_tokens"] == 0
        answered = await respond(session, {"input": items, **more})
        # The last tokens of a prompt are computed again, for their logits.
        assert answered["usage"]["input_tokens_details"]["cached_tokens"] >= known - 2
        if store:
            question = [{"role": "user", "content": "And wide?"}]
            continued = await respond(session, {"input": question, "previous_response_id": prepared["id"], **more})
            sent = await respond(session, {"input": [*items, *question], **more, "store": False})
            assert continued["output"][0]["content"] == sent["output"][0]["content"]
            assert continued["usage"]["input_tokens"] == sent["usage"]["input_tokens"]
        await running.wait_until_at_rest()
