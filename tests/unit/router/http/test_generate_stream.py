from typing import Any, cast

import pytest
from aiohttp import ClientPayloadError

from caravan_scheduler.core.errors import GenerationError
from caravan_testing.http_server import Service, events
from caravan_testing.scripted_engine import EOS_TOKEN, word

GOLDEN = (
    'data: {"index":1,"token":{"id":11,"text":" w1","logprob":-0.5,"special":false},"generated_text":null,'
    '"details":null}\n\n'
    'data: {"index":2,"token":{"id":12,"text":" w2","logprob":-0.5,"special":false},"generated_text":" w1 w2",'
    '"details":{"finish_reason":"length","generated_tokens":2,"seed":null,"input_length":3,"cached_tokens":2}}\n\n'
)


@pytest.mark.parametrize("path", ["/", "/generate_stream"])
async def test_a_stream_byte_by_byte(service: Service, path: str) -> None:
    service.engine.cached_tokens = lambda _: 2
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 2, "details": True}}
    response = await service.post(path, body | ({"stream": True} if path == "/" else {}))
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/event-stream"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert response.headers["x-compute-characters"] == "2"
    assert "x-compute-type" in response.headers
    assert await response.text() == GOLDEN


async def test_details_are_null_by_default(service: Service) -> None:
    response = await service.post("/generate_stream", {"inputs": "hi", "parameters": {"max_new_tokens": 1}})
    [event] = events(await response.text())
    assert event["details"] is None
    assert event["generated_text"] == " w1"


async def test_line_breaks_in_text_cannot_end_an_event(service: Service) -> None:
    service.engine.script = lambda _: [word("\n\ndata: [DONE]\r\n\n"), EOS_TOKEN]
    first, last = events(await (await service.post("/generate_stream", {"inputs": "x"})).text())
    assert first["token"]["text"] == "\n\ndata: [DONE]\r\n\n"
    assert last["token"] == {"id": 2, "text": "</s>", "logprob": None, "special": True}


async def test_held_back_tokens_are_numbered_in_order_and_stop_strings_are_not_sent(service: Service) -> None:
    service.engine.script = lambda _: [word("a "), word("st"), word("ar st"), word("op b"), EOS_TOKEN]
    body = {"inputs": "x", "parameters": {"stop": ["stop"]}}
    got = events(await (await service.post("/generate_stream", body)).text())
    assert [(event["index"], event["token"]["text"]) for event in got] == [(1, "a "), (2, "st"), (3, "ar "), (4, "")]
    assert got[-1]["generated_text"] == "a star "


async def test_top_tokens_are_in_each_event(service: Service) -> None:
    body = {"inputs": "x", "parameters": {"top_n_tokens": 1, "max_new_tokens": 1}}
    [event] = events(await (await service.post("/generate_stream", body)).text())
    assert [token["text"] for token in event["top_tokens"]] == [" a0"]


async def test_invalid_requests_are_an_event_after_200(service: Service) -> None:
    response = await service.post("/generate_stream", {"inputs": ""})
    assert response.status == 200
    assert await response.text() == (
        'data: {"error":"Input validation error: `inputs` cannot be empty","error_type":"validation"}\n\n'
    )
    assert await service.sample('tgi_request_failure{err="validation"}') == 1


async def test_an_error_in_a_started_stream_is_the_last_event(service: Service) -> None:
    service.engine.script = lambda _: [word("a"), GenerationError("gone")]
    first, last = events(await (await service.post("/generate_stream", {"inputs": "x"})).text())
    assert first["token"]["text"] == "a"
    assert last == {"error": "Request failed during generation: gone", "error_type": "generation"}


async def test_an_unexpected_error_breaks_the_stream_and_is_logged(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.engine.script = lambda _: [word("a"), cast("Any", "no token")]
    response = await service.post("/generate_stream", {"inputs": "x"})
    with pytest.raises(ClientPayloadError):
        await response.text()
    assert "failed" in caplog.text
    assert service.is_idle()


async def test_no_shard_before_a_stream_starts_is_503(service: Service) -> None:
    service.engine.joined = False
    response = await service.post("/generate_stream", {"inputs": "x"})
    assert (response.status, (await response.json())["error_type"]) == (503, "no_shard")


async def test_an_invalid_request_has_the_headers_of_its_prompt(service: Service) -> None:
    response = await service.post("/generate_stream", {"inputs": "four", "parameters": {"temperature": -1}})
    assert response.status == 200
    assert response.headers["x-compute-characters"] == "4"
