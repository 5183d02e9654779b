"""Which session a request belongs to: by our own field, agents' headers, other fields, or what it continues."""

import json
import math
from collections.abc import AsyncIterator
from ipaddress import ip_network
from typing import Any

import pytest

from caravan_router.http.app import Access
from caravan_scheduler.core.generation import shown_session
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ID = "0199a213-81c0-7800-8aa1-bbab2a035a53"
# In the order in which they count.
HEADERS = [
    "X-Claude-Code-Session-Id",
    "X-Session-Affinity",
    "X-Session-Id",
    "Session-Id",
    "Session_id",
    "Thread-Id",
]
TURN = {"input": "a", "max_output_tokens": 1}
FAIRNESS = "x-llm-d-inference-fairness-id"


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving(ScriptedEngine(model=CHAT_MODEL)) as running:
        yield running


async def session_of(service: Service, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    count = len(service.engine.streams)
    async with service.client.post(path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()
    (session,) = {stream.spec.session for stream in service.engine.streams[count:]}
    return session


async def test_the_first_that_names_a_session_counts(service: Service) -> None:
    for first in range(len(HEADERS)):
        headers = {name: name for name in HEADERS[first:]}
        assert await session_of(service, CHAT, {"messages": HI, "prompt_cache_key": "key"}, headers) == HEADERS[first]
    everything = {"messages": HI, "prompt_cache_key": "key", "session_id": "own"}
    assert await session_of(service, CHAT, everything, {name: name for name in HEADERS}) == "own"
    assert await session_of(service, CHAT, {"messages": HI, "prompt_cache_key": "key"}) == "key"
    assert await session_of(service, CHAT, {"messages": HI}) == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "a"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/completion", {"prompt": "a", "n_predict": 1}),
        ("/api/chat", {"model": "m", "messages": HI, "stream": False}),
        ("/api/generate", {"model": "m", "prompt": "hi", "stream": False}),
        ("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "a"}]}]}),
        (MESSAGES, {"messages": HI, "max_tokens": 1}),
        (RESPONSES, TURN),
        ("/vertex", {"instances": [{"inputs": "a", "session_id": "own"}]}),
    ],
)
async def test_every_body_and_every_route_can_name_a_session(service: Service, path: str, body: dict[str, Any]) -> None:
    given = body if path == "/vertex" else body | {"session_id": "own"}
    assert await session_of(service, path, given, {"X-Session-Id": "header"}) == "own"
    if path != "/vertex":
        assert await session_of(service, path, body, {"X-Session-Id": "header"}) == "header"


@pytest.mark.parametrize(
    ("metadata", "session"),
    [
        ({"user_id": json.dumps({"device_id": "d", "session_id": ID})}, ID),
        ({"user_id": f"user_0a1b_account__session_{ID}"}, ID),
        ({"user_id": "somebody"}, ""),
        ({"user_id": json.dumps({"device_id": "d"})}, ""),
        ({"user_id": json.dumps({"session_id": 7})}, ""),
        ({"user_id": "{"}, ""),
        ({"user_id": 7}, ""),
        ("text", ""),
        (None, ""),
    ],
)
async def test_claude_code_names_its_session_in_the_id_of_the_user(
    service: Service, metadata: Any, session: str
) -> None:
    body = {"messages": HI, "max_tokens": 3, "metadata": metadata}
    assert await session_of(service, MESSAGES, body) == session
    assert await session_of(service, MESSAGES, body, {"X-Session-Id": "header"}) == "header"


async def test_turns_of_a_conversation_and_of_a_chain_of_responses_are_sessions(service: Service) -> None:
    conversation = (await service.reply("/v1/conversations", {}))["id"]
    assert await session_of(service, RESPONSES, TURN | {"conversation": conversation}) == conversation
    by_key = TURN | {"conversation": conversation, "prompt_cache_key": "key"}
    assert await session_of(service, RESPONSES, by_key) == "key"
    first = last = (await service.reply(RESPONSES, TURN))["id"]
    for _ in range(2):
        body = TURN | {"previous_response_id": last}
        assert await session_of(service, RESPONSES, body) == first
        last = (await service.reply(RESPONSES, body))["id"]


@pytest.mark.parametrize(
    ("given", "said"),
    [("", "0"), ("x" * 257, "257"), ("a\nsecret", "8, not all printable"), ("a\x00", "2, not all printable")],
    ids=["empty", "long", "lines", "control"],
)
async def test_our_own_field_is_checked_and_what_others_send_is_ignored_if_it_names_no_session(
    service: Service, given: str, said: str
) -> None:
    for path, body in ((CHAT, {"messages": HI}), ("/generate", {"inputs": "a"})):
        async with service.client.post(path, json=body | {"session_id": given}) as response:
            text = await response.text()
            assert response.status in {400, 422}
            assert f"`session_id` must have 1 to 256 printable characters. Given: {said}" in text
            assert "secret" not in text, "an id may be one"
    keyed = {"messages": HI, "prompt_cache_key": given}
    assert await session_of(service, CHAT, keyed) == ""
    if given.isprintable():
        headers = {"X-Session-Affinity": given, "X-Session-Id": "other"}
        assert await session_of(service, CHAT, keyed, headers) == "other"


async def test_only_a_trusted_gateway_says_for_whom_a_request_is() -> None:
    body, headers = {"messages": HI, "session_id": "own"}, {FAIRNESS: "team"}
    for network, session in (("127.0.0.0/8", "team"), ("10.0.0.0/8", "own"), ("::1/128", "own")):
        access = Access(trusted_proxies=(ip_network(network),))
        async with serving(ScriptedEngine(model=CHAT_MODEL), access=access) as service:
            assert await session_of(service, CHAT, body, headers) == session
            assert await session_of(service, CHAT, body, {FAIRNESS: "x" * 300}) == "own"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("1500ms", 1.5),
        ("1h2m3.5s", 3723.5),
        ("250us", 0.00025),
        ("0s", math.inf),
        ("-1s", math.inf),
        ("1.5", math.inf),
        ("soon", math.inf),
        ("9" * 300 + "s", math.inf),
    ],
)
async def test_a_trusted_gateway_limits_the_time_in_the_queue(given: str, seconds: float) -> None:
    for network, expected in (("127.0.0.0/8", seconds), ("10.0.0.0/8", math.inf)):
        async with serving(
            ScriptedEngine(model=CHAT_MODEL), access=Access(trusted_proxies=(ip_network(network),))
        ) as service:
            response = await service.post(CHAT, {"messages": HI}, x_llm_d_inference_ttl=given)
            assert response.status == 200
            assert service.engine.spec.queue_timeout_s == pytest.approx(expected)


def test_long_ids_are_shown_in_part() -> None:
    assert [shown_session(text) for text in ("", "chat-1", ID)] == ["", "chat-1", "0199…035a53"]
