"""Clients read the right text when tokens split characters and the network splits events."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from huggingface_hub import InferenceClient
from openai import OpenAI

from caravan_proto.messages.results import FinishReason
from caravan_testing.http_server import Service, serving
from caravan_testing.raw_http import exchange, post, splitting
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine, Step, word

# The family, the flag and "é" have several code points each; NUL and line breaks are part of the text.
TEXT = (
    'Zoë e\u0301 👩\u200d👩\u200d👧 🏳️\u200d🌈 日本語 \u202eRTL\u202c "quoted" \\ \n\ndata: x\r\n\0\x85\u2028\u2029 end'
)


def tokens(size: int) -> list[Step]:
    """Return TEXT as tokens of ``size`` bytes, which may split characters."""
    data = TEXT.encode()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return [
        *(word(piece, logprob=-1.0) for piece in pieces[:-1]),
        word(pieces[-1], logprob=-1.0, finish=FinishReason.LENGTH),
    ]


@pytest.fixture(params=[1, 2, 3, 7], ids="tokens of {} bytes".format)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    engine = ScriptedEngine(script=lambda _: tokens(request.param), model=CHAT_MODEL)
    async with serving(engine) as running:
        yield running


@pytest.mark.parametrize("most_bytes", [1, 40])
async def test_clients_read_the_same_text(service: Service, most_bytes: int) -> None:
    async with splitting(service.url, most_bytes) as url:

        def read() -> list[str]:
            hub = InferenceClient(url)
            with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                completion = client.completions.create(model="any", prompt="a", stream=True)
                chat = client.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "a"}], stream=True
                )
                return [
                    "".join(hub.text_generation("a", stream=True)),
                    "".join(chunk.choices[0].text for chunk in completion),
                    "".join(chunk.choices[0].delta.content or "" for chunk in chat),
                ]

        assert await asyncio.to_thread(read) == [TEXT] * 3


@pytest.mark.parametrize(("path", "field"), [("/generate", "inputs"), ("/v1/completions", "prompt")])
async def test_whole_replies_have_the_same_text(service: Service, path: str, field: str) -> None:
    reply = await (await service.post(path, {field: "a"})).json()
    assert (reply["generated_text"] if field == "inputs" else reply["choices"][0]["text"]) == TEXT


async def test_the_splitting_proxy_changes_no_byte(service: Service) -> None:
    """The proxy of the other tests splits the stream and changes no byte."""
    request = post("/generate_stream", b'{"inputs":"a"}', "Connection: close", "X-Request-Id: same")
    async with splitting(service.url, 1) as url:
        split, direct = await exchange(url, [request]), await exchange(service.url, [request])
    assert split.partition(b"\r\n\r\n")[2] == direct.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("path", "body", "mark"),
    [
        ("/generate_stream", b'{"inputs":"a"}', b"data:"),
        ("/v1/completions", b'{"prompt":"a","stream":true}', b"data:"),
        ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"stream":true}', b"data:"),
        ("/api/generate", b'{"model":"any","prompt":"a","raw":true}', b'"done":false'),
    ],
)
async def test_tokens_that_are_ready_together_leave_in_one_write(path: str, body: bytes, mark: bytes) -> None:
    last = word("d", finish=FinishReason.LENGTH)
    engine = ScriptedEngine(script=lambda _: [[word("a"), word("b"), word("c")], last], model=CHAT_MODEL)
    async with serving(engine) as service:
        reply = await exchange(service.url, [post(path, body, "Connection: close")])
    # Each write is a chunk of the body: its length in hexadecimal digits, a line break, the data, a line break.
    rest, writes = reply.partition(b"\r\n\r\n")[2], []
    while rest:
        length, _, rest = rest.partition(b"\r\n")
        size = int(length, 16)
        writes.append(rest[:size].count(mark))
        rest = rest[size + 2 :]
    assert writes[:2] == [3, 1]
