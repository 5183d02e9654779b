"""Router and shards on the toy model: clients get exactly the model's output, whatever other clients do."""

import asyncio
import gc
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.limits import KvLayout
from caravan_router.engine.client import ShardClient
from caravan_router.engine.shard_calls import ShardRpcError
from caravan_router.http.server.connection import Connection
from caravan_scheduler.config import PrefillMode, SchedulerConfig
from caravan_scheduler.sequence import Sequence
from caravan_shard.backends.toy.model import TOY_FACTS
from caravan_testing.cluster import Cluster, ClusterConfig, StepLog, body, cluster, expected_text, generate
from caravan_testing.raw_http import HOST, port_of, post
from caravan_testing.specs import run, spec, undisturbed
from caravan_testing.waiting import DEADLINE_S, eventually


async def test_one_request() -> None:
    async with cluster() as running, ClientSession() as session:
        answer = await generate(session, running.url, body("hello", 20))
        assert answer["generated_text"] == expected_text("hello", 20)
        await running.wait_until_at_rest()


async def test_truncate_keeps_the_begin_token() -> None:
    async with cluster() as running, ClientSession() as session:
        parameters = {"truncate": 4, "max_new_tokens": 20, "decoder_input_details": True}
        async with session.post(f"{running.url}/generate", json={"inputs": "hello", "parameters": parameters}) as reply:
            answer = await reply.json()
        assert answer["generated_text"] == expected_text("llo", 20)
        assert [token["text"] for token in answer["details"]["prefill"]] == ["<s>", "l", "l", "o"]
        await running.wait_until_at_rest()


async def test_tools_learn_what_the_shards_say_of_the_model() -> None:
    async with cluster(ClusterConfig(shards=2)) as running, ClientSession() as session:
        async with session.post(f"{running.url}/api/show", json={"model": "any"}) as reply:
            shown = await reply.json()
        assert shown["details"] == {
            "parent_model": "",
            "format": "gguf",
            "family": "toy",
            "families": ["toy"],
            "parameter_size": "1.06M",
            "quantization_level": "F32",
        }
        info = shown["model_info"]
        assert info == dict(TOY_FACTS.metadata) | {
            "general.name": "toy",
            "general.parameter_count": 4096 * 260,
            "caravan.context_length": running.config.cells,
            "caravan.vocab_size": 260,
        }
        assert info["tokenizer.ggml.add_bos_token"] is True
        async with session.get(f"{running.url}/api/ps") as reply:
            [model] = (await reply.json())["models"]
        assert (model["size"], model["size_vram"]) == (4096 * 260 * 4, 0)


async def check_many(running: Cluster, requests: int) -> None:
    prompts = [f"prompt number {number} " + "x" * (number * 13 % 90) for number in range(requests)]
    async with ClientSession() as session:
        answers = await asyncio.gather(
            *(generate(session, running.url, body(prompt, 5 + number % 30)) for number, prompt in enumerate(prompts))
        )
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer["generated_text"] == expected_text(prompt, 5 + number % 30)
    await running.wait_until_at_rest()


async def test_many_requests_share_one_shard() -> None:
    async with cluster(ClusterConfig(token_s=0.0001)) as running:
        await check_many(running, 60)


async def test_many_requests_in_pause_mode() -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(mode=PrefillMode.PAUSE), token_s=0.0001)
    async with cluster(config) as running:
        await check_many(running, 60)


async def test_many_requests_over_several_split_shards() -> None:
    config = ClusterConfig(shards=3, layout=KvLayout.SPLIT, max_sequences=4, token_s=0.0001)
    async with cluster(config) as running:
        await check_many(running, 90)


async def test_clients_that_leave_at_any_moment_leave_nothing_behind() -> None:
    """32 clients, a third of which disconnect at random moments; the others get their exact text."""
    chance = random.Random(7)
    async with cluster(ClusterConfig(step_s=0.001, token_s=0.0001)) as running:

        async def client(number: int) -> None:
            for round_number in range(4):
                prompt = f"client {number} round {round_number} " + "y" * chance.randrange(200)
                new_tokens = chance.randrange(1, 60)
                leaves = chance.random() < 1 / 3
                streams = chance.random() < 0.5
                async with ClientSession() as session:
                    if not leaves:
                        answer = await generate(session, running.url, body(prompt, new_tokens))
                        assert answer["generated_text"] == expected_text(prompt, new_tokens)
                        continue
                    path = "/generate_stream" if streams else "/generate"
                    try:
                        async with asyncio.timeout(chance.random() * 0.3):
                            async with session.post(f"{running.url}{path}", json=body(prompt, 2000)) as response:
                                await response.read()
                    except TimeoutError:
                        pass

        async with ClientSession() as session:  # afterwards, all tasks that links and servers keep are running
            await generate(session, running.url, body("first", 5))
        await running.wait_until_at_rest()
        before = asyncio.all_tasks()
        await asyncio.gather(*(client(number) for number in range(32)))
        await running.wait_until_at_rest()
        await eventually(lambda: len(asyncio.all_tasks()) <= len(before), "every task of a request ended")
        async with ClientSession() as session:
            metrics = await (await session.get(f"{running.url}/metrics")).text()
        assert 'tgi_request_failure{err="generation",model="toy"} 0' in metrics


async def test_a_lost_shard_costs_a_pause_and_not_an_error() -> None:
    config = ClusterConfig(shards=2, step_s=0.005)
    async with cluster(config) as running, ClientSession() as session:
        prompts = [f"prompt {number}" for number in range(8)]
        answers = [asyncio.create_task(generate(session, running.url, body(prompt, 100))) for prompt in prompts]
        lost = running.addresses[0]
        await eventually(
            lambda: all(shard.stays.decoding for shard in running.engine.scheduler.shards.values()),
            "both shards decode",
        )
        await running.stop_shard(lost)
        assert [answer["generated_text"] for answer in await asyncio.gather(*answers)] == [
            expected_text(prompt, 100) for prompt in prompts
        ]
        await running.wait_until_up(1)
        await running.start_shard(lost)
        await running.wait_until_up(2)
        await check_many(running, 16)


async def test_requests_wait_for_the_only_shard_to_come_back() -> None:
    async with cluster(ClusterConfig(step_s=0.005)) as running, ClientSession() as session:
        (address,) = running.addresses
        answer = asyncio.create_task(generate(session, running.url, body("wait for me", 60)))
        await eventually(lambda: bool(running.engine.scheduler.shards[address].stays.decoding), "it decodes")
        await running.stop_shard(address)
        await running.wait_until_up(0)
        async with session.get(f"{running.url}/health") as health:
            assert health.status == 503
        await running.start_shard(address)
        assert (await answer)["generated_text"] == expected_text("wait for me", 60)


async def test_without_a_shard_a_request_is_refused_with_a_reason() -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(no_shard_grace_s=0.2))
    async with cluster(config) as running, ClientSession() as session:
        await running.stop_shard(running.addresses[0])
        await running.wait_until_up(0)
        async with session.post(f"{running.url}/generate", json=body("hello", 5)) as response:
            assert response.status == 503
            assert "No shard of the model toy is up" in (await response.json())["error"]


async def test_a_second_router_takes_the_shard_and_the_first_notices() -> None:
    """Commands under the older lease are refused, and the first router waits until the new lease has ended."""
    async with cluster(ClusterConfig(step_s=0.002)) as running, ClientSession() as session:
        answer = asyncio.create_task(generate(session, running.url, body("fenced", 200)))
        (address,) = running.addresses
        await eventually(lambda: bool(running.engine.scheduler.shards[address].stays.decoding), "it decodes")
        client = ShardClient(address, 5.0)
        epoch = (await client.info()).epoch
        taken_at = time.monotonic()
        await client.lease("another", epoch + 1, 1.0)
        assert (await answer)["generated_text"] == expected_text("fenced", 200)
        assert time.monotonic() - taken_at > 1.0
        assert (await client.info()).epoch == epoch + 2
        await client.close()


async def test_a_broken_connection_of_a_client_is_no_error_of_the_server() -> None:
    async with cluster(ClusterConfig(step_s=0.002)) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
        writer.write(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        await writer.drain()
        writer.close()
        async with ClientSession() as session:
            answer = await generate(session, running.url, body("still here", 5))
        assert answer["generated_text"] == expected_text("still here", 5)


async def test_a_shard_that_drains_keeps_its_requests_and_gets_no_new_ones() -> None:
    log = StepLog()
    config = ClusterConfig(shards=2, step_s=0.005, drain_timeout_s=20.0, hook=log)
    async with cluster(config) as running, ClientSession() as session:
        answers = [
            asyncio.create_task(generate(session, running.url, body(f"prompt {number}", 150))) for number in range(4)
        ]
        shards = running.engine.scheduler.shards
        await eventually(lambda: all(shard.stays.decoding for shard in shards.values()), "both shards decode")
        leaving = running.addresses[0]
        async with log.held():
            drained = asyncio.create_task(running.servers[leaving].drain())
            await eventually(lambda: shards[leaving].drain.has_begun, "the router knows")
        await asyncio.gather(*(generate(session, running.url, body(f"later {number}", 5)) for number in range(4)))
        await drained
        texts = [answer["generated_text"] for answer in await asyncio.gather(*answers)]
        assert texts == [expected_text(f"prompt {number}", 150) for number in range(4)]
        client = ShardClient(leaving, 5.0)
        with pytest.raises(ShardRpcError, match="ending"):
            await client.lease("another", 99, 1.0)
        await client.close()


async def test_an_engine_settles_once_shards_hold_nothing_that_runs() -> None:
    async with cluster() as running:
        stream = running.engine.submit(spec([1, 2, 3], 500))
        async for _ in stream:
            break
        stream.close()
        await running.fleet.settle(20.0)
        assert not running.engine.scheduler.shards
        (address,) = running.addresses
        assert not running.servers[address]._shard.lease.is_held
        await eventually(lambda: not running.servers[address]._shard.engine.sequence_count, "the shard is empty")


@pytest.mark.parametrize("layout", list(KvLayout))
async def test_an_engine_that_settles_lets_shards_save_what_they_keep(layout: KvLayout) -> None:
    """In the split layout, nothing is saved before a shard is idle for a while."""
    wanted = spec(range(100), 50)
    async with cluster(ClusterConfig(shards=2, layout=layout)) as running:
        assert await run(running.engine, wanted) == undisturbed(wanted)
        await running.fleet.settle(20.0)
        assert not running.engine.scheduler.shards
        saved = [
            run.cuts[-1]
            for address in running.addresses
            for run, _ in running.servers[address]._shard.engine.runs.list_runs()
        ]
        assert saved == [149]


NEIGHBOURS, TOKENS = 3, 100
FLOOD = b'{"prompt":"ab","max_tokens":20000,"ignore_eos":true,"stream":true,"logprobs":5}'
BUFFER_BYTES = 256 * 1024


async def _neighbours(running: Cluster) -> None:
    """Read some streams to their end."""
    body = {"prompt": "ab", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    async with ClientSession() as session:

        async def one() -> None:
            async with session.post(f"{running.url}/v1/completions", json=body) as response:
                assert (await response.text()).count('"finish_reason":"length"') == 1

        await asyncio.gather(*(one() for _ in range(NEIGHBOURS)))


def _transport_of(peer: socket.socket) -> asyncio.Transport:
    """Return the server's transport of the connection."""
    for found in gc.get_objects():
        if isinstance(found, Connection) and found.transport is not None and found.peername == peer.getsockname():
            return found.transport
    raise AssertionError("no connection to it")


@asynccontextmanager
async def _stuck(running: Cluster) -> AsyncIterator[tuple[Sequence, asyncio.Transport]]:
    """Ask for a long answer and read none of it. Yields its sequence and the server's transport when that is full."""
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect((HOST, port_of(running.url)))
        stuck.sendall(post("/v1/completions", FLOOD))
        await eventually(lambda: bool(running.engine.scheduler.sequences), "it runs")
        (sequence,) = running.engine.scheduler.sequences.values()
        transport = _transport_of(stuck)
        # Otherwise the kernel buffers some megabytes.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        await eventually(lambda: transport.get_write_buffer_size() > 0, "its buffers are full")
        yield sequence, transport


async def test_a_client_that_reads_nothing_holds_no_other_up() -> None:
    limits = Limits(slow_client_timeout_s=2 * DEADLINE_S)
    async with cluster(ClusterConfig(cells=24_576, step_s=0.0002, limits=limits)) as running:
        async with _stuck(running) as (sequence, transport):
            # If they waited for it, they would not end before it is cut.
            await _neighbours(running)
            assert 0 < transport.get_write_buffer_size() < BUFFER_BYTES
            assert sequence in running.engine.scheduler.sequences.values()
        await running.wait_until_at_rest()


async def test_a_client_that_reads_nothing_is_cut() -> None:
    limits = Limits(slow_client_timeout_s=0.5)
    async with cluster(ClusterConfig(cells=24_576, step_s=0.0002, limits=limits)) as running:
        async with _stuck(running) as (sequence, _):
            await eventually(lambda: not running.engine.scheduler.sequences, "it was cut")
            assert len(sequence.output) < 20_000
        await running.wait_until_at_rest()
        await _neighbours(running)


async def states(session: ClientSession, running: Cluster) -> dict[str, str]:
    """The state of each request in progress, by its id."""
    async with session.get(f"{running.url}/v1/requests") as response:
        return {entry["id"]: entry["state"] for entry in (await response.json())["data"]}


async def until_states(session: ClientSession, running: Cluster, **expected: str) -> None:
    await eventually(lambda: states(session, running), f"requests are {expected}", lambda found: found == expected)


async def abort(session: ClientSession, running: Cluster, request_id: str) -> None:
    async with session.delete(f"{running.url}/v1/requests/{request_id}") as response:
        assert response.status == 200


def start(session: ClientSession, running: Cluster, request_id: str, **fields: Any) -> asyncio.Task[int]:
    """Send a request that takes long. The task returns the status of its reply."""

    async def send() -> int:
        body = {"max_tokens": 1000, "ignore_eos": True, "prompt": request_id * 20, **fields}
        headers = {"X-Request-Id": request_id}
        async with session.post(f"{running.url}/v1/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status

    return asyncio.create_task(send())


async def test_states_are_those_of_the_scheduler_and_an_abort_ends_each() -> None:
    """One place: a higher priority takes it, and whoever lost it is swapped out."""
    log = StepLog()
    config = ClusterConfig(max_sequences=1, layout=KvLayout.SPLIT, step_s=0.002, token_s=0.001, hook=log)
    async with cluster(config) as running, ClientSession() as session:
        low = start(session, running, "low", max_tokens=3000)
        await until_states(session, running, low="running")
        second = start(session, running, "second")
        await until_states(session, running, low="running", second="queued")
        high = start(session, running, "high", max_tokens=3000, priority=1)
        await until_states(session, running, low="swapped", second="queued", high="running")
        await abort(session, running, "second")
        assert await second == 410
        # What is swapped out is aborted too.
        await abort(session, running, "low")
        assert await low == 410
        async with log.held():
            assert await states(session, running) == {"high": "running"}
            await abort(session, running, "high")
            assert await high == 410
            assert await states(session, running) == {}
        await running.wait_until_at_rest()
        await generate(session, running.url, {"inputs": "a", "parameters": {"max_new_tokens": 3}})


async def test_a_prompt_is_prefilling_while_it_is_computed() -> None:
    log = StepLog()
    scheduler = SchedulerConfig(prefix_caching=False)
    config = ClusterConfig(max_batch_tokens=16, step_s=0.01, hook=log, scheduler=scheduler)
    async with cluster(config) as running, ClientSession() as session:
        first = start(session, running, "first", prompt="x" * 1000)
        async with log.held():
            await until_states(session, running, first="prefilling")
            await abort(session, running, "first")
            assert await first == 410
        # The cells are back with the next step, long before its thousand tokens would have been computed.
        await running.wait_until_at_rest()
        assert running.engine.scheduler.shards[running.addresses[0]].cells.held == 0


async def test_every_choice_of_an_aborted_request_ends() -> None:
    async with cluster(ClusterConfig(step_s=0.002)) as running, ClientSession() as session:
        reply = start(session, running, "choices", n=3)
        await until_states(session, running, choices="running")
        async with session.get(f"{running.url}/v1/requests") as response:
            [entry] = (await response.json())["data"]
        assert len(entry["generations"]) == 3
        await abort(session, running, "choices")
        assert await reply == 410
        await running.wait_until_at_rest()
