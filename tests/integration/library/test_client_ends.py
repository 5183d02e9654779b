"""What ends on the server when a client ends a call: by cancelling, leaving, an interrupt, closing, a timeout."""

import asyncio
import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

import caravan
from caravan import AsyncClient, Client, SamplingParams
from caravan.client import ServerDeadlineError
from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import DEADLINE_S, eventually, wait_until


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    """A server on which 9,000 tokens take longer than any test waits."""
    flags = ("--backend", "fake", "--parallel", "4", "--ctx-size", "40000", "--fake-step-ms", "20")
    with serve(*flags, models=("slow.gguf",)) as server:
        yield server


_ENDLESS = SamplingParams(max_tokens=9000, ignore_eos=True)


def _running(served: Served) -> int:
    with urllib.request.urlopen(f"{served.url}/v1/requests", timeout=DEADLINE_S) as reply:
        return len(json.load(reply)["data"])


async def test_a_cancelled_call_ends_on_the_server(slow: Served) -> None:
    async with AsyncClient(slow.url) as client:
        calls = [
            asyncio.create_task(client.generate(["a", "b"], _ENDLESS)),
            asyncio.create_task(client.chat([{"role": "user", "content": "Hello"}], _ENDLESS)),
        ]
        await eventually(lambda: _running(slow) == 3, "three requests run")
        for call in calls:
            call.cancel()
        assert all(
            isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*calls, return_exceptions=True)
        )
        await eventually(lambda: _running(slow) == 0, "none runs")


async def test_a_stream_that_is_left_ends_on_the_server(slow: Served) -> None:
    async with AsyncClient(slow.url) as client:
        parts = client.stream("a", _ENDLESS)
        await anext(parts)
        assert _running(slow) == 1
        await parts.aclose()
        await eventually(lambda: _running(slow) == 0, "none runs")
        conversation = await client.create_conversation()
        async for part in conversation.stream("b", SamplingParams(temperature=0, max_tokens=9000)):
            if part.text:
                break
        await eventually(lambda: _running(slow) == 0, "none runs")
        assert await conversation.items() == []


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_call_on_the_server(slow: Served) -> None:
    with Client(slow.url) as client:

        def interrupt() -> None:
            wait_until(lambda: _running(slow), "two requests run", lambda running: running == 2)
            signal.raise_signal(signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.generate(["a", "b"], _ENDLESS)
        thread.join()
        wait_until(lambda: _running(slow) == 0, "none runs")
        assert client.generate("after", SamplingParams(max_tokens=1))[0].finished


def test_closing_a_client_ends_what_it_has_under_way(slow: Served) -> None:
    client = Client(slow.url)
    ended: list[Exception] = []

    def work() -> None:
        try:
            client.generate("a", _ENDLESS)
        except caravan.ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    asyncio.run(eventually(lambda: _running(slow) == 1, "it runs"))
    client.close()
    thread.join()
    assert [str(error) for error in ended] == ["the client was closed before the call had ended"]
    asyncio.run(eventually(lambda: _running(slow) == 0, "none runs"))


def test_a_timeout_is_kept_by_the_server(slow: Served) -> None:
    params = replace(_ENDLESS, timeout=1.0)
    with Client(slow.url) as client:
        # Whether the first token comes in time depends on the machine.
        with suppress(ServerDeadlineError):
            (output,) = client.generate("a", params)
            assert output.outputs[0].finish_reason == "length"
            assert len(output.outputs[0].token_ids) < 9000
        with pytest.raises(ServerDeadlineError):
            for _ in client.stream("a", params):
                pass
