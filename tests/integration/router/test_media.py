"""Pictures and sounds over a whole Caravan and in every dialect: the output is that of the text that they spell."""

import asyncio
import base64
import io
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession, FormData
from PIL import Image

from caravan_router.engine.media import MediaShelf
from caravan_scheduler.core.errors import GenerationError, TooMuchMediaError
from caravan_scheduler.core.media import Media, Picture, Sound
from caravan_shard.backends.toy.media import SLICE_CELLS, ToyEncoder
from caravan_testing.cluster import Cluster, ClusterConfig, cluster
from caravan_testing.hostile_pictures import float_wav, hostile_files
from caravan_testing.media_prompts import spelled_picture, spelled_sound
from caravan_testing.programs import children_with
from caravan_testing.specs import spec, undisturbed
from caravan_testing.waiting import eventually

_TEXT = "what is this: "


def _picture(text: str) -> Picture:
    return Picture.of(*spelled_picture(text))


def _sound(text: str) -> Sound:
    return Sound.of(16_000, spelled_sound(text))


async def _generated(running: Cluster, parts: Sequence[str | Media], new_tokens: int = 12, **fields: Any) -> list[int]:
    tokens = await running.engine.queries.tokenize_parts(tuple(parts))
    wanted = spec(tokens.tokens.token_ids, new_tokens, **fields)
    stream = running.engine.submit(replace(wanted, media=tokens.media))
    try:
        return [token.token_id async for ready in stream for token in ready]
    finally:
        stream.close()


async def _expected(running: Cluster, text: str, new_tokens: int = 12, **fields: Any) -> list[int]:
    tokens = await running.engine.queries.tokenize(text)
    return undisturbed(spec(tokens.token_ids, new_tokens, **fields))


@pytest.mark.parametrize("atomic", [False, True])
async def test_media_in_a_prompt_are_read_as_what_they_spell(atomic: bool) -> None:
    async with cluster(ClusterConfig(make_encoder=lambda: ToyEncoder(atomic=atomic))) as running:
        word = "x" * (SLICE_CELLS + 7)
        parts = (_TEXT, _picture("a cat"), " and ", _sound("a dog"), _picture(word), "?")
        assert await _generated(running, parts) == await _expected(running, f"{_TEXT}a cat and a dog{word}?")


async def test_a_prompt_that_begins_with_a_picture_has_its_begin_token() -> None:
    async with cluster(ClusterConfig(make_encoder=ToyEncoder)) as running:
        tokens = await running.engine.queries.tokenize_parts((_picture("cat"), "!"))
        text = await running.engine.queries.tokenize("cat!")
        assert tokens.tokens.token_ids[0] == text.token_ids[0]
        assert len(tokens.tokens.token_ids) == len(text.token_ids)
        assert await _generated(running, (_picture("cat"), "!")) == await _expected(running, "cat!")


def _waiting(running: Cluster) -> list[Any]:
    return [sequence.spec for sequence in running.engine.scheduler.waiting]


async def test_a_picture_that_the_shard_has_dropped_is_sent_again() -> None:
    async with cluster(ClusterConfig(make_encoder=ToyEncoder)) as running:
        (address,) = running.addresses
        running.embeddings(address).capacity = 20  # those of one picture
        for number, name in enumerate(("cat", "dog", "cat")):
            parts = (f"{number}", _picture(f"a {name}"))
            assert await _generated(running, parts) == await _expected(running, f"{number}a {name}")
        (backend,) = running.backends.values()
        assert isinstance(backend.media, ToyEncoder)
        assert backend.media.count == 3


async def test_a_lost_shard_s_pictures_are_encoded_elsewhere() -> None:
    async with cluster(ClusterConfig(shards=2, make_encoder=ToyEncoder, step_s=0.02)) as running:
        parts = (_TEXT, _picture("a cat"), "?")
        shown = asyncio.ensure_future(_generated(running, parts, 40))
        await eventually(lambda: any(shard.stays.residents for shard in running.engine.scheduler.shards.values()))
        (busy,) = (name for name, shard in running.engine.scheduler.shards.items() if shard.stays.residents)
        await running.stop_shard(busy)
        assert await shown == await _expected(running, f"{_TEXT}a cat?", 40)


async def test_a_picture_that_cannot_be_kept_ends_its_request() -> None:
    async with cluster(ClusterConfig(make_encoder=ToyEncoder)) as running:
        (address,) = running.addresses
        running.embeddings(address).capacity = 8
        with pytest.raises(GenerationError, match="could not be encoded"):
            await _generated(running, (_TEXT, _picture("a cat")))
        assert await _generated(running, (_TEXT, "a cat")) == await _expected(running, f"{_TEXT}a cat")


async def test_numbers_of_cells_never_leave_the_router() -> None:
    async with cluster(ClusterConfig(make_encoder=ToyEncoder)) as running:
        tokens = await running.engine.queries.tokenize_parts((_TEXT, _picture("a cat")))
        with pytest.raises(ValueError, match=r"[Oo]ut of range|too large"):
            await running.engine.queries.detokenize(tokens.tokens.token_ids)


def test_equal_media_are_kept_once_and_all_are_limited() -> None:
    shelf = MediaShelf(most_bytes=2000)
    first = shelf.kept(("a", _picture("cat" * 8)))
    again = shelf.kept((_picture("cat" * 8),))
    assert again[0] is first[1]
    assert shelf.size_bytes == _picture("cat" * 8).size_bytes
    with pytest.raises(TooMuchMediaError):
        shelf.kept((_picture("dog" * 8),))
    del first, again
    shelf.kept((_picture("dog" * 8),))


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}|{% endfor %}[assistant]"
SPELLED = "a cat and a dog"
TOKENS = 12


def picture(text: str = SPELLED) -> str:
    """Return the base64 of a picture that spells ``text``."""
    width, height, rgb = spelled_picture(text)
    out = io.BytesIO()
    Image.frombytes("RGB", (width, height), rgb).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def url(text: str = SPELLED) -> str:
    return f"data:image/png;base64,{picture(text)}"


def sound_file(text: str = SPELLED) -> bytes:
    """Return a file of a sound that spells ``text``."""
    samples = memoryview(spelled_sound(text)).cast("f")
    return float_wav(list(samples))


class Client:
    def __init__(self, running: Cluster, session: ClientSession) -> None:
        self.running = running
        self._session = session

    async def post(self, path: str, body: Any) -> Any:
        kind = {"data": body} if isinstance(body, FormData) else {"json": body}
        async with self._session.post(path, **kind) as response:
            reply = await response.json()
            assert response.status == 200, reply
            return reply

    async def status(self, path: str, body: Any) -> tuple[int, str]:
        async with self._session.post(path, json=body) as response:
            return response.status, await response.text()

    async def get(self, path: str) -> Any:
        async with self._session.get(path) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def delete(self, path: str) -> None:
        async with self._session.delete(path) as response:
            assert response.status == 200, await response.text()

    @property
    def encodings(self) -> int:
        encoders = [backend.media for backend in self.running.backends.values()]
        return sum(encoder.count for encoder in encoders if isinstance(encoder, ToyEncoder))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    config = ClusterConfig(make_encoder=ToyEncoder, chat_template=TEMPLATE)
    async with cluster(config) as running, ClientSession(running.url) as session:
        yield Client(running, session)


def part(spelled: bool, text: str = SPELLED) -> dict[str, Any]:
    if spelled:
        return {"type": "image_url", "image_url": {"url": url(text)}}
    return {"type": "text", "text": text}


def item(*parts: dict[str, Any]) -> dict[str, Any]:
    """Make a message. Neighbouring texts become one part: between two there would be a line break."""
    content: list[dict[str, Any]] = []
    for one in parts:
        if content and "text" in content[-1] and "text" in one:
            content[-1] = one | {"text": content[-1]["text"] + one["text"]}
        else:
            content.append(one)
    return {"role": "user", "content": content}


def input_part(spelled: bool, text: str = SPELLED) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url(text)} if spelled else {"type": "input_text", "text": text}


async def chat(client: Client, spelled: bool) -> tuple[str, int]:
    body = {"messages": [item({"type": "text", "text": "See "}, part(spelled), {"type": "text", "text": "?"})]}
    reply = await client.post("/v1/chat/completions", body | {"max_tokens": TOKENS, "temperature": 0})
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"]


async def heard(client: Client, spelled: bool) -> tuple[str, int]:
    data = base64.b64encode(sound_file()).decode()
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    body = {"messages": [item({"type": "text", "text": "Hear "}, sound if spelled else part(False))]}
    reply = await client.post("/v1/chat/completions", body | {"max_tokens": TOKENS, "temperature": 0})
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"]


async def responses(client: Client, spelled: bool) -> tuple[str, int]:
    body = {"input": [item({"type": "input_text", "text": "See "}, input_part(spelled))], "temperature": 0}
    reply = await client.post("/v1/responses", body | {"max_output_tokens": TOKENS})
    return reply["output"][0]["content"][0]["text"], reply["usage"]["input_tokens"]


async def tool_output(client: Client, spelled: bool) -> tuple[str, int]:
    items = [
        item({"type": "input_text", "text": "Look"}),
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [input_part(spelled)]},
    ]
    reply = await client.post("/v1/responses", {"input": items, "temperature": 0, "max_output_tokens": TOKENS})
    return reply["output"][0]["content"][0]["text"], reply["usage"]["input_tokens"]


async def messages(client: Client, spelled: bool) -> tuple[str, int]:
    source = {"type": "base64", "media_type": "image/png", "data": picture()}
    block = {"type": "image", "source": source} if spelled else {"type": "text", "text": SPELLED}
    body = {"model": "m", "messages": [item({"type": "text", "text": "See"}, block)], "temperature": 0}
    reply = await client.post("/v1/messages", body | {"max_tokens": TOKENS})
    usage = reply["usage"]
    return reply["content"][0]["text"], usage["input_tokens"] + usage["cache_read_input_tokens"]


async def ollama(client: Client, spelled: bool) -> tuple[str, int]:
    message = {"role": "user", "content": "?", "images": [picture()]} if spelled else item(part(False))
    if not spelled:
        message["content"] = SPELLED + "?"
    options = {"temperature": 0, "num_predict": TOKENS}
    reply = await client.post("/api/chat", {"model": "m", "messages": [message], "stream": False, "options": options})
    return reply["message"]["content"], reply["prompt_eval_count"]


async def tgi(client: Client, spelled: bool) -> tuple[str, int]:
    shown = f"![]({url()})" if spelled else SPELLED
    parameters = {"max_new_tokens": TOKENS, "details": True, "decoder_input_details": True}
    reply = await client.post("/generate", {"inputs": f"See {shown}?", "parameters": parameters})
    return reply["generated_text"], 0


DIALECTS = [chat, heard, responses, tool_output, messages, ollama, tgi]


@pytest.mark.parametrize("dialect", DIALECTS, ids=[dialect.__name__ for dialect in DIALECTS])
async def test_the_output_is_that_of_the_text(client: Client, dialect: Any) -> None:
    assert await dialect(client, True) == await dialect(client, False)
    assert client.encodings == 1


async def test_a_sound_is_transcribed_as_its_text_would_be(client: Client) -> None:
    form = FormData()
    form.add_field("file", sound_file(), filename="a.wav")
    form.add_field("max_tokens", str(TOKENS))
    reply = await client.post("/v1/audio/transcriptions", form)
    body = {"messages": [item(part(False, f"Transcribe audio to text{SPELLED}"))], "max_tokens": TOKENS}
    said = await client.post("/v1/chat/completions", body | {"temperature": 0})
    assert reply["text"] == said["choices"][0]["message"]["content"].strip()


async def test_no_text_spells_a_picture(client: Client) -> None:
    """What stands for a picture in messages is drawn for each request: a client that copies one has text."""
    plain = {"messages": [item(part(False, "\ufdd00123456789abcdef\ufdd1"), part(True))], "max_tokens": TOKENS}
    reply = await client.post("/v1/chat/completions", plain)
    assert reply["usage"]["prompt_tokens_details"]["image_tokens"] == len(SPELLED)


async def conversed(client: Client, *, spelled: bool) -> list[str]:
    """Return the outputs of a conversation that is forked, edited, exported and imported."""
    made = (await client.post("/v1/conversations", {}))["id"]
    limits = {"max_output_tokens": TOKENS, "temperature": 0}
    said = []

    async def say(conversation: str, *parts: dict[str, Any]) -> None:
        body = {"conversation": conversation, "input": [item(*parts)]}
        reply = await client.post("/v1/responses", body | limits)
        said.append(reply["output"][0]["content"][0]["text"])

    await say(made, {"type": "input_text", "text": "First "}, input_part(spelled, "one picture"))
    await say(made, {"type": "input_text", "text": "More"})
    fork = (await client.post(f"/v1/conversations/{made}/fork", {}))["id"]
    await say(fork, input_part(spelled, "another picture"))
    await client.post(f"/v1/conversations/{made}/rewind", {"turns": 1})
    await say(made, {"type": "input_text", "text": "Again"})
    exported = await client.get(f"/v1/conversations/{fork}/export")
    await client.delete(f"/v1/conversations/{fork}")
    again = (await client.post("/v1/conversations", {"import": exported}))["id"]
    await say(again, {"type": "input_text", "text": "Imported"})
    first = (await client.get(f"/v1/conversations/{again}/items?order=asc"))["data"][0]["id"]
    insert = {"op": "insert", "after": first, "items": [item(input_part(spelled, "inserted"))]}
    await client.post(f"/v1/conversations/{again}/edit", {"operations": [insert]})
    await say(again, {"type": "input_text", "text": "Edited"})
    return said


async def test_conversations_with_pictures_go_on_as_those_of_text(client: Client) -> None:
    assert await conversed(client, spelled=True) == await conversed(client, spelled=False)
    assert client.encodings == 3


async def test_ten_turns_with_two_pictures_encode_each_once(client: Client) -> None:
    """An agent sends everything again with each turn."""
    turns: list[dict[str, Any]] = []
    for turn in range(10):
        parts = [part(True, f"picture {turn}")] if turn in (0, 4) else []
        turns.append(item({"type": "text", "text": f"turn {turn}"}, *parts))
        body = {"messages": turns, "max_tokens": 5, "temperature": 0}
        reply = await client.post("/v1/chat/completions", body)
        turns.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    assert client.encodings == 2


async def test_hostile_files_leave_streams_beside_them_as_they_are(client: Client) -> None:
    """Every file is answered with 400 or read, and each stream has its text, although the decoders are killed."""
    expected = await chat(client, False)
    files = [base64.b64encode(data).decode() for _, data in hostile_files() if len(data) < 1_000_000]
    assert len(files) > 300
    refused = 0

    async def attack(share: list[str]) -> None:
        nonlocal refused
        for number, data in enumerate(share):
            shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            body = {"messages": [item(*[shown] * (9 if number % 50 == 7 else 1))], "max_tokens": 1}
            status, text = await client.status("/v1/chat/completions", body)
            # A file whose colours alone are wrong may be a picture of too many cells.
            assert status in (200, 400), text[:500]
            refused += status == 400

    async def kill() -> None:
        # Once, as no file may end two processes.
        await eventually(lambda: refused > 60, "files are being refused")
        for pid in await asyncio.to_thread(children_with, "decoder_process"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def streams() -> None:
        for _ in range(10):
            assert await chat(client, True) == expected

    await asyncio.gather(attack(files[::2]), attack(files[1::2]), streams(), streams(), kill())
    assert refused > 250
    assert await chat(client, True) == expected
