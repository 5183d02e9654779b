"""Calls that touch no sequence, and the link to a shard that drains, while shards come and go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_proto.shard.v1 import shard_pb2
from caravan_router.engine.client import ShardClient
from caravan_router.engine.link import LinkOwner, ShardLink
from caravan_router.engine.link_config import LinkConfig
from caravan_router.engine.observer import EngineObserver
from caravan_router.engine.shard_calls import ShardCalls, ShardRpcError
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.core.errors import GenerationError, HelperError, TextTooLongError
from caravan_scheduler.events import Event, ShardDraining, ShardJoined, ShardLost
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service.server import ShardServer
from caravan_shard.service.text import TextService
from caravan_testing.cluster import ClusterConfig, StepLog, cluster
from caravan_testing.specs import run, spec, undisturbed
from caravan_testing.waiting import eventually

SERVICE = shard_pb2.DESCRIPTOR.services_by_name["ShardService"].full_name


class Silent:
    """A shard that answers nothing."""

    def __init__(self) -> None:
        self.asked = 0

    async def tokenize(self, _request: Any, _context: Any) -> Any:
        self.asked += 1
        await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def silent_shard(folder: Path) -> AsyncIterator[tuple[Silent, ShardClient]]:
    server, silent = grpc.aio.server(), Silent()
    tokenize: Any = grpc.unary_unary_rpc_method_handler(silent.tokenize)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Tokenize": tokenize})])
    server.add_insecure_port(f"unix:{folder}/shard")
    await server.start()
    client = ShardClient(f"unix:{folder}/shard", 5.0)
    try:
        yield silent, client
    finally:
        await client.close()
        await server.stop(None)


async def test_closing_a_client_fails_its_calls_and_cancels_nobody(tmp_path: Path) -> None:
    async with silent_shard(tmp_path) as (silent, client):
        asking = asyncio.create_task(client.tokenize("text", add_special=True))
        await eventually(lambda: silent.asked == 1, "the shard is asked")
        await client.close()
        with pytest.raises(ShardRpcError, match="the connection was closed"):
            await asking
        with pytest.raises(ShardRpcError, match="the connection was closed"):
            await client.tokenize("text", add_special=True)


async def test_a_caller_that_is_cancelled_stays_cancelled(tmp_path: Path) -> None:
    async with silent_shard(tmp_path) as (silent, client):
        asking = asyncio.create_task(client.tokenize("text", add_special=True))
        await eventually(lambda: silent.asked == 1, "the shard is asked")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_texts_are_spread_over_the_shards(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    async with (
        silent_shard(folders[0]) as (first, one),
        silent_shard(folders[1]) as (second, other),
        cluster(ClusterConfig(shards=2)) as running,
    ):
        links = list(running.engine.replicas.links.values())
        clients = [link.client for link in links]
        links[0].client, links[1].client = one, other
        asking = [asyncio.create_task(running.engine.queries.tokenize(f"text {number}")) for number in range(4)]
        await eventually(lambda: (first.asked, second.asked) == (2, 2), "each shard has half of the texts")
        for call in asking:
            call.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert (one.tokenizing.texts, other.tokenizing.texts) == (0, 0)
        for link, client in zip(links, clients, strict=True):
            link.client = client


async def test_a_text_is_tokenized_elsewhere_when_its_shard_is_lost(tmp_path: Path) -> None:
    async with silent_shard(tmp_path) as (silent, client), cluster(ClusterConfig(shards=2)) as running:
        links = list(running.engine.replicas.links.values())
        links[0].client, lost = client, links[0].client
        assert lost is not None
        asking = asyncio.create_task(running.engine.queries.tokenize("text"))
        await eventually(lambda: silent.asked == 1, "the first shard is asked")
        await client.close()
        assert (await asking).token_ids
        links[0].client = lost


async def test_texts_are_tokenized_together_in_as_few_calls_as_a_shard_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(ClusterConfig()) as running:
        queries = running.engine.queries
        calls, ask = list[int](), ShardClient.tokenize_texts

        async def noted(client: ShardClient, texts: Sequence[str], **options: bool) -> list[tuple[int, ...]]:
            calls.append(len(texts))
            return await ask(client, texts, **options)

        monkeypatch.setattr(ShardClient, "tokenize_texts", noted)
        texts = [f"text {number}" for number in range(150)]
        found = await queries.tokenize_texts(texts)
        assert found == [(await queries.tokenize(text)).token_ids for text in texts]
        assert calls == [64, 64, 22]
        assert await queries.tokenize_texts([]) == []
        calls.clear()
        long = "é" * (running.engine.model.max_tokenize_bytes // 4 + 1)
        assert len(await queries.tokenize_texts([long, "a", long])) == 3
        assert calls == [2, 1]
        with pytest.raises(TextTooLongError):
            await queries.tokenize_texts(["a", 2 * long])


async def test_a_constraint_is_compiled_elsewhere_when_its_only_shard_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard refuses the call, since it is ending, and is back a moment later."""
    asked = 0
    compile_constraint = ShardClient.compile_constraint

    async def refuse_first(client: ShardClient, constraint: Constraint) -> str | None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ShardRpcError(ShardError.DRAINING, "this shard is ending")
        return await compile_constraint(client, constraint)

    monkeypatch.setattr(ShardClient, "compile_constraint", refuse_first)
    async with cluster(ClusterConfig(shards=1)) as running:
        constraint = Constraint(ConstraintKind.REGEX, "[xyz]{5}")
        assert await running.engine.queries.compile_constraint(constraint) is None
    assert asked == 2


async def test_a_shard_that_refuses_a_constraint_otherwise_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_client: ShardClient, _constraint: Constraint) -> str | None:
        raise ShardRpcError(ShardError.BAD_REQUEST, "there is no constraint")

    monkeypatch.setattr(ShardClient, "compile_constraint", refuse)
    async with cluster(ClusterConfig(shards=1)) as running:
        with pytest.raises(GenerationError, match="there is no constraint"):
            await running.engine.queries.compile_constraint(Constraint(ConstraintKind.REGEX, "x"))


async def test_a_constraint_that_cannot_be_checked_is_no_fault_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_client: ShardClient, _constraint: Constraint) -> str | None:
        raise ShardRpcError(ShardError.CHECK_FAILED, "constraints cannot be checked at present")

    monkeypatch.setattr(ShardClient, "compile_constraint", fail)
    async with cluster(ClusterConfig(shards=2)) as running:
        with pytest.raises(HelperError, match="cannot be checked at present"):
            await running.engine.queries.compile_constraint(Constraint(ConstraintKind.REGEX, "x"))


# The router must not learn from a heartbeat what these tests wait for.
NO_HEARTBEAT = LinkConfig(router_id="test", heartbeat_s=600, silence_s=1800, lease_ttl_s=18000)


async def test_the_router_hears_at_once_that_a_shard_drains() -> None:
    log = StepLog()
    async with cluster(ClusterConfig(shards=2, link=NO_HEARTBEAT, hook=log)) as running:
        shards = running.engine.scheduler.shards
        reading = asyncio.create_task(run(running.engine, spec([1, 2, 3], 20)))
        async with log.held():
            (leaving,) = [name for name, shard in shards.items() if shard.stays.residents]
            drained = asyncio.create_task(running.servers[leaving].drain())
            await eventually(lambda: shards[leaving].drain.has_begun, "the router knows")
        assert await reading == undisturbed(spec([1, 2, 3], 20))
        await drained


@dataclass(frozen=True, slots=True)
class Sink:
    """Takes the events of a shard in place of an engine."""

    observer: EngineObserver
    post: Callable[[Event], None]

    @property
    def adapters(self) -> "Sink":
        return self

    async def bring(self, client: ShardCalls, epoch: int) -> None:
        """Bring none."""


async def test_the_router_hears_of_a_drain_before_the_shard_is_gone(tmp_path: Path) -> None:
    """This holds even if the shard ends at once."""
    config = ShardConfig(backend="fake", address=f"unix:{tmp_path}/shard", drain_timeout_s=0.0)
    server = ShardServer(config, ToyBackend)
    await server.start()
    events: list[Event] = []
    sink = Sink(observer=Metrics().of("toy"), post=events.append)
    link = ShardLink(server.address, NO_HEARTBEAT, LinkOwner(accept=lambda _link, _info: sink))
    running = asyncio.create_task(link.run())
    # A shard that ends between joining and the router's first watch is merely lost.
    await eventually(lambda: link._reported is not None, "the router watches it")
    await server.drain()
    await server.stop()
    await eventually(lambda: len(events) >= 3, "the router knows")
    assert [type(event) for event in events] == [ShardJoined, ShardDraining, ShardLost]
    running.cancel()
    await asyncio.wait({running})


async def test_what_was_sent_before_the_router_knew_of_a_drain_is_carried_out() -> None:
    log = StepLog()
    wanted = [spec([number, 2, 3], 100) for number in range(2)]
    async with cluster(ClusterConfig(hook=log, step_s=0.005, drain_timeout_s=60.0)) as running:
        (address,) = running.addresses
        (shard,) = running.engine.scheduler.shards.values()
        reading = [asyncio.create_task(run(running.engine, wanted[0]))]
        await eventually(lambda: bool(shard.stays.decoding), "the first decodes")
        async with log.held():
            reading.append(asyncio.create_task(run(running.engine, wanted[1])))
            await eventually(lambda: running.queued_commands(address) > 0, "the shard has the prompt of the second")
            drained = asyncio.create_task(running.servers[address].drain())
            await eventually(lambda: shard.drain.has_begun, "the router knows")
        assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
        assert running.engine.scheduler.shards[address] is shard, "the shard was lost"
        await drained


async def test_a_call_of_a_client_that_is_closed_fails_and_cancels_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def tokenize(*_args: object, **_kwargs: object) -> None:
        asked.set()
        await never.wait()

    monkeypatch.setattr(TextService, "tokenize", tokenize)
    async with cluster() as running:
        client = ShardClient(running.addresses[0], 5.0)
        call = asyncio.create_task(client.tokenize("text", add_special=True))
        await asked.wait()
        await client.close()
        with pytest.raises(ShardRpcError, match="the connection was closed"):
            await call
        with pytest.raises(ShardRpcError, match="the connection was closed"):
            await client.tokenize("text", add_special=True)
