"""Several models behind one router, and shards with new weights that take over a name, over real gRPC."""

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.limits import KvLayout
from caravan_router.engine import fleet
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.shards import ShardState
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_testing.cluster import Cluster, ClusterConfig, cluster, expected_text
from caravan_testing.specs import run, spec, undisturbed
from caravan_testing.waiting import DEADLINE_S, eventually


class Computed:
    """Counts the tokens that a shard computes. Used as a hook."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, batch: TokenBatch) -> DecodeOutcome | None:
        self.tokens += len(batch.tokens)
        return None


async def start(running: Cluster, model: str, file: str = "") -> str:
    """Start a shard of ``model`` and return its address."""
    address = running.add_address()
    await running.start_shard(address, model, file or f"{model}-file")
    running.backends[address].hook = Computed()
    return address


async def set_list(running: Cluster, *addresses: str) -> None:
    await asyncio.to_thread(running.list_shards, addresses)


async def ask(session: ClientSession, running: Cluster, model: str | None, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the status and the body of a completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    async with session.post(f"{running.url}/v1/completions", json=body) as response:
        return {"status": response.status, **await response.json()}


async def names(session: ClientSession, running: Cluster) -> list[str]:
    async with session.get(f"{running.url}/v1/models") as response:
        return [entry["id"] for entry in (await response.json())["data"]]


def computed(running: Cluster, addresses: list[str]) -> list[int]:
    """Return the number of tokens that each shard has computed."""
    hooks = [running.backends[address].hook for address in addresses]
    return [hook.tokens for hook in hooks if isinstance(hook, Computed)]


async def test_mixed_load_is_served_by_the_shards_of_each_model() -> None:
    async with cluster(ClusterConfig(shards=0, listed=True, step_s=0.001)) as running, ClientSession() as session:
        of_a = [await start(running, "a") for _ in range(2)]
        of_b = [await start(running, "b") for _ in range(2)]
        await set_list(running, *of_a, *of_b)
        await running.wait_until_up(4)
        wanted = [("ab"[number % 3 == 0], f"prompt {number}", 5 + number % 7) for number in range(60)]
        answers = await asyncio.gather(*(ask(session, running, *one) for one in wanted))
        for (model, prompt, tokens), answer in zip(wanted, answers, strict=True):
            assert (answer["status"], answer["model"]) == (200, model)
            assert answer["choices"][0]["text"] == expected_text(prompt, tokens)
        await running.wait_until_at_rest()
        # The last token of each request is sampled, but never computed. Both shards of each model had work.
        for model, addresses in (("a", of_a), ("b", of_b)):
            usages = [answer["usage"] for answer in answers if answer["model"] == model]
            least = sum(usage["total_tokens"] - 1 - usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
            assert sum(computed(running, addresses)) >= least
            assert all(computed(running, addresses))
        total = sum(usage["usage"]["total_tokens"] - 1 for usage in answers)
        assert sum(computed(running, [*of_a, *of_b])) <= total
        assert (await ask(session, running, "c", "x", 3))["error"]["code"] == "model_not_found"


async def test_a_shard_of_an_unknown_model_joins_at_run_time_and_is_listed() -> None:
    async with cluster(ClusterConfig(shards=1, listed=True)) as running, ClientSession() as session:
        (first,) = running.addresses
        assert await names(session, running) == ["toy"]
        assert (await ask(session, running, "anything", "x", 3))["model"] == "toy"
        second = await start(running, "b")
        await set_list(running, first, second)
        await running.wait_until_up(2)
        assert await names(session, running) == ["toy", "b"]
        answer = await ask(session, running, "b", "x", 3)
        assert (answer["model"], answer["choices"][0]["text"]) == ("b", expected_text("x", 3))
        assert (await ask(session, running, None, "x", 3))["model"] == "toy"
        assert (await ask(session, running, "anything", "x", 3))["status"] == 404
        async with session.get(f"{running.url}/admin/shards") as response:
            shards = (await response.json())["shards"]
        assert [(shard["model"], shard["state"]) for shard in shards] == [("toy", "serving"), ("b", "serving")]
        await running.wait_until_at_rest()


async def test_a_flood_of_one_model_does_not_keep_another_waiting() -> None:
    """More than fits is refused, and the rest waits in a queue of its own."""
    config = ClusterConfig(
        shards=0, listed=True, step_s=0.005, max_sequences=2, limits=Limits(max_concurrent_requests=40)
    )
    async with cluster(config) as running, ClientSession() as session:
        flooded = await start(running, "a")
        await set_list(running, flooded, await start(running, "b"))
        await running.wait_until_up(2)
        released = threading.Event()

        def hold(_batch: TokenBatch) -> None:
            released.wait(DEADLINE_S)

        running.backends[flooded].hook = hold

        flood = [asyncio.create_task(ask(session, running, "a", f"flood {number}", 60)) for number in range(80)]
        engine_a = running.fleet.engine("a")
        assert engine_a is not None
        await eventually(lambda: len(engine_a.scheduler.waiting) > 30, "requests for a wait")
        for number in range(7):
            assert (await ask(session, running, "b", f"{number}", 20))["status"] == 200
        # The requests for b have waited for none of them.
        released.set()
        statuses = Counter(answer["status"] for answer in await asyncio.gather(*flood))
        assert statuses == {200: 40, 429: 40}
        await running.wait_until_at_rest()


async def test_a_model_without_shards_fails_its_own_requests_only() -> None:
    scheduler = SchedulerConfig(no_shard_grace_s=0.3)
    async with (
        cluster(ClusterConfig(shards=1, listed=True, scheduler=scheduler)) as running,
        ClientSession() as session,
    ):
        (first,) = running.addresses
        second = await start(running, "b")
        await set_list(running, first, second)
        await running.wait_until_up(2)
        await running.stop_shard(second)
        await running.wait_until_up(1)
        failed = await ask(session, running, "b", "x", 3)
        assert (failed["status"], failed["error"]["code"]) == (503, "no_shard")
        assert failed["error"]["message"] == "No shard of the model b is up"
        assert (await ask(session, running, "toy", "x", 3))["status"] == 200
        async with session.get(f"{running.url}/health") as health:
            assert health.status == 200
        # The model stays known while its address is gone, and when the shard comes back, it serves again.
        await set_list(running, first)
        await eventually(lambda: running.state(second) is None, "it is forgotten")
        assert await names(session, running) == ["toy", "b"]
        assert (await ask(session, running, "b", "x", 3))["status"] == 503
        await running.start_shard(second, "b", "b-file")
        await set_list(running, first, second)
        await running.wait_until_up(2)
        assert (await ask(session, running, "b", "x", 3))["status"] == 200
        await running.wait_until_at_rest()


async def test_a_model_that_leaves_while_a_request_waits_for_it_is_named() -> None:
    scheduler = SchedulerConfig(no_shard_grace_s=0.3)
    config = ClusterConfig(
        shards=1, listed=True, max_sequences=1, step_s=0.02, expected=("toy", "c"), scheduler=scheduler
    )
    async with cluster(config) as running, ClientSession() as session:
        (first,) = running.addresses
        second = await start(running, "b")
        await set_list(running, first, second)
        await running.wait_until_up(2)
        engine = running.fleet.engine("b")
        assert engine is not None
        asked = [asyncio.create_task(ask(session, running, "b", f"{number}", 200)) for number in range(2)]
        await eventually(lambda: len(engine.scheduler.waiting) == 1, "one runs, one waits")
        await running.stop_shard(second)
        # The last one waits for a model that never had a shard.
        asked.append(asyncio.create_task(ask(session, running, "c", "x", 3)))
        failed = await asyncio.gather(*asked)
        assert [(one["status"], one["error"]["message"]) for one in failed] == [
            (503, "No shard of the model b is up"),
            (503, "No shard of the model b is up"),
            (503, "No shard of the model c is up"),
        ]


async def test_prefixes_of_all_models_are_listed_and_flushed() -> None:
    async with (
        cluster(ClusterConfig(shards=1, listed=True, layout=KvLayout.SPLIT)) as running,
        ClientSession() as session,
    ):
        (first,) = running.addresses
        second = await start(running, "b")
        await set_list(running, first, second)
        await running.wait_until_up(2)
        for model in ("toy", "b"):
            await ask(session, running, model, "x" * 40, 10)
        await running.wait_until_at_rest()
        async with session.delete(f"{running.url}/admin/prefixes", params={"shard": second}) as response:
            assert [len(one["prefixes"]) for one in (await response.json())["shards"]] == [1]
        async with session.get(f"{running.url}/admin/prefixes") as response:
            kept = {one["shard"]: len(one["prefixes"]) for one in (await response.json())["shards"]}
        assert kept == {first: 1, second: 0}


async def test_a_shard_that_restarts_with_another_model_changes_sides() -> None:
    async with cluster(ClusterConfig(shards=2)) as running, ClientSession() as session:
        first, second = running.addresses
        await running.stop_shard(second)
        await running.start_shard(second, "b", "b-file")
        await eventually(lambda: running.state(second) is ShardState.SERVING, "it serves again")
        assert await names(session, running) == ["toy", "b"]
        toy, b = running.fleet.engines
        await eventually(lambda: list(b.scheduler.shards) == [second], "it works for b")
        assert (list(toy.scheduler.shards), toy.model.total_cells) == ([first], running.config.cells)
        for model in ("toy", "b"):
            assert (await ask(session, running, model, "x", 3))["model"] == model
        await running.wait_until_at_rest()


@pytest.mark.parametrize("expected", [(), ("b", "toy")])
async def test_the_default_is_the_model_that_joined_first_or_is_expected_first(expected: tuple[str, ...]) -> None:
    async with cluster(ClusterConfig(shards=1, listed=True, expected=expected)) as running, ClientSession() as session:
        (first,) = running.addresses
        waiting = asyncio.create_task(ask(session, running, None, "x", 3))
        if expected:
            await eventually(running.queue_size, "the request waits", lambda size: size == 1)
            assert not waiting.done()
        else:
            await waiting
        await set_list(running, first, await start(running, "b"))
        await running.wait_until_up(2)
        assert (
            (await waiting)["model"]
            == (await ask(session, running, None, "x", 3))["model"]
            == ("b" if expected else "toy")
        )
        await running.fleet.wait_until_ready()
        assert await names(session, running) == (["b", "toy"] if expected else ["toy", "b"])


async def test_a_model_that_replaces_the_only_one_answers_to_every_name_too() -> None:
    async with cluster(ClusterConfig(shards=1, listed=True)) as running, ClientSession() as session:
        assert (await ask(session, running, "anything", "x", 3))["model"] == "toy"
        await set_list(running)
        await running.wait_until_up(0)
        await eventually(lambda: not running.fleet.shards(), "it is forgotten")
        assert await names(session, running) == ["toy"]
        await running.stop_shard(running.addresses[0])
        await set_list(running, await start(running, "b"))
        await running.wait_until_up(1)
        assert await names(session, running) == ["b"]
        for name in ("anything", "toy", None):
            assert (await ask(session, running, name, "x", 3))["model"] == "b"
        await running.wait_until_at_rest()


async def test_a_model_is_forgotten_when_its_addresses_are_gone_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_REMEMBERED_S", 0.2)
    async with cluster(ClusterConfig(shards=1, listed=True)) as running, ClientSession() as session:
        (first,) = running.addresses
        await set_list(running, first, await start(running, "b"))
        await running.wait_until_up(2)
        await set_list(running, first)
        await eventually(lambda: len(running.fleet.engines) == 1, "it is forgotten")
        assert await names(session, running) == ["toy"]
        # Clients of one model must not get answers of another.
        assert (await ask(session, running, "b", "x", 3))["status"] == 404
        await set_list(running)
        await eventually(lambda: not running.fleet.shards(), "no shard is left")
        # It looks for models to forget until long after one that is forgotten would have been.
        looked: list[float] = []
        forget_models = running.fleet._forget_models

        def look(now: float) -> None:
            forget_models(now)
            looked.append(now)

        monkeypatch.setattr(running.fleet, "_forget_models", look)
        await eventually(lambda: len(looked) > 1 and looked[-1] - looked[0] > 0.4, "the router has looked")
        assert await names(session, running) == ["toy"]
        assert not running.fleet._leaving
        assert len(running.fleet._runs) == 1
        assert 'model="b"' not in (await running.metrics.render()).decode()


NEW = "toy-2"
REASONS = ("new", "new_weights")


async def complete(session: ClientSession, running: Cluster, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the status and the body of a completion."""
    body = {"model": "toy", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{running.url}/v1/completions", json=body) as response:
        return {"status": response.status, **await response.json()}


async def start_new(running: Cluster, vocabulary: str = "toy-vocabulary") -> str:
    address = running.add_address()
    await running.start_shard(address, file=NEW, vocabulary_fingerprint=vocabulary)
    return address


async def until_serving(running: Cluster, address: str) -> None:
    """Wait until the shard's scheduler has it, too."""
    await eventually(lambda: any(address in one.scheduler.shards for one in running.every_engine), f"{address} serves")


def serves(running: Cluster) -> str:
    return running.engine.model.fingerprint


async def test_the_name_moves_when_as_many_new_shards_serve_as_old_ones() -> None:
    async with cluster(ClusterConfig(shards=2, listed=True)) as running, ClientSession() as session:
        first, second = running.addresses
        new = await start_new(running)
        await set_list(running, first, second, new)
        await until_serving(running, new)
        assert serves(running) == "toy-1"
        assert (await complete(session, running, "x", 3))["system_fingerprint"] == "toy-1"
        async with session.get(f"{running.url}/v1/models") as response:
            assert [entry["id"] for entry in (await response.json())["data"]] == ["toy"]
        async with session.get(f"{running.url}/admin/shards") as response:
            shards = (await response.json())["shards"]
        assert [(one["model"], one["model_fingerprint"], one["state"]) for one in shards] == [
            ("toy", "toy-1", "serving"),
            ("toy", "toy-1", "serving"),
            ("toy", NEW, "serving"),
        ]
        # Two kinds of weights of one name are still one model: it answers to every name.
        assert not running.fleet.names.strict
        await set_list(running, first, new)
        await eventually(lambda: running.state(second) is None, "the old one is forgotten")
        assert serves(running) == NEW
        assert (await complete(session, running, "x", 3))["system_fingerprint"] == NEW
        await running.stop_shard(second)
        await set_list(running, new)
        await eventually(lambda: len(running.fleet._runs) == 1, "the old engine has ended")
        assert running.fleet.healthy
        await running.stop_shard(first)
        await running.wait_until_at_rest()


async def test_new_weights_compute_again_what_the_old_ones_had() -> None:
    async with cluster(ClusterConfig(shards=1, listed=True)) as running, ClientSession() as session:
        (old,) = running.addresses
        prompt = "why is it computed again? " * 4
        await complete(session, running, prompt, 1)
        new = await start_new(running)
        await set_list(running, new)
        await eventually(lambda: running.state(old) is None and serves(running) == NEW, "the old one is forgotten")
        tokens = (await complete(session, running, prompt, 1))["usage"]["prompt_tokens"]
        exposed = (await running.metrics.render()).decode()
        counts = {
            reason: f'caravan_prompt_computed_tokens_total{{reason="{reason}",model="toy"}}' for reason in REASONS
        }
        assert f"{counts['new_weights']} {tokens - 2}" in exposed
        assert f"{counts['new']} {tokens}" in exposed
        await running.stop_shard(old)
        await running.wait_until_at_rest()


async def test_what_waits_and_runs_on_the_last_old_shard_goes_on_with_the_new_weights() -> None:
    config = ClusterConfig(shards=1, listed=True, max_sequences=2, step_s=0.01)
    async with cluster(config) as running, ClientSession() as session:
        (old,) = running.addresses
        first = running.engine
        wanted = [spec([number, 7, 8], 60) for number in range(6)]
        asked = [asyncio.create_task(run(first, one)) for one in wanted]
        await eventually(
            lambda: sum(len(one.output) > 3 for one in first.scheduler.sequences.values()) == 2, "two run, four wait"
        )
        tokenizing = asyncio.create_task(complete(session, running, "x", 3))
        await running.stop_shard(old)
        new = await start_new(running)
        await set_list(running, new)
        assert await asyncio.gather(*asked) == [undisturbed(one) for one in wanted]
        assert (await tokenizing)["status"] == 200
        assert serves(running) == NEW
        await eventually(lambda: not running.fleet._leaving, "the old engine has ended")
        await running.wait_until_at_rest()


async def test_a_stream_is_cancelled_after_it_has_moved() -> None:
    async with cluster(ClusterConfig(shards=1, listed=True, step_s=0.01)) as running, ClientSession() as session:
        (old,) = running.addresses
        first = running.engine
        asked = asyncio.create_task(complete(session, running, "x", 3000))
        await eventually(lambda: any(one.output for one in first.scheduler.sequences.values()), "it runs")
        await running.stop_shard(old)
        new = await start_new(running)
        await set_list(running, new)
        await eventually(lambda: serves(running) == NEW and bool(running.engine.scheduler.sequences), "it has moved")
        asked.cancel()
        await eventually(lambda: not running.engine.scheduler.sequences, "it is released")
        await running.wait_until_at_rest()


async def test_what_waits_for_a_model_of_another_vocabulary_is_told_that_it_was_replaced() -> None:
    async with cluster(ClusterConfig(shards=1, listed=True, step_s=0.01)) as running, ClientSession() as session:
        (old,) = running.addresses
        first = running.engine
        runs = asyncio.create_task(complete(session, running, "x", 3000))
        await eventually(lambda: any(one.output for one in first.scheduler.sequences.values()), "it runs")
        await running.stop_shard(old)
        # This one is not tokenized yet.
        waits = asyncio.create_task(complete(session, running, "y", 3))
        await eventually(lambda: first.queries.waiting == 1, "the other waits")
        new = await start_new(running, vocabulary="other")
        await set_list(running, new)
        for answer in await asyncio.gather(runs, waits):
            assert (answer["status"], answer["error"]["code"]) == (503, "model_replaced")
            assert answer["error"]["message"] == (
                "The model toy was replaced by another one while the request waited: send it again"
            )
        assert (await complete(session, running, "x", 3))["status"] == 200
        await running.wait_until_at_rest()


async def test_requests_are_given_up_to_the_new_weights_while_the_old_address_is_still_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache of DNS may list a pod that has ended for longer than requests wait for a shard."""
    monkeypatch.setattr(fleet, "_REPLACED_S", 0.2)
    config = ClusterConfig(shards=1, listed=True, step_s=0.01, scheduler=SchedulerConfig(no_shard_grace_s=1000.0))
    async with cluster(config) as running:
        (old,) = running.addresses
        first = running.engine
        new = await start_new(running)
        await set_list(running, old, new)
        await until_serving(running, new)
        assert serves(running) == NEW
        # One that came before that.
        wanted = spec([1, 2, 3], 200)
        reading = asyncio.create_task(run(first, wanted))
        await eventually(lambda: any(one.output for one in first.scheduler.sequences.values()), "it runs")
        await running.stop_shard(old)
        assert await reading == undisturbed(wanted)
        assert running.state(old) is ShardState.LOST
        await eventually(lambda: not running.fleet._leaving, "the old engine has ended")
        # It may come back with either weights.
        await running.start_shard(old)
        await until_serving(running, old)
        await running.wait_until_at_rest()
