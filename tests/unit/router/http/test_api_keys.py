"""API keys: routes that need one, and the limits of each key."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import openai
import pytest

from caravan_dialects.api.error_table import REASON_HEADER
from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_proto.messages.model import TokenizedText
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_router.http.routes import ROUTES
from caravan_scheduler.core.engine import TEXT_SENDER, TextSender
from caravan_scheduler.core.generation import Tenant
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import Pause, ScriptedEngine
from caravan_testing.waiting import eventually

ALICE = ApiKey(digest=digest_of("a-key"), tenant=Tenant(name="alice", weight=2.0), max_priority=5)
BOB = ApiKey(digest=digest_of("b-key"), tenant=Tenant(name="bob"), requests_per_minute=2, concurrent_requests=2)
LOW = ApiKey(digest=digest_of("l-key"), tenant=Tenant(name="low"), max_priority=-10)

AS_ALICE, AS_BOB, AS_LOW = "Bearer a-key", "Bearer b-key", "Bearer l-key"


@pytest.fixture
async def locked(engine: ScriptedEngine) -> AsyncIterator[Service]:
    keyring = Keyring([ALICE, BOB, LOW], time.monotonic())
    async with serving(engine, access=Access(keyring=keyring)) as running:
        yield running
        assert running.is_idle()
        client = keyring.find("b-key")
        assert client is not None
        assert client.permits.free == 2


async def test_only_health_metrics_documents_and_the_page_need_no_key(locked: Service) -> None:
    for route in ROUTES:
        # Some have bodies that are still on their way.
        async with locked.client.request(route.method, route.path) as response:
            status = response.status
        if route.path.startswith("/page/"):
            assert status == 404
            continue
        is_open = (route.method, route.path) in {
            *(("HEAD", path) for path in ("/", "/health")),
            *(("GET", path) for path in ("/", "/health", "/v1/health", "/ping", "/livez", "/readyz", "/metrics")),
            *(("GET", path) for path in ("/docs", "/openapi.json", "/api-doc/openapi.json")),
        }  # fmt: skip
        assert status == (200 if is_open else 401), route.path


async def test_anthropics_clients_send_the_key_in_a_header_of_their_own(locked: Service) -> None:
    for headers, status in (
        ({"x-api-key": "a-key"}, 200),
        ({"x-api-key": " "}, 401),
        ({"x-api-key": "nope"}, 401),
        ({"x-api-key": "a-key", "Authorization": "Basic YTpi"}, 200),
        ({"x-api-key": "a-key", "Authorization": "Bearer nope"}, 401),
        ({"x-api-key": "nope", "Authorization": AS_ALICE}, 200),
    ):
        assert (await locked.client.get("/v1/models", headers=headers)).status == status
    response = await locked.client.post("/v1/messages", json={}, headers={"x-api-key": "nope"})
    assert (response.status, (await response.json())["error"]["type"]) == (401, "authentication_error")


async def test_an_unknown_route_is_404_only_with_a_key(locked: Service) -> None:
    assert (await locked.client.get("/nope")).status == 401
    assert (await locked.client.get("/nope", headers={"Authorization": AS_ALICE})).status == 404


@pytest.mark.parametrize(
    ("authorization", "challenge", "message"),
    [
        (None, "Bearer", "An API key is needed here: send it as `Authorization: Bearer KEY`"),
        ("Basic YTpi", "Bearer", "An API key is needed here: send it as `Authorization: Bearer KEY`"),
        ("Bearer ", "Bearer", "An API key is needed here: send it as `Authorization: Bearer KEY`"),
        ("Bearer nope", 'Bearer error="invalid_token"', "Incorrect API key provided"),
        ("Bearer é", 'Bearer error="invalid_token"', "Incorrect API key provided"),
    ],
)
async def test_a_401_has_the_error_format_of_the_route(
    locked: Service, authorization: str | None, challenge: str, message: str
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    response = await locked.post("/generate_stream", {"inputs": ""}, **headers)
    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == challenge
    assert await response.json() == {"error": message, "error_type": "invalid_api_key"}
    response = await locked.post("/v1/completions", {}, **headers)
    assert response.status == 401
    assert (await response.json())["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


async def test_cors_preflight_requests_need_no_key(locked: Service) -> None:
    names = "authorization,content-type,x-stainless-lang"
    headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    for requested, allowed in ((names, names), ("naïve", "")):
        response = await locked.client.options(
            "/v1/completions", headers=headers | {"Access-Control-Request-Headers": requested}
        )
        assert response.status == 200
        assert response.headers["Access-Control-Allow-Headers"] == allowed


async def test_openais_client_sends_its_key(locked: Service) -> None:
    connect = partial(openai.OpenAI, base_url=f"{locked.url}/v1", max_retries=0)
    # The constructor reads files, which would block the loop.
    with await asyncio.to_thread(connect, api_key="a-key") as client:
        reply = await asyncio.to_thread(client.completions.create, model="any", prompt="a", n=2, max_tokens=1)
        assert len(reply.choices) == 2
    with await asyncio.to_thread(connect, api_key="nope") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await asyncio.to_thread(client.completions.create, model="any", prompt="a")
        assert caught.value.code == "invalid_api_key"


async def test_the_key_sets_tenant_and_namespace(locked: Service) -> None:
    await locked.post("/generate", {"inputs": "a", "cache_salt": "s"}, Authorization="bearer a-key")
    spec = locked.engine.spec
    assert (spec.tenant, spec.namespace) == (Tenant(name="alice", weight=2.0), "alice\0s")
    await locked.post("/generate", {"inputs": "a"}, Authorization=AS_BOB)
    assert locked.engine.spec.namespace == "bob\0"


async def test_priority_is_bounded_by_the_key(locked: Service) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert (await locked.post("/v1/completions", body | {"priority": 5}, Authorization=AS_ALICE)).status == 200
    assert locked.engine.spec.priority == 5
    response = await locked.post("/v1/completions", body | {"priority": 6}, Authorization=AS_ALICE)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "priority")
    assert error["message"].endswith("`priority` may be at most 5 with this API key. Given: 6")
    response = await locked.post("/v1/completions", body, Authorization=AS_BOB, X_Priority="1")
    assert "`X-Priority` may be at most 0 with this API key. Given: 1" in await response.text()


@pytest.mark.parametrize(
    ("tier", "alice", "low"),
    [("flex", -10, -10), ("default", 0, -10), ("auto", 0, -10), ("priority", 5, -10), ("ultrafast", 5, -10)],
)
async def test_a_tier_is_a_priority_that_the_key_may_have(locked: Service, tier: str, alice: int, low: int) -> None:
    body = {"prompt": "a", "max_tokens": 1, "service_tier": tier}
    for key, priority in ((AS_ALICE, alice), (AS_LOW, low)):
        assert (await locked.post("/v1/completions", body, Authorization=key)).status == 200
        assert locked.engine.spec.priority == priority
    await locked.post("/v1/completions", body | {"priority": -20}, Authorization=AS_ALICE)
    assert locked.engine.spec.priority == -20


async def test_without_a_priority_a_low_key_gets_its_maximum(locked: Service) -> None:
    await locked.post("/generate", {"inputs": "a"}, Authorization=AS_LOW)
    assert locked.engine.spec.priority == -10


ONE_TOKEN = {"inputs": "a", "parameters": {"max_new_tokens": 1}}


async def test_requests_over_the_rate_of_a_key_are_refused_with_retry_after(locked: Service) -> None:
    assert (await locked.post("/tokenize", {"inputs": "a"}, Authorization=AS_BOB)).status == 200
    assert (await locked.post("/generate", ONE_TOKEN, Authorization=AS_BOB)).status == 200
    response = await locked.post("/generate_stream", ONE_TOKEN, Authorization=AS_BOB)
    assert (response.status, response.headers["Retry-After"]) == (429, "30")
    assert response.headers[REASON_HEADER] == "rate_limited"
    assert await response.json() == {
        "error": "This API key may make 2 requests per minute. Try again in 30 s",
        "error_type": "overloaded",
    }
    response = await locked.post("/v1/completions", {"prompt": "a"}, Authorization=AS_BOB)
    error = (await response.json())["error"]
    assert (response.status, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert (await locked.post("/tokenize", {"inputs": "a"}, Authorization=AS_BOB)).status == 429
    assert (await locked.post("/detokenize", {"tokens": [200]}, Authorization=AS_BOB)).status == 429
    assert await locked.sample('tgi_request_failure{err="rate_limited"}') == 2
    # Other keys are not limited, and routes that compute nothing do not count.
    assert (await locked.post("/generate", ONE_TOKEN, Authorization=AS_ALICE)).status == 200
    assert (await locked.client.get("/v1/models", headers={"Authorization": AS_BOB})).status == 200


async def test_running_generations_are_limited_by_key(locked: Service) -> None:
    engine = locked.engine
    engine.script = lambda _: [Pause()]
    body: dict[str, Any] = {"prompt": "a", "n": 2, "stream": True}
    first = await locked.post("/v1/completions", body, Authorization=AS_BOB)
    assert first.status == 200
    response = await locked.post("/v1/completions", {"prompt": "a"}, Authorization=AS_BOB)
    assert (response.status, response.headers["Retry-After"]) == (429, "1")
    error = (await response.json())["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert error["message"] == "This API key may run 2 generations at a time. This request needs 1, and fewer are free"
    second = await locked.post("/v1/completions", body, Authorization=AS_ALICE)
    assert second.status == 200
    assert locked.free_permits == locked.limits.max_concurrent_requests - 4
    for response in (first, second):
        response.close()
    await eventually(locked.is_idle)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": "a"}),
        ("/detokenize", {"tokens": [200]}),
        ("/chat_tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses/input_tokens", {"model": "m", "input": "a"}),
    ],
)
async def test_requests_that_only_tokenize_count_as_running(locked: Service, path: str, body: dict[str, Any]) -> None:
    locked.engine.script = lambda _: [Pause()]
    running = await locked.post("/v1/completions", {"prompt": "a", "n": 2, "stream": True}, Authorization=AS_BOB)
    assert running.status == 200
    response = await locked.post(path, body, Authorization=AS_BOB)
    assert response.status == 429, await response.text()
    assert "2 generations at a time" in await response.text()
    assert (await locked.post("/tokenize", {"inputs": "a"}, Authorization=AS_ALICE)).status == 200
    running.close()
    await eventually(locked.is_idle)


async def test_texts_are_tokenized_for_their_key(locked: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    senders: list[str] = []
    tokenize = ScriptedEngine.tokenize

    async def noting(engine: ScriptedEngine, text: str, **options: bool) -> TokenizedText:
        senders.append(TEXT_SENDER.get().tenant.name)
        return await tokenize(engine, text, **options)

    monkeypatch.setattr(ScriptedEngine, "tokenize", noting)
    # One client, whose requests share a connection.
    for key in (AS_ALICE, AS_BOB, AS_ALICE):
        assert (await locked.post("/tokenize", {"inputs": "a"}, Authorization=key)).status == 200
    assert (await locked.post("/generate", ONE_TOKEN, Authorization=AS_BOB)).status == 200
    assert senders == ["alice", "bob", "alice", "bob"]


async def test_the_access_log_names_the_key(locked: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="caravan.access"):
        await locked.client.get("/v1/models", headers={"Authorization": AS_ALICE})
    [record] = [record for record in caplog.records if record.name == "caravan.access"]
    assert record.__dict__["key"] == "alice"
    assert "a-key" not in caplog.text


async def test_texts_are_embedded_for_the_key_and_with_its_priority(locked: Service) -> None:
    for headers, status in (
        ({"Authorization": AS_ALICE, "X_Priority": "5"}, 200),
        ({"Authorization": AS_ALICE, "X_Priority": "6"}, 400),
        ({"Authorization": AS_LOW}, 200),
    ):
        assert (await locked.post("/v1/embeddings", {"input": "a"}, **headers)).status == status
    assert locked.engine.text_senders == [
        TextSender(tenant=ALICE.tenant, priority=5),
        TextSender(tenant=LOW.tenant, priority=-10),
    ]
