"""Responses that only compute their prompt."""

from typing import Any

import pytest

from caravan_testing.http_server import Service, named_events
from caravan_testing.scripted_engine import WordEngine, prompt_text

RESPONSES = "/v1/responses"
WAYS = ({"generate": False}, {"prompt_cache_options": {"prewarm": True, "ttl": "30m"}, "generate": True})


@pytest.fixture
def engine() -> WordEngine:
    return WordEngine()


@pytest.mark.parametrize("way", WAYS)
async def test_the_prompt_is_computed_and_nothing_generated(service: Service, way: dict[str, Any]) -> None:
    body = {"input": "Hi", "instructions": "A", "max_output_tokens": 50, **way}
    reply = await service.reply(RESPONSES, body)
    assert (reply["status"], reply["incomplete_details"], reply["output"]) == ("completed", None, [])
    assert (reply["usage"]["output_tokens"], reply["usage"]["input_tokens"]) == (0, len(service.engine.spec.prompt))
    assert service.engine.spec.stopping.max_new_tokens == 1
    response = await service.post(RESPONSES, body | {"stream": True})
    events = named_events(await response.text())
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
    assert events[-1]["response"]["output"] == []
    # What follows has the prompt that was computed.
    prompt = service.engine.spec.prompt
    del body["generate" if "prompt_cache_options" not in way else "prompt_cache_options"]
    reply = await service.reply(RESPONSES, body)
    assert service.engine.spec.prompt == prompt
    assert reply["output"][0]["content"][0]["text"] == "Hello you"


async def test_what_was_prepared_can_be_continued(service: Service) -> None:
    first = await service.reply(RESPONSES, {"input": "Hi", "generate": False})
    async with service.client.get(f"{RESPONSES}/{first['id']}") as stored:
        assert await stored.json() == first
    await service.reply(RESPONSES, {"input": "More", "previous_response_id": first["id"]})
    assert prompt_text(service.engine) == "[user]Hi</s>[user]More</s>[assistant]"


@pytest.mark.parametrize("neutral", [{"generate": True}, {"prompt_cache_options": {"prewarm": False}}, {}])
async def test_others_generate(service: Service, neutral: dict[str, Any]) -> None:
    assert (await service.reply(RESPONSES, {"input": "Hi", **neutral}))["output"]
