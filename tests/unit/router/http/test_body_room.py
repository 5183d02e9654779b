"""Bodies of all open requests together take no more memory than the operator allows."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack

import msgspec
import pytest
from aiohttp import ClientResponse

from caravan_dialects.api.errors import BodiesTooLargeError, DecodedBodyTooLargeError
from caravan_dialects.api.limits import Limits
from caravan_router.http.server.body_room import BodyRoom
from caravan_testing.http_server import keys, serving
from caravan_testing.scripted_engine import ScriptedEngine
from caravan_testing.waiting import in_time

JSON = {"Content-Type": "application/json"}
GOOD = {"prompt": "hi", "max_tokens": 1}


def test_each_client_gets_as_much_as_it_leaves_free() -> None:
    room = BodyRoom(1200)
    with ExitStack() as held:
        first, second, third = (held.enter_context(room.share(name)) for name in ("ann", "bob", "eve"))
        first.grow(600)
        with pytest.raises(DecodedBodyTooLargeError):
            first.grow(1)
        with room.share("ann") as more, pytest.raises(BodiesTooLargeError):
            more.grow(1)
        second.grow(300)
        third.grow(150)
        assert room.total == 1050
        first.shrink(600)
        second.grow(225)
        assert room.total == 675
    assert room.total == 0


async def test_clients_that_send_and_stop_take_no_more_than_the_limit() -> None:
    """Uploads of one key stop short of their end. Those beyond the limit are refused, another key's request is not."""
    limits = Limits(payload_limit=1_000_000, max_bodies_bytes=3_000_000)
    enough = asyncio.Event()

    async def upload() -> AsyncIterator[bytes]:
        yield b'{"prompt":"' + b"a" * 400_000
        await enough.wait()
        yield b'"}'

    async with serving(ScriptedEngine(), limits, keys("ann", "bob")) as service:

        async def send() -> ClientResponse:
            return await service.client.post(
                "/v1/completions", data=upload(), headers={**JSON, "Authorization": "Bearer ann"}
            )

        async with AsyncExitStack() as ending:
            sending = [asyncio.create_task(send()) for _ in range(10)]
            ending.callback(enough.set)
            async with in_time("the uploads beyond the limit are refused"):
                refused = [await one for _, one in zip(range(7), asyncio.as_completed(sending), strict=False)]
            assert [response.status for response in refused] == [503] * 7
            assert refused[0].headers["Retry-After"] == "1"
            assert "3000000 bytes" in (await refused[0].json())["error"]["message"]
            answered = await service.post("/v1/completions", GOOD, Authorization="Bearer bob")
            assert answered.status == 200, await answered.text()
        await asyncio.gather(*sending)
        # What the others held is free again.
        answered = await service.post("/v1/completions", {**GOOD, "prompt": "a" * 600_000}, Authorization="Bearer ann")
        assert answered.status == 400, await answered.text()
        assert "context_length_exceeded" in await answered.text()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        # Bytes after decompression count.
        (b'{"prompt":"' + b"a" * 4_500_000 + b'"}', 413),
        # Short values take much more memory than their text.
        (b'{"prompt":"a","metadata":[' + b"{}," * 20_000 + b"{}]}", 413),
        (b'{"prompt":"a","metadata":[' + b'{"b":1},' * 14_000 + b"0]}", 413),
        # Their marks inside a string take no memory.
        (msgspec.json.encode({"prompt": "hi", "max_tokens": 1, "user": "{},[]" * 100_000}), 200),
        (msgspec.json.encode({"prompt": "hi", "max_tokens": 1, "user": '\\"{},' * 100_000}), 200),
        # One wide character makes its whole string wide, and no other one.
        ('{"prompt":"a","user":"☃🐫'.encode() + b"a" * 1_400_000 + b'"}', 413),
        (b'{"prompt":"a","user":"\\ud83d\\udc2b' + b"a" * 1_400_000 + b'"}', 413),
        (b'{"max_tokens":1,"prompt":"hi","user":"' + b"a" * 1_000_000 + '","stop":"🐫"}'.encode(), 200),
    ],
)
async def test_decoded_values_count(engine: ScriptedEngine, body: bytes, status: int) -> None:
    limits = Limits(payload_limit=5_000_000, max_bodies_bytes=8_000_000)
    async with serving(engine, limits) as service:
        headers = {**JSON, "Content-Encoding": "gzip"}
        response = await service.client.post("/v1/completions", data=gzip.compress(body), headers=headers)
        text = await response.text()
        assert response.status == status, text
        assert status == 200 or "may take at most 4000000 bytes" in text
