"""Sounds are written down by models that hear, of forms as OpenAI's clients send them."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import FormData

from caravan_dialects.api.limits import Limits
from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.core.media import Sound
from caravan_testing.http_server import Service, events, serving
from caravan_testing.scripted_engine import CHAT_MODEL, MEDIA, MEDIA_CELLS, SEEING_MODEL, ScriptedEngine
from caravan_testing.seen_prompts import seen
from caravan_testing.sounds import RATE, flac, silent_mp3, tone, wav

TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
FILE = wav(tone(0.5))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=SEEING_MODEL)


def form(file: bytes | None = FILE, **fields: str) -> FormData:
    data = FormData(default_to_multipart=True)
    for name, value in fields.items():
        data.add_field(name, value)
    if file is not None:
        data.add_field("file", file, filename="speech.wav", content_type="audio/wav")
    return data


async def reply(service: Service, path: str, data: Any, status: int = 200) -> Any:
    async with service.client.post(path, data=data) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_a_sound_is_written_down(service: Service, engine: ScriptedEngine) -> None:
    answer = await reply(service, TRANSCRIBE, form(model="scripted", max_tokens="3", temperature="0.0"))
    assert answer["text"] == "w1 w2 w3"
    words, heard = seen(engine)
    assert words == "Transcribe audio to text"
    assert isinstance(heard, Sound)
    assert (heard.sample_rate, heard.count) == (RATE, RATE // 2)
    prompt = len(engine.spec.prompt)
    assert answer["usage"] == {
        "type": "tokens",
        "input_tokens": prompt,
        "input_token_details": {"audio_tokens": MEDIA_CELLS, "text_tokens": prompt - MEDIA_CELLS},
        "output_tokens": 3,
        "total_tokens": prompt + 3,
    }
    assert engine.spec.sampling.greedy


@pytest.mark.parametrize("file", [silent_mp3(20), flac(tone(0.3))], ids=["mp3", "flac"])
async def test_other_formats_are_written_down_too(service: Service, engine: ScriptedEngine, file: bytes) -> None:
    await reply(service, TRANSCRIBE, form(file, max_tokens="1", language="en"))
    words, _ = seen(engine)
    assert words == "Transcribe audio to text (language: en)"


async def test_a_sound_is_translated(service: Service, engine: ScriptedEngine) -> None:
    await reply(service, TRANSLATE, form(max_tokens="1"))
    assert seen(engine)[0] == "Translate audio to English text"
    await reply(service, TRANSLATE, form(max_tokens="1", prompt="Into English:"))
    assert seen(engine)[0] == "Into English:"


async def test_a_stream_has_openais_events(service: Service) -> None:
    async with service.client.post(TRANSCRIBE, data=form(max_tokens="3", stream="true")) as response:
        *deltas, done = events(await response.text())
    assert [delta["delta"] for delta in deltas] == [" w1", " w2", " w3"]
    assert (done["type"], done["text"], done["usage"]["output_tokens"]) == ("transcript.text.done", "w1 w2 w3", 3)


REFUSED: list[tuple[Any, int, str, str]] = [
    (form(b"hello"), 400, "file", "must be a WAV, MP3 or FLAC file"),
    (form(wav(tone(0.05))), 400, "file", "at least 0.1 seconds"),
    (form(None, model="m"), 400, "file", "missing required field `file`"),
    (form(response_format="srt"), 400, "response_format", "Invalid enum value 'srt'"),
    (form(temperature="hot"), 400, "temperature", "Expected `float | null`"),
    (form(temperature="-1"), 400, "temperature", "must be"),
]


@pytest.mark.parametrize(("data", "status", "field", "words"), REFUSED)
async def test_what_is_wrong_is_refused_by_its_field(
    service: Service, data: Any, status: int, field: str, words: str
) -> None:
    error = (await reply(service, TRANSCRIBE, data, status))["error"]
    assert words in error["message"]
    assert field in (error["param"] or error["message"])


async def test_a_body_that_is_no_form_is_refused(service: Service) -> None:
    assert "multipart/form-data" in str(await reply(service, TRANSCRIBE, b"{}", 415))
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    for body in (
        b"",
        b"nonsense",
        b'--x\r\nContent-Disposition: form-data; name="\x1a"\r\n\r\n1\r\n--x--\r\n',
        b"--x\r\n\r\nabc",
        b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n\xff',
    ):
        async with service.client.post(TRANSCRIBE, data=body, headers=headers) as response:
            assert response.status == 400, body
            assert "error" in await response.json()


async def test_the_size_of_a_form_is_limited(engine: ScriptedEngine) -> None:
    async with serving(engine, Limits(payload_limit=10_000)) as service:
        assert "10000 bytes" in str(await reply(service, TRANSCRIBE, form(), 413))
    async with serving(engine) as service:
        await reply(service, TRANSCRIBE, form(prompt="x" * 70_000), 413)
    async with serving(engine, Limits(max_bodies_bytes=10_000)) as service:
        assert "5000 bytes of memory" in str(await reply(service, TRANSCRIBE, form(), 413))


@pytest.fixture
async def deaf() -> AsyncIterator[Service]:
    async with serving(ScriptedEngine(model=replace(CHAT_MODEL, media=replace(MEDIA, audio=False)))) as service:
        yield service


async def test_a_model_that_does_not_hear_says_so(deaf: Service) -> None:
    error = (await reply(deaf, TRANSCRIBE, form(), 400))["error"]
    assert error["param"] == "file"
    assert "does not read audio" in error["message"]


@pytest.mark.parametrize("path", [TRANSCRIBE, TRANSLATE])
async def test_a_refusal_is_a_request_that_failed(service: Service, path: str) -> None:
    for count, data in enumerate((form(b"hello"), form(None), form(temperature="-1"), form(seed="a")), 1):
        await reply(service, path, data, 400)
        assert await service.sample("tgi_request_count") == count
        assert await service.sample('tgi_request_failure{err="validation"}') == count


@pytest.mark.parametrize("path", [TRANSCRIBE, TRANSLATE])
async def test_a_refusal_costs_the_key_a_request(engine: ScriptedEngine, path: str) -> None:
    rated = ApiKey(digest=digest_of("key"), tenant=Tenant(name="rated"), requests_per_minute=1)
    access = Access(keyring=Keyring([rated], time.monotonic()))
    async with serving(engine, access=access) as service:
        for status in (400, 429):
            headers = {"Authorization": "Bearer key"}
            async with service.client.post(path, data=form(b"hello"), headers=headers) as response:
                assert response.status == status


async def test_unknown_fields_of_a_form_are_ignored_and_named(service: Service, engine: ScriptedEngine) -> None:
    async with service.client.post(TRANSCRIBE, data=form(fancy="1", chunking_strategy="auto")) as response:
        assert (response.status, response.headers["X-Caravan-Ignored"]) == (200, "fancy, chunking_strategy")
    async with serving(engine, Limits(strict_fields=True)) as strict:
        assert "unknown field `fancy`" in str(await reply(strict, TRANSCRIBE, form(fancy="1"), 400))
