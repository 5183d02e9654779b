"""A client and the HTTP layer on a real port: errors in the middle, keys, thoughts, and responses under way."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

import caravan
from caravan import AsyncClient, SamplingParams
from caravan.client import (
    AbortedError,
    AuthenticationError,
    ContextLengthError,
    ConversationBusyError,
    NotFoundError,
    RateLimitError,
    ServerDeadlineError,
    ServerGenerationError,
    UnavailableError,
)
from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_scheduler.core.errors import DeadlineError, GenerationError
from caravan_scheduler.core.generation import GenerationSpec, Tenant
from caravan_testing.http_server import serving
from caravan_testing.scripted_engine import (
    EOS_TOKEN,
    TEMPLATE,
    WORD_MODEL,
    Pause,
    ScriptedEngine,
    Step,
    WordEngine,
    word,
)
from caravan_testing.waiting import eventually

_MESSAGES = [{"role": "user", "content": "Hi"}]


def _paused(_: GenerationSpec) -> Sequence[Step]:
    return [word("Hel", 310), Pause(), word("lo", 311), EOS_TOKEN]


async def test_a_call_that_is_cancelled_releases_everything() -> None:
    async with serving(ScriptedEngine(script=_paused, model=WORD_MODEL)) as service, AsyncClient(service.url) as client:
        calls = [asyncio.create_task(client.generate(["a", "b"])), asyncio.create_task(client.chat(_MESSAGES))]
        await eventually(lambda: sum(stream.sent for stream in service.engine.streams) == 3, "all are under way")
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await eventually(service.is_idle, "everything released")


async def test_a_stream_that_is_closed_releases_everything() -> None:
    async with serving(ScriptedEngine(script=_paused, model=WORD_MODEL)) as service, AsyncClient(service.url) as client:
        conversation = await client.create_conversation()
        for parts in (client.stream("a"), client.stream_chat(_MESSAGES), conversation.stream("a")):
            await anext(parts)
            await parts.aclose()
            await eventually(service.is_idle, "everything released")
        assert await conversation.items() == []


async def test_a_response_under_way_is_forked_and_keeps_others_out() -> None:
    async with serving(ScriptedEngine(script=_paused, model=WORD_MODEL)) as service, AsyncClient(service.url) as client:
        conversation = await client.create_conversation()
        parts = conversation.stream("Hi")
        begun = await anext(parts)
        assert (await anext(parts)).text == "Hel"
        fork = await conversation.fork(begun.response_id)
        assert [item["content"][0]["text"] for item in await fork.items()] == ["Hi", "Hel"]
        for call in (conversation.respond("Too"), conversation.rewind(turns=1), conversation.delete()):
            with pytest.raises(ConversationBusyError) as busy:
                await call
            assert busy.value.details.retry_after_s == 1.0
        service.engine.resume.set()
        rest = [part async for part in parts]
        assert rest[-1].response is not None
        assert (rest[-1].response.text, rest[-1].response.status) == ("Hello", "completed")
        assert await (await conversation.rewind(turns=1)).items() == []


async def test_a_busy_conversation_is_waited_for_if_asked() -> None:
    async with (
        serving(ScriptedEngine(script=_paused, model=WORD_MODEL)) as service,
        AsyncClient(service.url, retries=60) as client,
    ):
        conversation = await client.create_conversation()
        parts = conversation.stream("Hi")
        await anext(parts)
        waiting = asyncio.create_task(conversation.rewind(turns=1))
        service.engine.resume.set()
        async for _ in parts:
            pass
        await waiting
        assert await conversation.items() == []


async def test_a_generation_that_fails_says_so() -> None:
    def script(_: GenerationSpec) -> Sequence[Step]:
        return [word("a", 310), GenerationError("the shard was lost")]

    async with serving(ScriptedEngine(script=script, model=WORD_MODEL)) as service, AsyncClient(service.url) as client:
        conversation = await client.create_conversation()
        for call in (client.generate("p"), conversation.respond("p")):
            with pytest.raises(ServerGenerationError, match="the shard was lost") as failed:
                await call
            assert failed.value.details.status == 424
        for parts in (client.stream("p"), client.stream_chat(_MESSAGES), conversation.stream("p")):
            with pytest.raises(caravan.GenerationError, match="the shard was lost"):
                async for _ in parts:
                    pass
        assert await conversation.items() == []


async def test_a_deadline_that_passes_is_an_error_or_cuts_the_output() -> None:
    def script(_: GenerationSpec) -> Sequence[Step]:
        return [word("a", 310), DeadlineError("2 s")]

    async with serving(ScriptedEngine(script=script, model=WORD_MODEL)) as service, AsyncClient(service.url) as client:
        (output,) = await client.generate("p", SamplingParams(timeout=2.0))
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "length")
        conversation = await client.create_conversation()
        response = await conversation.respond("p", SamplingParams(timeout=2.0))
        assert (response.text, response.status, response.incomplete_reason) == ("a", "incomplete", "deadline_exceeded")
        for parts in (client.stream("p"), conversation.stream("p")):
            with pytest.raises(ServerDeadlineError) as late:
                async for _ in parts:
                    pass
            assert isinstance(late.value, TimeoutError)
        service.engine.script = lambda _: [DeadlineError("2 s")]
        with pytest.raises(ServerDeadlineError) as late:
            await client.generate("p")
        assert late.value.details.status == 504


async def test_an_aborted_request_says_so() -> None:
    async with serving(ScriptedEngine(script=_paused, model=WORD_MODEL)) as service, AsyncClient(service.url) as client:
        parts = client.stream("p")
        running = (await anext(parts)).request_id
        async with service.client.delete(f"/v1/requests/{running}") as aborted:
            assert aborted.status == 200
        with pytest.raises(AbortedError):
            await anext(parts)


async def test_a_server_without_a_shard_is_unavailable() -> None:
    async with serving(ScriptedEngine(joined=False)) as service, AsyncClient(service.url) as client:
        with pytest.raises(UnavailableError) as found:
            await client.generate("p")
        assert (found.value.details.status, found.value.details.retry_after_s) == (503, 1.0)


async def test_input_that_does_not_fit_says_so() -> None:
    async with serving(WordEngine()) as service, AsyncClient(service.url) as client:
        conversation = await client.create_conversation()
        with pytest.raises(ContextLengthError):
            await conversation.respond("x" * 600)
        with pytest.raises(caravan.ContextLengthError, match="context length is 512 tokens"):
            await client.generate("x" * 600)
        with pytest.raises(ContextLengthError, match=r"100 in the `prompt`|101 in the `prompt`"):
            await client.generate("x" * 100, caravan.SamplingParams(max_tokens=500))
        with pytest.raises(ContextLengthError, match="your messages resulted in"):
            await client.chat([{"role": "user", "content": "x" * 600}])
        parts = conversation.stream("x" * 600)
        # The stream begins before its input is read, since agents look for this error in an event.
        assert (await anext(parts)).response_id
        with pytest.raises(ContextLengthError):
            await anext(parts)


async def test_turns_that_do_not_fit_are_left_out_if_asked() -> None:
    async with serving(WordEngine()) as service, AsyncClient(service.url) as client:
        old = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y"}]
        conversation = await client.create_conversation(old)
        response = await conversation.respond("z" * 300, truncation="auto")
        assert response.left_out == [item["id"] for item in (await conversation.items())[:2]]


async def test_thoughts_are_apart_from_the_text() -> None:
    template = TEMPLATE + "{# </think> #}<think>\n"
    words = ("Hm", ".", "\n</think>\n\n", "A", ".")
    engine = WordEngine(words=words, model=replace(WORD_MODEL, chat_template=template))
    async with serving(engine) as service, AsyncClient(service.url) as client:
        (answer,) = await client.chat(_MESSAGES)
        assert (answer.outputs[0].reasoning, answer.outputs[0].text) == ("Hm.", "A.")
        parts = [part.outputs[0] async for part in client.stream_chat(_MESSAGES)]
        assert "".join(part.reasoning for part in parts) == "Hm."
        assert "".join(part.text for part in parts) == "A."
        conversation = await client.create_conversation()
        response = await conversation.respond("x", reasoning_budget_tokens=50)
        assert (response.reasoning, response.text) == ("Hm.", "A.")
        assert response.usage.reasoning_tokens == 3
        streamed = [part async for part in conversation.stream("x")]
        assert "".join(part.reasoning for part in streamed) == "Hm."
        assert "".join(part.text for part in streamed) == "A."


async def test_a_key_is_needed_where_the_server_has_keys() -> None:
    keys = [
        ApiKey(digest=digest_of("a"), tenant=Tenant(name="a"), requests_per_minute=1),
        ApiKey(digest=digest_of("b"), tenant=Tenant(name="b")),
    ]
    access = Access(keyring=Keyring(keys, time.monotonic()))
    async with (
        serving(WordEngine(), access=access) as service,
        AsyncClient(service.url) as nobody,
        AsyncClient(service.url, api_key="a") as a,
        AsyncClient(service.url, api_key="b") as b,
    ):
        with pytest.raises(AuthenticationError):
            await nobody.generate("p")
        conversation = await a.create_conversation()
        with pytest.raises(NotFoundError):
            await b.conversation(conversation.id)
        await a.generate("p")
        with pytest.raises(RateLimitError) as limited:
            await a.generate("p")
        assert (limited.value.details.retry_after_s or 0) > 1
