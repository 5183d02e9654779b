"""Killed shards, garbage and clients that leave do not break the server."""

import asyncio
import io
import json
import os
import random
import re
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.programs import command_line
from caravan_testing.serve_process import Served, serve, start
from caravan_testing.shard_models import WORDS_MODEL, fetched
from caravan_testing.waiting import DEADLINE_S, eventually, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.model]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """It computes exactly, so that a text that is computed again is the same."""
    flags = ("-np", "8", "-c", "16384", "-t", "1", "--exact", "--shard-grace-s", "600")
    with serve(*flags, models=(fetched(WORDS_MODEL),)) as running:
        yield running


def _socket_of(served: Served) -> str:
    found = re.search(r"address=unix:(\S+)", "".join(served.log))
    assert found is not None, "".join(served.log)
    return found[1]


async def _generate(session: ClientSession, url: str, prompt: str, new_tokens: int) -> str:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": new_tokens}}
    async with session.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return str(answer["generated_text"])


# About a second of tokens, as many as the context has room for. A stream that is over before its shard is killed, on a
# busy host, has the same text.
_LONG = 1900


async def test_a_killed_shard_only_pauses_its_streams(served: Served) -> None:
    """After SIGKILL in the middle of a stream, the client sees no error and the same text, and the server recovers."""
    async with ClientSession() as session:
        calm = await _generate(session, served.url, "The history of Rome begins", _LONG)
        body = {"inputs": "The history of Rome begins", "parameters": {"max_new_tokens": _LONG}}
        (pid,) = served.shard_pids()
        async with session.post(f"{served.url}/generate_stream", json=body) as response:
            assert b'"token"' in await response.content.readline()
            os.kill(pid, signal.SIGKILL)
            *_, last = [line async for line in response.content if line.startswith(b"data:")]
        assert json.loads(last.removeprefix(b"data:"))["generated_text"] == calm
        assert served.shard_pids() != [pid]
        await asyncio.to_thread(served.wait, "healthy")
        assert await _generate(session, served.url, "The history of Rome begins", _LONG) == calm


_Shards = dict[str, dict[str, Any]]


async def _shards_when(session: ClientSession, url: str, condition: Callable[[_Shards], bool]) -> _Shards:
    """Poll until ``condition`` holds for the shards, by name, and return them."""

    async def look() -> _Shards:
        async with session.get(f"{url}/admin/shards") as reply:
            return {shard["shard_id"]: shard for shard in (await reply.json())["shards"]}

    return await eventually(look, "the shards are as they should be", condition)


def _pid_of(served: Served, shard: str) -> int:
    (pid,) = (pid for pid in served.shard_pids() if shard in command_line(pid))
    return pid


@pytest.mark.slow
async def test_a_stopped_shard_is_noticed_and_its_streams_go_on_elsewhere() -> None:
    """SIGSTOP closes no connection: the router notices that the shard reports nothing, or completes no step."""
    # A host may be so busy that a shard is given up although nothing stopped it.
    patience = ("--shard-silence-s", "1.5", "--max-request-losses", "100")
    with serve("--shards", "2", "-np", "4", "-c", "2048", "-t", "1", *patience) as served:
        async with ClientSession() as session:

            def serving(shards: _Shards) -> bool:
                return [shard["state"] for shard in shards.values()] == ["serving", "serving"]

            def busy(shards: _Shards) -> bool:
                return all(shard["sequences"] for shard in shards.values())

            await _shards_when(session, served.url, serving)
            prompts = ["The history of Rome begins", "Count slowly:", "Birds fly because", "A recipe for bread:"]
            running = [asyncio.create_task(_generate(session, served.url, prompt, 200)) for prompt in prompts]
            before = await _shards_when(session, served.url, busy)
            pid = await asyncio.to_thread(_pid_of, served, "shard-1")
            os.kill(pid, signal.SIGSTOP)
            try:
                shards = await _shards_when(session, served.url, lambda shards: shards["shard-1"]["state"] == "lost")
                assert re.search(
                    r"reported nothing for|no step completed for|ping timeout", shards["shard-1"]["reason"]
                )
                assert all(await asyncio.gather(*running))
            finally:
                os.kill(pid, signal.SIGCONT)
            shards = await _shards_when(session, served.url, serving)
            assert shards["shard-1"]["epoch"] > before["shard-1"]["epoch"]


async def test_garbage_on_the_grpc_socket_disturbs_no_stream(served: Served) -> None:
    async with ClientSession() as session:
        running = asyncio.create_task(_generate(session, served.url, "Count slowly:", 1000))
        for garbage in (
            b"\x00" * 4096,
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(100_000),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff",
        ):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(_socket_of(served))
                try:
                    connection.sendall(garbage)
                except (BrokenPipeError, ConnectionResetError):
                    continue
        assert await running
    assert served.healthy()


HOSTILE = (
    (b'{"inputs": "' + b"a" * 10_000_000 + b'"}', 413),
    (b"{", 400),
    (b"[]", 422),
    (b'{"inputs": ""}', 422),
    (b'{"inputs": "x", "parameters": {"temperature": NaN}}', 400),
    (b'{"inputs": "x", "parameters": {"temperature": -1}}', 422),
    (b'{"inputs": "x", "parameters": {"temperature": 1e400}}', 422),
    (b'{"inputs": "x", "parameters": {"max_new_tokens": -5}}', 422),
    (b'{"inputs": "x", "parameters": {"max_new_tokens": 99999999999999999999}}', 422),
    (b'{"inputs": "x", "parameters": {"seed": -2}}', 422),
    (b'{"inputs": "' + b"long " * 20_000 + b'"}', 422),
    (b'{"surprise": 1}', 422),
)


@pytest.mark.parametrize(("body", "status"), HOSTILE, ids=[body[:60].decode() for body, _ in HOSTILE])
async def test_bad_input_has_a_clear_error(served: Served, body: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    async with (
        ClientSession() as session,
        session.post(f"{served.url}/generate", data=io.BytesIO(body), headers=headers) as response,
    ):
        answer = await response.json()
        assert response.status == status, answer
        assert len(answer["error"]) > 10
        assert answer["error_type"]
    assert served.healthy()


async def test_a_prompt_longer_than_the_context_is_refused_with_its_numbers(served: Served) -> None:
    async with ClientSession() as session:
        body = {"inputs": "word " * 9000, "parameters": {"max_new_tokens": 5}}
        async with session.post(f"{served.url}/generate", json=body) as response:
            assert response.status == 422
            error = (await response.json())["error"]
    assert re.search(r"\b9\d\d\d\b", error), error
    assert "2048" in error, error


async def test_clients_that_leave_leave_nothing_behind() -> None:
    """A third of 32 clients disconnect at random moments. No error, no KV cell and no descriptor is left behind."""
    chance = random.Random(3)
    with serve("-np", "8", "-c", "4096", "-t", "1", models=(fetched(WORDS_MODEL),)) as served:
        async with ClientSession() as session:
            await _generate(session, served.url, "warm up", 5)

        async def client(number: int) -> None:
            async with ClientSession() as session:
                words = " ".join(chance.choices(("sun", "moon", "star", "sea"), k=chance.randrange(1, 60)))
                if number % 3:
                    assert await _generate(session, served.url, f"{number} {words}", chance.randrange(1, 24))
                    return
                path = chance.choice(("/generate", "/generate_stream"))
                body = {"inputs": f"{number} {words}", "parameters": {"max_new_tokens": 500}}
                try:
                    async with asyncio.timeout(chance.random() / 2):
                        async with session.post(f"{served.url}{path}", json=body) as response:
                            await response.read()
                except TimeoutError:
                    pass

        before = served.descriptors()
        await asyncio.gather(*(client(number) for number in range(32)))

        async def look() -> tuple[bool, int]:
            return await _at_rest(served), served.descriptors()

        await eventually(
            look, f"none runs, and at most {before} descriptors are open", lambda found: found[0] and found[1] <= before
        )


async def _at_rest(served: Served) -> bool:
    async with ClientSession() as session, session.get(f"{served.url}/metrics") as response:
        metrics = await response.text()
    used = re.findall(
        r"^(?:caravan_kv_cells_used|caravan_sequences_running|tgi_queue_size)\S* (\S+)$", metrics, re.MULTILINE
    )
    assert len(used) == 3, metrics
    assert f'tgi_request_failure{{err="generation",model="{WORDS_MODEL.name}"}} 0' in metrics
    return all(float(value) == 0 for value in used)


def test_the_shards_end_when_the_supervisor_is_killed() -> None:
    with start("-np", "2", "-c", "512", "-t", "1", models=(fetched(WORDS_MODEL),)) as served:
        (shard,) = served.shard_pids()
        served.process.kill()
        wait_until(lambda: not command_line(shard), "the shard ends after its supervisor")


async def test_a_server_that_ends_as_its_clients_leave_does_not_wait_for_a_lease() -> None:
    with start("-np", "8", "-c", "16384", "-t", "1", models=(fetched(WORDS_MODEL),)) as served:
        async with ClientSession() as session:
            body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 3000}}
            streams = [await session.post(f"{served.url}/generate_stream", json=body) for _ in range(4)]
            for stream in streams:
                assert b'"token"' in await stream.content.readline()
            served.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "draining" in "".join(served.log), "the server drains")
            for stream in streams:
                stream.close()
        # All clients have left: nothing keeps the server, which releases their sequences before it ends.
        assert await asyncio.to_thread(served.process.wait, DEADLINE_S) == 0, "".join(served.log)
    assert "the lease expired" not in "".join(served.log)
