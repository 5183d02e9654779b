"""Responses with `background`: they go on without a client, and every event can be read again."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from caravan_testing.http_server import Service, named_events, serving
from caravan_testing.scripted_engine import WordEngine
from caravan_testing.waiting import eventually

PATH = "/v1/responses"


def engine(*words: str) -> WordEngine:
    return WordEngine(words=words or ("Hello", " you"))


async def begun(service: Service, **fields: Any) -> Any:
    return await service.reply(PATH, {"input": "Hi", "background": True, **fields})


async def events_after(service: Service, response_id: str, number: int | None = None) -> list[Any]:
    """Return the events of a response after one, up to the end of the stream."""
    query = {"stream": "true"} | ({} if number is None else {"starting_after": str(number)})
    async with service.client.get(f"{PATH}/{response_id}", params=query) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    return named_events(text) if text else []


async def found(service: Service, response_id: str) -> Any:
    async with service.client.get(f"{PATH}/{response_id}") as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def ended(service: Service, response_id: str) -> Any:
    return await eventually(
        lambda: found(service, response_id),
        "the response ends",
        lambda one: one["status"] not in ("queued", "in_progress"),
    )


async def test_a_response_is_queued_and_ends_without_a_client() -> None:
    async with serving(engine()) as service:
        queued = await begun(service)
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        whole = await ended(service, queued["id"])
        assert whole["status"] == "completed"
        assert whole["output"][0]["content"][0]["text"] == "Hello you"
        await eventually(service.is_idle, "everything released")


async def test_a_stream_begins_with_queued_and_can_be_read_again_from_any_event() -> None:
    async with serving(engine()) as service:
        events = named_events(
            await (await service.post(PATH, {"input": "Hi", "background": True, "stream": True})).text()
        )
        assert [event["type"].removeprefix("response.") for event in events] == [
            "created", "queued", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
        response_id = events[0]["response"]["id"]
        assert await events_after(service, response_id) == events
        for number in range(len(events)):
            assert await events_after(service, response_id, number) == events[number + 1 :]
        assert await events_after(service, response_id, 10**9) == []


async def read_with_cuts(service: Service, response_id: str, cuts: Sequence[int]) -> bytes:
    """Return the events of a response as a client gets them that loses its connection after each event of ``cuts``."""
    read, last = b"", -1
    for cut in [*cuts, None]:
        query = {"stream": "true", "starting_after": str(last)}
        async with service.client.get(f"{PATH}/{response_id}", params=query) as response:
            async for line in response.content:
                read += line
                if line == b"\n":
                    last += 1
                    if last == cut:
                        response.close()
                        break
    return read


async def test_clients_that_are_cut_off_at_1000_events_get_the_same_bytes_and_nothing_is_computed_twice() -> None:
    words = [f" w{number}" for number in range(200)]
    draw = random.Random(45)
    slow = engine(*words)
    slow.step_s = 0.002
    async with serving(slow) as service:
        ids = [(await begun(service))["id"] for _ in range(10)]
        cuts = [sorted(draw.sample(range(len(words)), 100)) for _ in ids]
        texts = await asyncio.gather(*(read_with_cuts(service, *each) for each in zip(ids, cuts, strict=True)))
        for response_id, text in zip(ids, texts, strict=True):
            async with service.client.get(f"{PATH}/{response_id}", params={"stream": "true"}) as response:
                assert await response.read() == text
            events = named_events(text.decode())
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
            assert deltas == "".join(words) == events[-1]["response"]["output"][0]["content"][0]["text"]
        assert [stream.sent for stream in service.engine.streams] == [len(words) + 1] * len(ids)
