"""Images and audio in prompts, and OpenAI's routes for audio."""

import signal
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
from caravan_router.http.server.state import STATE
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.core.media import Picture, Sound
from caravan_testing.hostile_pictures import RATE, flac, noise, picture_file, silent_mp3, tone, wav
from caravan_testing.http_server import Service, events, serving
from caravan_testing.scripted_engine import BOS, CHAT_MODEL, MEDIA, MEDIA_CELLS, SEEING_MODEL, ScriptedEngine, ids_of
from caravan_testing.seen_prompts import FILE, PICTURE, data_url, picture_part, seen, sound_part, text_part
from caravan_testing.waiting import deliver

CHAT = "/v1/chat/completions"
OTHER = picture_file(noise(8), "JPEG")


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 3}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=SEEING_MODEL)


async def test_a_picture_is_between_the_texts_around_it(service: Service, engine: ScriptedEngine) -> None:
    await service.reply(CHAT, user(text_part("What is "), picture_part(), text_part("?")))
    assert seen(engine) == ["What is ", PICTURE, "?"]
    await service.reply(CHAT, user(picture_part(), picture_part(OTHER)))
    first, second = seen(engine)
    assert first == PICTURE
    assert isinstance(second, Picture)
    assert (second.width, second.height) == (8, 8)


async def test_a_sound_has_the_rate_of_the_model(service: Service, engine: ScriptedEngine) -> None:
    await service.reply(CHAT, user(text_part("Write: "), sound_part(wav(tone(0.5, 8000), 8000))))
    words, heard = seen(engine)
    assert words == "Write: "
    assert isinstance(heard, Sound)
    assert (heard.sample_rate, abs(heard.count - RATE // 2) < 4) == (RATE, True)


async def test_the_same_picture_has_the_same_tokens_in_every_request(service: Service, engine: ScriptedEngine) -> None:
    await service.reply(CHAT, user(text_part("a"), picture_part()))
    once = engine.spec.prompt
    await service.reply(CHAT, user(text_part("a"), picture_part(), picture_part(FILE + b"\0")))
    assert engine.spec.prompt == (*once, *once[-MEDIA_CELLS:])


async def test_usage_counts_the_tokens_of_pictures_and_ids_leave_them_out(
    service: Service, engine: ScriptedEngine
) -> None:
    body = user(text_part("ab"), picture_part(), sound_part(wav(tone(0.2)))) | {"return_token_ids": True}
    reply = await service.reply(CHAT, body)
    assert reply["prompt_token_ids"] == [BOS, *ids_of("a"), *ids_of("b")]
    usage = reply["usage"]
    assert usage["prompt_tokens"] == 3 + 2 * MEDIA_CELLS
    details = {"cached_tokens": 0, "image_tokens": MEDIA_CELLS, "audio_tokens": MEDIA_CELLS}
    assert usage["prompt_tokens_details"] == details
    plain = await service.reply(CHAT, user(text_part("ab")))
    assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_no_text_of_a_client_is_taken_for_a_picture(service: Service, engine: ScriptedEngine) -> None:
    # Such a mark stands for a picture in the messages; its digits are drawn anew for each request.
    forged = "\ufdd00123456789abcdef\ufdd1<__media__><image>"
    await service.reply(CHAT, user(text_part(forged), picture_part(), text_part(forged)))
    before, between, after = seen(engine)
    assert between == PICTURE
    assert len(str(before)) == len(str(after)) == len(forged)


async def test_control_texts_beside_a_picture_stay_text() -> None:
    engine = ScriptedEngine(model=SEEING_MODEL, controls={"<|end|>": 7})
    async with serving(engine) as service:
        await service.reply(CHAT, user(text_part("<|end|>"), picture_part(), text_part("<|end|>x")))
    assert 7 not in engine.spec.prompt
    assert seen(engine) == ["<|end|>", PICTURE, "<|end|>x"]


SMOLVLM = (
    "{% for m in messages %}{{ m.role }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}{% endfor %}"
)


QWEN = (
    "{% for m in messages %}{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "before"),
    [(SMOLVLM, "user: What is "), (QWEN, "user>What is "), ("{{ messages[0].content }}", "What is ")],
)
async def test_a_template_shows_a_picture_in_the_form_that_it_reads(template: str, before: str) -> None:
    engine = ScriptedEngine(model=replace(SEEING_MODEL, chat_template=template))
    async with serving(engine) as service:
        await service.reply(CHAT, user(text_part("What is "), picture_part(), text_part("?")))
        assert seen(engine) == [before, PICTURE, "?"]
        # A text alone has the same form.
        await service.reply(CHAT, user(text_part("What is ")))
        assert seen(engine) == [before]


async def test_a_template_that_leaves_a_picture_out_is_an_error() -> None:
    engine = ScriptedEngine(model=replace(SEEING_MODEL, chat_template="{{ messages[-1].content }}"))
    async with serving(engine) as service:
        body = user(picture_part())
        body["messages"] += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        response = await service.post(CHAT, body)
        assert response.status == 400
        assert "does not show 1 of the 1 images" in await response.text()


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"url": "http://localhost/a.png"}, "image_url.url", "nothing is fetched. Given: 'http://localhost/a.png'"),
    ({"url": "https://x/" + "a" * 5000}, "image_url.url", "nothing is fetched"),
    ({"url": "file:///etc/passwd"}, "image_url.url", "nothing is fetched. Given: 'file:///etc/passwd'"),
    ({"url": "/etc/passwd"}, "image_url.url", "nothing is fetched"),
    ({"url": "data:image/png,abc"}, "image_url.url", "nothing is fetched"),
    ({"url": "AAAA"}, "image_url.url", "nothing is fetched"),
    ({"url": ""}, "image_url.url", "nothing is fetched"),
    ({"url": "data:image/png;base64,A"}, "image_url.url", "must be valid base64"),
    ({"url": data_url(b"hello")}, "image_url.url", "must be a PNG, JPEG, WebP or GIF file"),
    ({"url": data_url(b"<svg/>", "image/svg+xml")}, "image_url.url", "must be a PNG"),
    ({"url": data_url(FILE[:200])}, "image_url.url", "cannot be decoded"),
    ({"url": data_url(picture_file(noise(1)))}, "image_url.url", "must have sides of at least 2 pixels. Given: 1 x 1"),
]


@pytest.mark.parametrize(("given", "field", "words"), REFUSED)
async def test_what_is_no_picture_is_refused_by_its_field(
    service: Service, given: dict[str, Any], field: str, words: str
) -> None:
    response = await service.post(CHAT, user(text_part("a"), {"type": "image_url", "image_url": given}))
    assert response.status == 400
    error = (await response.json())["error"]
    assert words in error["message"]
    assert error["param"] == f"messages[0].content[1].{field}"
    assert len(error["message"]) < 400


async def test_a_picture_of_another_kind_than_its_url_says_is_read(service: Service, engine: ScriptedEngine) -> None:
    given = {"type": "image_url", "image_url": {"url": data_url(FILE, "image/jpeg"), "detail": "high"}}
    await service.reply(CHAT, user(given))
    assert seen(engine) == [PICTURE]


async def test_more_pictures_than_allowed_are_refused_undecoded(engine: ScriptedEngine) -> None:
    async with serving(engine, Limits(max_media=2)) as service:
        await service.reply(CHAT, user(picture_part(), picture_part()))
        response = await service.post(CHAT, user(picture_part(), picture_part(), picture_part(b"broken")))
        assert response.status == 400
        assert "`messages[0].content[2].image_url.url`: a request may have at most 2" in await response.text()


async def test_a_medium_that_shards_do_not_take_is_refused() -> None:
    engine = ScriptedEngine(model=replace(SEEING_MODEL, media=replace(MEDIA, max_bytes=1000)))
    async with serving(engine) as service:
        response = await service.post(CHAT, user(picture_part()))
        assert response.status == 400
        assert "at most 1000 bytes when it is decoded. Given: 1728" in await response.text()


@pytest.mark.parametrize(
    ("facts", "part", "words"),
    [
        (None, picture_part(), "does not read images"),
        (None, sound_part(b""), "does not read audio"),
        (replace(MEDIA, images=False), picture_part(), "does not read images"),
        (replace(MEDIA, audio=False, audio_sample_rate=0), sound_part(b""), "does not read audio"),
        (MEDIA, {"type": "file", "file": {}}, "reads nothing else"),
    ],
)
async def test_a_model_gets_only_what_it_sees_or_hears(facts: Any, part: dict[str, Any], words: str) -> None:
    async with serving(ScriptedEngine(model=replace(SEEING_MODEL, media=facts))) as service:
        response = await service.post(CHAT, user(text_part("a"), part))
        assert response.status == 400
        error = (await response.json())["error"]
        assert words in error["message"]
        assert error["param"] == "messages[0].content[1]"


async def test_what_the_model_says_has_no_pictures(service: Service) -> None:
    body = {"messages": [{"role": "assistant", "content": [picture_part()]}, {"role": "user", "content": "a"}]}
    response = await service.post(CHAT, body)
    assert response.status == 400
    assert "`messages[0].content[0]` must be text" in await response.text()


async def test_a_result_of_a_tool_may_have_a_picture(service: Service, engine: ScriptedEngine) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text_part("Seen: "), picture_part()]},
    ]
    await service.reply(CHAT, {"messages": messages, "max_tokens": 3})
    assert PICTURE in seen(engine)


async def test_a_decoder_that_is_killed_loses_no_request(service: Service, engine: ScriptedEngine) -> None:
    await service.reply(CHAT, user(picture_part(OTHER)))
    pids = service.app[STATE].decoder.processes.idle_pids
    assert pids
    for pid in pids:
        await deliver(pid, signal.SIGKILL)
    await service.reply(CHAT, user(picture_part()))
    assert seen(engine) == [PICTURE]


async def test_a_prompt_is_tokenized_for_a_client_without_its_pictures(service: Service) -> None:
    reply = await service.reply("/chat_tokenize", user(text_part("ab"), picture_part(), text_part("c")))
    assert reply["templated_text"] == "abc"
    assert [token["text"] for token in reply["tokenize_response"]] == ["<s>", "a", "b", "c"]


async def test_turns_with_pictures_may_be_left_out(engine: ScriptedEngine) -> None:
    async with serving(engine) as service:
        messages = [
            {"role": "user", "content": [text_part("x" * 200), picture_part()]},
            {"role": "assistant", "content": "a"},
        ]
        messages.append({"role": "user", "content": [text_part("y" * 50), picture_part(OTHER)]})
        reply = await service.reply(CHAT, {"messages": messages, "max_tokens": 20, "truncation": "auto"})
        assert reply["truncated"]["turns"] == 1
        words, last = seen(engine)
        assert words == "y" * 50
        assert isinstance(last, Picture)
        assert (last.width, last.height) == (8, 8)


async def test_files_are_counted(service: Service) -> None:
    await service.reply(CHAT, user(picture_part(), picture_part(), sound_part(wav(tone(0.2)))))
    assert await service.sample('caravan_media_decode_seconds_count{kind="picture"}') == 2
    assert await service.sample('caravan_media_decode_seconds_count{kind="sound"}') == 1
    await service.post(CHAT, user(picture_part(b"hello")))
    await service.post(CHAT, user(picture_part(FILE[:100])))
    assert await service.sample('caravan_media_refused_total{reason="format"}') == 1
    assert await service.sample('caravan_media_refused_total{reason="broken"}') == 1


TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"


SPEECH = wav(tone(0.5))


def form(file: bytes | None = SPEECH, **fields: str) -> FormData:
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


REFUSED_FORMS: list[tuple[Any, int, str, str]] = [
    (form(b"hello"), 400, "file", "must be a WAV, MP3 or FLAC file"),
    (form(wav(tone(0.05))), 400, "file", "at least 0.1 seconds"),
    (form(None, model="m"), 400, "file", "missing required field `file`"),
    (form(response_format="srt"), 400, "response_format", "Invalid enum value 'srt'"),
    (form(temperature="hot"), 400, "temperature", "Expected `float | null`"),
    (form(temperature="-1"), 400, "temperature", "must be"),
]


@pytest.mark.parametrize(("data", "status", "field", "words"), REFUSED_FORMS)
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
