"""What a client makes of error answers, of replies that are none of Caravan's, and of connections that break."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import msgspec
import pytest

import caravan
from caravan import AsyncClient, SamplingParams
from caravan.client import (
    ApiError,
    AuthenticationError,
    BadReplyError,
    ConnectionLostError,
    ContextLengthError,
    ConversationBusyError,
    ForbiddenError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RateLimitError,
    ServerConnectionError,
    ServerGenerationError,
    UnavailableError,
    UnreachableError,
)
from caravan.client.errors import response_failure
from caravan_dialects.api.error_table import INTERNAL, TABLE
from caravan_dialects.api.errors import ErrorKind, KeyConcurrencyError, RateLimitedError
from caravan_dialects.api.openai.errors import openai_code, openai_status, openai_type

_Answer = Callable[[httpx2.Request], httpx2.Response]
_Handler = _Answer | Callable[[httpx2.Request], Coroutine[None, None, httpx2.Response]]
_URL = "http://caravan.test"
_CONVERSATION = {"id": "conv_1", "created_at": 1, "metadata": {}, "head": "h1"}
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}}
_NO_IDS = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
_EMPTY = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "system_fingerprint": "f", "choices": []}
_CHUNK = _EMPTY | {"choices": [_NO_IDS | {"token_ids": [1]}]}


def _client(handler: _Handler, url: str = _URL, **options: Any) -> AsyncClient:
    return AsyncClient(url, http=httpx2.AsyncClient(transport=httpx2.MockTransport(handler)), **options)


def _events(*events: object) -> httpx2.Response:
    data = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
    return httpx2.Response(200, content=data, headers={"Content-Type": "text/event-stream"})


async def _streamed(client: AsyncClient) -> None:
    async for _ in client.stream("p"):
        pass


async def _streamed_response(client: AsyncClient) -> None:
    conversation = await client.conversation("conv_1")
    async for _ in conversation.stream("p"):
        pass


_KINDS = sorted([*dict.fromkeys(TABLE.values()), INTERNAL], key=repr)


@pytest.mark.parametrize("kind", _KINDS)
async def test_every_kind_of_error_has_a_type(kind: ErrorKind) -> None:
    error = {"message": "No.", "type": openai_type(kind), "param": "stop", "code": openai_code(kind)}
    headers = {"X-Request-Id": "r-1", "Retry-After": "7"}

    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(openai_status(kind), json={"error": error}, headers=headers)

    async with _client(answer) as client:
        for call in (client.generate("p"), _streamed(client), client.conversation("c")):
            with pytest.raises(ApiError, match=r"^No\.$") as found:
                await call
            assert type(found.value) is not ApiError
            details = found.value.details
            assert (details.status, details.code, details.type) == (openai_status(kind), error["code"], error["type"])
            assert (details.param, details.request_id, details.retry_after_s) == ("stop", "r-1", 7.0)
            assert pickle.loads(pickle.dumps(found.value)).details == details
    # An error that ends a stream has no status, so that its code alone must be enough.
    assert type(response_failure(error["code"] or "", "No.", "r-1")) is not ApiError


def test_only_the_limits_of_a_key_have_openais_code() -> None:
    kinds = [kind for kind in TABLE.values() if openai_code(kind) == "rate_limit_exceeded"]
    assert kinds == [TABLE[RateLimitedError], TABLE[KeyConcurrencyError]]
    # Another kind of error, whose fields happen to be the same.
    assert openai_code(replace(TABLE[RateLimitedError])) == "overloaded"


@pytest.mark.parametrize(
    ("code", "kinds"),
    [
        ("validation", (InvalidRequestError, caravan.RequestError, ValueError)),
        ("context_length_exceeded", (ContextLengthError, InvalidRequestError, caravan.ContextLengthError)),
        ("deadline_exceeded", (caravan.DeadlineError, caravan.GenerationError, TimeoutError)),
        ("generation", (ServerGenerationError, caravan.GenerationError)),
        ("rate_limit_exceeded", (RateLimitError, OverloadedError)),
        ("conversation_busy", (ConversationBusyError,)),
        ("of_a_later_version", (InternalError,)),
    ],
)
async def test_errors_are_those_of_a_model_where_it_has_them(code: str, kinds: tuple[type[Exception], ...]) -> None:
    error = {"error": {"message": "No.", "type": "t", "param": None, "code": code}}
    async with _client(lambda _: httpx2.Response(500, json=error)) as client:
        with pytest.raises(caravan.CaravanError) as found:
            await client.generate("p")
    for kind in kinds:
        assert isinstance(found.value, kind)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (301, ApiError), (401, AuthenticationError), (403, ForbiddenError), (404, NotFoundError),
        (413, InvalidRequestError), (429, OverloadedError), (500, InternalError), (502, UnavailableError),
        (503, UnavailableError), (504, UnavailableError),
    ],
)  # fmt: skip
async def test_the_answer_of_a_proxy_has_the_type_of_its_status(status: int, kind: type[ApiError]) -> None:
    page = httpx2.Response(status, html="<h1>Sorry</h1>\n" + "x" * 1000, headers={"Retry-After": "Sun, 06 Nov 2094"})
    async with _client(lambda _: page) as client:
        with pytest.raises(ApiError, match=f"the server answered with status {status}: <h1>Sorry</h1> x+$") as found:
            await client.generate("p")
    assert type(found.value) is kind
    assert len(str(found.value)) < 300
    assert found.value.details.retry_after_s is None


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"<h1>Hello</h1>", {"Content-Type": "text/html"}),
        (b'{"choices": []}', {}),
        (b"[1]", {}),
        (msgspec.json.encode(_EMPTY), {}),
        (msgspec.json.encode(_CHUNK | {"choices": [_NO_IDS]}), {}),
        (b"\xff\x00", {}),
        (b"", {}),
        (b"no gzip", {"Content-Encoding": "gzip"}),
    ],
)
async def test_a_reply_that_is_none_of_caravans_is_named(content: bytes, headers: dict[str, str]) -> None:
    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, stream=httpx2.ByteStream(content), headers=headers)

    messages = [{"role": "user", "content": "x"}]
    async with _client(answer) as client:
        for call in (client.generate("p"), client.chat(messages), client.conversation("c"), _streamed(client)):
            with pytest.raises(BadReplyError):
                await call


@pytest.mark.parametrize("event", ["<h1>", "[1]", {"choices": 1}, {"error": "x"}, {}])
async def test_an_event_that_is_none_of_caravans_is_named(event: object) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json=_CONVERSATION) if request.method == "GET" else _events(event)

    async with _client(answer) as client:
        for call in (_streamed(client), _streamed_response(client)):
            with pytest.raises(BadReplyError):
                await call


async def test_an_error_in_a_stream_ends_it() -> None:
    error = {"error": {"message": "No.", "type": "server_error", "param": None, "code": "generation"}}
    async with _client(lambda _: _events(_CHUNK, error)) as client:
        parts = client.stream("p")
        assert (await anext(parts)).outputs[0].text == "a"
        with pytest.raises(ServerGenerationError) as found:
            await anext(parts)
    assert found.value.details.status is None


async def test_a_stream_without_its_end_is_lost() -> None:
    ended = _EMPTY | {"choices": [_NO_IDS | {"text": "", "finish_reason": "stop", "token_ids": [2]}]}
    for events in ((), (_CHUNK,), (_CHUNK, ended)):
        async with _client(lambda _: _events(*events)) as client:  # noqa: B023 - it is called here only
            with pytest.raises(ConnectionLostError, match="the stream ended before its last event"):
                await _streamed(client)
    async with _client(lambda _: _events(_CHUNK, ended, _EMPTY | {"usage": _USAGE})) as client:
        assert [part.finished async for part in client.stream("p")] == [False, True]


async def test_a_streamed_response_without_its_end_is_lost() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, json=_CONVERSATION)
        return _events({"type": "response.output_text.delta", "sequence_number": 0, "delta": "a"})

    async with _client(answer) as client:
        with pytest.raises(ConnectionLostError):
            await _streamed_response(client)


def _refusing(times: int, status: int, headers: dict[str, str]) -> tuple[_Answer, list[str]]:
    """Return a server that refuses so many calls, and the list of the paths that were called."""
    called: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        called.append(request.url.path)
        if len(called) <= times:
            return httpx2.Response(status, json={"error": {"message": "Later."}}, headers=headers)
        return httpx2.Response(200, json=_CONVERSATION)

    return answer, called


@pytest.mark.parametrize(
    ("retries", "status", "headers", "calls"),
    [
        (0, 429, {"Retry-After": "0"}, 1),
        (1, 429, {"Retry-After": "0"}, 2),
        (2, 503, {"Retry-After": "0"}, 3),
        (3, 409, {"Retry-After": "0.001"}, 3),
        (3, 429, {}, 1),
        (3, 503, {"Retry-After": "x"}, 1),
        (3, 500, {"Retry-After": "0"}, 1),
    ],
)
async def test_a_refused_call_is_sent_again_as_often_as_asked(
    retries: int, status: int, headers: dict[str, str], calls: int
) -> None:
    answer, called = _refusing(2, status, headers)
    async with _client(answer, retries=retries) as client:
        if calls == 3:
            assert (await client.conversation("c")).id == "conv_1"
        else:
            with pytest.raises(ApiError, match=r"Later\."):
                await client.conversation("c")
    assert called == ["/v1/conversations/c"] * calls


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx2.ConnectError("refused"), UnreachableError),
        (httpx2.ConnectTimeout("10 s"), UnreachableError),
        (httpx2.ReadError(""), ConnectionLostError),
        (httpx2.WriteError("broken pipe"), ConnectionLostError),
        (httpx2.RemoteProtocolError("peer closed"), ConnectionLostError),
    ],
)
async def test_a_connection_that_fails_is_named_and_never_repeated(
    error: Exception, kind: type[ServerConnectionError]
) -> None:
    calls = 0

    def answer(_: httpx2.Request) -> httpx2.Response:
        nonlocal calls
        calls += 1
        raise error

    async with _client(answer, retries=5) as client:
        with pytest.raises(kind, match=_URL) as found:
            await client.generate("p")
    assert calls == 1
    assert isinstance(found.value, ConnectionError)


async def test_the_first_error_of_a_list_ends_the_rest() -> None:
    waiting = asyncio.Event()
    ended: list[str] = []

    async def answer(request: httpx2.Request) -> httpx2.Response:
        if b'"bad"' in request.content:
            await waiting.wait()
            return httpx2.Response(400, json={"error": {"message": "No.", "code": "validation"}})
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            ended.append("good")
        raise AssertionError

    async with _client(answer) as client:
        with pytest.raises(InvalidRequestError):
            await client.generate(["good", "bad"])
    assert ended == ["good"]


async def test_no_more_prompts_than_asked_are_on_the_server_at_a_time() -> None:
    running, most = 0, 0

    async def answer(_: httpx2.Request) -> httpx2.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        choice = _NO_IDS | {"finish_reason": "stop", "token_ids": [1], "prompt_token_ids": [1]}
        return httpx2.Response(200, json=_EMPTY | {"choices": [choice]})

    async with _client(answer, parallel=3) as client:
        assert len(await client.generate(["p"] * 20)) == 20
    assert most == 3


async def test_requests_carry_the_key_the_model_and_the_head() -> None:
    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200, json=_CONVERSATION)

    async with _client(answer, f"{_URL}/base/", api_key="k", model="m") as client:
        conversation = await client.create_conversation()
        await conversation.rewind(turns=1, if_match=conversation.head)
        with pytest.raises(BadReplyError):
            await client.generate("p", SamplingParams(priority=3, timeout=9.5))
        for options in ({}, {"model": "n"}):
            with pytest.raises(BadReplyError):
                await conversation.respond("q", **options)  # type: ignore[arg-type]
    assert [request.headers["authorization"] for request in seen] == ["Bearer k"] * 5
    assert [request.url.path for request in seen][:2] == [
        "/base/v1/conversations",
        "/base/v1/conversations/conv_1/rewind",
    ]
    assert seen[1].headers["if-match"] == '"h1"'
    assert msgspec.json.decode(seen[2].content) == {
        "prompt": "p", "max_tokens": 16, "priority": 3, "timeout": 9.5, "model": "m", "return_token_ids": True
    }  # fmt: skip
    asked = {"conversation": "conv_1", "input": "q"}
    assert msgspec.json.decode(seen[3].content) == asked | {"model": "m"}
    assert msgspec.json.decode(seen[4].content) == asked | {"model": "n"}


_Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def _server(*parts: bytes) -> AsyncIterator[str]:
    """Serve each connection ``parts`` once its request has begun, and close it; yield the URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def test_a_server_that_stops_midway_is_lost() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    event = b"data: " + msgspec.json.encode(_CHUNK) + b"\n\n"
    whole = b"%x\r\n%s\r\n" % (len(event), event)
    async with _server(head, whole, whole[:40]) as url, AsyncClient(url) as client:
        parts = client.stream("p")
        assert (await anext(parts)).outputs[0].text == "a"
        with pytest.raises(ConnectionLostError, match=f"the connection to {url} broke: "):
            await anext(parts)
    for reply in (b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b"SSH-2.0-OpenSSH\r\n\r\n"):
        async with _server(reply) as url, AsyncClient(url) as client:
            with pytest.raises(ConnectionLostError):
                await client.generate("p")


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    async with _server() as url:
        pass
    async with AsyncClient(url) as client:
        with pytest.raises(UnreachableError, match=f"{url} cannot be reached: "):
            await client.generate("p")
