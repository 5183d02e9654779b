"""The unmodified clients of Hugging Face and OpenAI. They run in threads, since they block."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError

from caravan_dialects.api.limits import Limits
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import EOS_TOKEN, Pause, ScriptedEngine, word
from caravan_testing.waiting import DEADLINE_S


@pytest.fixture
def hub(service: Service) -> InferenceClient:
    return InferenceClient(model=service.url, timeout=DEADLINE_S)


@pytest.fixture
def openai_client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


async def test_hub_text(hub: InferenceClient) -> None:
    assert await asyncio.to_thread(hub.text_generation, "hi", max_new_tokens=3) == " w1 w2 w3"


async def test_hub_details(hub: InferenceClient) -> None:
    output: Any = await asyncio.to_thread(
        hub.text_generation, "hi", details=True, max_new_tokens=2, top_n_tokens=1, do_sample=True, seed=7
    )
    assert output.generated_text == " w1 w2"
    assert (output.details.finish_reason, output.details.seed) == ("length", 7)
    assert [token.text for token in output.details.tokens] == [" w1", " w2"]
    assert len(output.details.top_tokens) == 2


async def test_hub_stream(hub: InferenceClient, service: Service) -> None:
    service.engine.script = lambda _: [word("a"), word("b"), EOS_TOKEN]

    def read() -> list[str]:
        return list(hub.text_generation("hi", stream=True))

    # As in TGI, a control token is an event; this client returns the texts of all events.
    assert await asyncio.to_thread(read) == ["a", "b", "</s>"]


async def test_hub_stream_with_details(hub: InferenceClient) -> None:
    def read() -> list[Any]:
        return list(hub.text_generation("hi", stream=True, details=True, max_new_tokens=2, return_full_text=True))

    first, last = await asyncio.to_thread(read)
    assert (first.index, first.token.text, first.details) == (1, " w1", None)
    assert last.generated_text == "hi w1 w2"
    assert last.details.input_length == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_hub_raises_a_validation_error(hub: InferenceClient, stream: bool) -> None:
    def ask() -> None:
        list(hub.text_generation("hi", temperature=-1.0, stream=stream))

    with pytest.raises(ValidationError, match="temperature"):
        await asyncio.to_thread(ask)


@pytest.mark.parametrize("stream", [False, True])
async def test_hub_raises_an_overload_error(stream: bool) -> None:
    engine = ScriptedEngine(script=lambda _: [Pause()])
    async with serving(engine, Limits(max_concurrent_requests=0)) as service:
        hub = InferenceClient(model=service.url, timeout=DEADLINE_S)
        with pytest.raises(OverloadedError):
            await asyncio.to_thread(lambda: list(hub.text_generation("hi", stream=stream)))


async def test_openai_completion(openai_client: openai.OpenAI) -> None:
    reply = await asyncio.to_thread(
        openai_client.completions.create, model="any", prompt=["a", "b"], max_tokens=2, logprobs=1, stop="zz"
    )
    assert [(choice.index, choice.text, choice.finish_reason) for choice in reply.choices] == [
        (0, " w1 w2", "length"),
        (1, " w1 w2", "length"),
    ]
    assert reply.usage is not None
    assert reply.usage.total_tokens == 8
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.tokens == [" w1", " w2"]


async def test_openai_stream(openai_client: openai.OpenAI) -> None:
    def read() -> list[Any]:
        options: Any = {"include_usage": True}
        return list(
            openai_client.completions.create(
                model="any", prompt="a", max_tokens=2, stream=True, stream_options=options, extra_body={"min_p": 0.1}
            )
        )

    first, second, usage = await asyncio.to_thread(read)
    assert first.choices[0].text + second.choices[0].text == " w1 w2"
    assert second.choices[0].finish_reason == "length"
    assert usage.usage.completion_tokens == 2


async def test_openai_errors(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="`top_p` must be") as caught:
        await asyncio.to_thread(openai_client.completions.create, model="any", prompt="a", top_p=2)
    assert caught.value.param == "top_p"


async def test_openai_models(openai_client: openai.OpenAI) -> None:
    models = await asyncio.to_thread(lambda: list(openai_client.models.list()))
    assert [model.id for model in models] == ["scripted", "pirate"]
