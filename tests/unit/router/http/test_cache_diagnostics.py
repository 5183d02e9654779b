"""Requests that are compared with an earlier one of their API key, in Anthropic's and in OpenAI's form."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_scheduler.core.generation import Tenant
from caravan_testing.http_server import Service, named_events, serving
from caravan_testing.scripted_engine import MODEL, ScriptedEngine, letters

TEMPLATE = (
    "{% if tools %}{% for t in tools %}<{{ t.function.name }}>{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
# 16 characters are a block of tokens.
LONG = "abcdefghijklmnop" * 4
TURNS = [
    {"role": "user", "content": LONG},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "And then? " + LONG},
]
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
KEYS = Keyring([ApiKey(digest=digest_of(name), tenant=Tenant(name=name)) for name in ("one", "two")], now=0.0)


@pytest.fixture
def engine() -> ScriptedEngine:
    model = replace(MODEL, chat_template=TEMPLATE, tool_template=TEMPLATE, max_sequence_tokens=4096)
    return ScriptedEngine(model=model, script=lambda _: letters("Yes so"))


@pytest.fixture
async def keyed(engine: ScriptedEngine) -> AsyncIterator[Service]:
    async with serving(engine, access=Access(keyring=KEYS)) as service:
        yield service


async def message(service: Service, previous: str | None, headers: dict[str, str] | None = None, **body: Any) -> Any:
    sent = {"messages": TURNS, "max_tokens": 3, "diagnostics": {"previous_message_id": previous}, **body}
    response = await service.post("/v1/messages", sent, **(headers or {}))
    assert response.status == 200, await response.text()
    return await response.json()


async def reason(service: Service, first: dict[str, Any], second: dict[str, Any]) -> Any:
    """Return what the second request is told when it is compared with the first."""
    before = await message(service, None, **first)
    assert before["diagnostics"] is None
    return (await message(service, before["id"], **second))["diagnostics"]


@pytest.mark.parametrize(
    ("first", "second", "kind", "index"),
    [
        ({}, {"messages": [{"role": "user", "content": "x" + LONG}, *TURNS[1:]]}, "messages_changed", 0),
        ({}, {"messages": [*TURNS[:2], {"role": "user", "content": "But then? " + LONG}]}, "messages_changed", 2),
        ({"system": "Be brief."}, {"system": "Be long."}, "system_changed", None),
        ({}, {"tools": [WEATHER]}, "tools_changed", None),
        ({}, {"tools": [WEATHER], "system": "Be brief."}, "system_changed", None),
    ],
)
async def test_the_part_of_a_message_request_that_has_changed(
    service: Service, first: dict[str, Any], second: dict[str, Any], kind: str, index: int | None
) -> None:
    told = (await reason(service, first, second))["cache_miss_reason"]
    assert (told["type"], told["first_difference"]["message"]) == (kind, index)
    prompts = [stream.spec.prompt for stream in service.engine.streams]
    common = next(at for at, (one, other) in enumerate(zip(*prompts, strict=False)) if one != other)
    assert told["first_difference"]["token"] == common - common % 16
    assert told["cache_missed_input_tokens"] == len(prompts[0]) - common + common % 16


@pytest.mark.parametrize(
    "second",
    [
        {},
        {"messages": [*TURNS, {"role": "assistant", "content": "so"}, {"role": "user", "content": "on"}]},
        # Another form of the same prompt.
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}, *TURNS[1:]]},
        {"system": "x-anthropic-billing-header: 2\nBe brief."},
        # Agents mark the ends of caches elsewhere in each turn.
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG, "cache_control": {}}]}, *TURNS[1:]]},
    ],
)
async def test_a_prompt_that_goes_on_is_told_so(service: Service, second: dict[str, Any]) -> None:
    first = {"system": "x-anthropic-billing-header: 1\nBe brief."} if "system" in second else {}
    assert await reason(service, first, second) is None


async def test_a_stream_begins_with_the_diagnostics(service: Service) -> None:
    before = await message(service, None)
    sent = {
        "messages": [{"role": "user", "content": "x" + LONG}],
        "max_tokens": 3,
        "stream": True,
        "diagnostics": {"previous_message_id": before["id"]},
    }
    begin = named_events(await (await service.post("/v1/messages", sent)).text())[0]
    assert begin["message"]["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"


async def test_requests_that_do_not_ask_are_not_remembered(service: Service) -> None:
    silent = await service.reply("/v1/messages", {"messages": TURNS, "max_tokens": 3})
    assert "diagnostics" not in silent
    told = (await message(service, silent["id"]))["diagnostics"]
    assert told == {"cache_miss_reason": {"type": "previous_message_not_found"}}


async def test_requests_of_other_keys_are_not_compared(keyed: Service) -> None:
    before = await message(keyed, None, {"Authorization": "Bearer one"})
    told = (await message(keyed, before["id"], {"Authorization": "Bearer two"}))["diagnostics"]
    assert told == {"cache_miss_reason": {"type": "previous_message_not_found"}}


async def test_another_salt_has_no_type_of_its_own(service: Service) -> None:
    told = await reason(service, {}, {"cache_salt": "s", "messages": [{"role": "user", "content": "x" + LONG}]})
    assert told["cache_miss_reason"]["type"] == "unavailable"


async def response(service: Service, compared: str | None, **body: Any) -> Any:
    sent = {"input": TURNS, "prompt_cache_options": {"comparison_response_id": compared}, "store": False, **body}
    return await service.reply("/v1/responses", sent)


@pytest.mark.parametrize(
    ("second", "expected", "item"),
    [
        ({}, "cache_hit", None),
        ({"input": [*TURNS, {"role": "user", "content": "on"}]}, "cache_hit", None),
        ({"input": [{"role": "user", "content": "x" + LONG}, *TURNS[1:]]}, "input_changed", 0),
        ({"instructions": "Be brief."}, "input_changed", None),
        ({"tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]}, "tools_changed", None),
        # The model's output does not match it, and its prompt is as before.
        ({"text": {"format": {"type": "json_object"}}}, "cache_hit", None),
    ],
)
async def test_what_has_changed_since_a_response(
    service: Service, second: dict[str, Any], expected: str, item: int | None
) -> None:
    before = await response(service, None)
    assert "prompt_cache_diagnostics" not in before
    told = (await response(service, before["id"], **second))["prompt_cache_diagnostics"]
    if expected == "cache_hit":
        assert told == {"type": "cache_hit"}
        return
    prompt = service.engine.streams[-1].spec.prompt
    assert (told["type"], told["reason"], told["first_difference"]["message"]) == ("cache_miss", expected, item)
    assert told["comparison_reusable_tokens"] == told["first_difference"]["token"]
    assert told["cache_missed_tokens"] == len(prompt) - told["comparison_reusable_tokens"]


async def test_an_unknown_response_is_not_found(service: Service) -> None:
    told = (await response(service, "resp_none"))["prompt_cache_diagnostics"]
    assert told == {"type": "comparison_response_not_found"}
