"""How long a prompt is to be kept, as each dialect says it."""

from typing import Any

import pytest

from caravan_testing.http_server import Service
from caravan_testing.scripted_engine import WordEngine

MINUTE, HOUR = 60.0, 3600.0
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 2},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
}
EPHEMERAL, AN_HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
RESULT = {
    "type": "tool_result",
    "tool_use_id": "t",
    "content": [{"type": "text", "text": "r", "cache_control": AN_HOUR}],
}


@pytest.fixture
def engine() -> WordEngine:
    return WordEngine()


def turn(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "Hi", **fields}]}]


@pytest.mark.parametrize(
    ("path", "fields", "keep_s"),
    [
        *((path, {}, 0.0) for path in BODIES),
        *((path, {"prompt_cache_retention": "24h"}, 24 * HOUR) for path in (CHAT, COMPLETIONS, RESPONSES)),
        *((path, {"prompt_cache_options": {"ttl": "30m"}}, 30 * MINUTE) for path in (CHAT, RESPONSES)),
        (CHAT, {"prompt_cache_retention": "in_memory"}, 5 * MINUTE),
        (CHAT, {"prompt_cache_retention": None, "prompt_cache_options": {"mode": "implicit"}}, 0.0),
        (RESPONSES, {"prompt_cache_options": {"ttl": "12h"}, "prompt_cache_retention": "in_memory"}, 12 * HOUR),
        (MESSAGES, {"cache_control": EPHEMERAL}, 5 * MINUTE),
        (MESSAGES, {"cache_control": None, "system": [{"type": "text", "text": "A", "cache_control": AN_HOUR}]}, HOUR),
        (MESSAGES, {"messages": turn(cache_control=EPHEMERAL), "system": "A"}, 5 * MINUTE),
        (MESSAGES, {"messages": turn(cache_control=EPHEMERAL), "cache_control": AN_HOUR}, HOUR),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}, "cache_control": EPHEMERAL}]}, 5 * MINUTE),
        (MESSAGES, {"messages": [
            *turn(),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [RESULT]}]}, HOUR),
    ],
)  # fmt: skip
async def test_the_longest_lifetime_of_a_body_counts(
    service: Service, path: str, fields: dict[str, Any], keep_s: float
) -> None:
    await service.reply(path, BODIES[path] | fields)
    assert service.engine.spec.keep_s == keep_s


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"prompt_cache_retention": "1w"}, "prompt_cache_retention"),
        (RESPONSES, {"prompt_cache_options": {"ttl": "1w"}}, "prompt_cache_options.ttl"),
        (MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "24h"}}, "cache_control.ttl"),
        (MESSAGES, {"messages": turn(cache_control={"type": "for ever"})}, "cache_control.type"),
    ],
)
async def test_others_are_refused_by_name(service: Service, path: str, fields: dict[str, Any], name: str) -> None:
    response = await service.post(path, BODIES[path] | fields)
    assert response.status == 400
    assert name in await response.text()
