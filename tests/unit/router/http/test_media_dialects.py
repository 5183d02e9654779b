"""Every dialect's form of a picture gets into the prompt, and its errors name the dialect's own fields."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from caravan_dialects.api.limits import Limits
from caravan_scheduler.core.engine import ModelFacts
from caravan_testing.hostile_pictures import noise, picture_file, tone, wav
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, MEDIA_CELLS, SEEING_MODEL, ScriptedEngine
from caravan_testing.seen_prompts import PICTURE, data_url, in_base64, picture_part, seen, sound_part

ROLES = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=replace(SEEING_MODEL, chat_template=ROLES))


def message(*blocks: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": list(blocks)}]}


def block(data: str | None = None) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": in_base64() if data is None else data}
    return {"type": "image", "source": source}


async def test_messages_have_pictures_among_blocks(service: Service, engine: ScriptedEngine) -> None:
    reply = await service.reply("/v1/messages", message({"type": "text", "text": "See"}, block()))
    assert seen(engine) == ["user:See", PICTURE, "|"]
    assert reply["usage"]["input_tokens"] == len(engine.spec.prompt)
    count = await service.reply("/v1/messages/count_tokens", message({"type": "text", "text": "See"}, block()))
    assert count["input_tokens"] == len(engine.spec.prompt)


async def test_results_of_tools_in_messages_have_pictures(service: Service, engine: ScriptedEngine) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "Screen"}, block()]}
    body = message(result)
    body["messages"].insert(0, {"role": "user", "content": "Look"})
    used = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    body["messages"].insert(1, {"role": "assistant", "content": [used]})
    await service.reply("/v1/messages", body)
    assert PICTURE in seen(engine)


async def test_ollamas_images_are_before_the_text(service: Service, engine: ScriptedEngine) -> None:
    options = {"options": {"num_predict": 3}, "stream": False, "model": "m"}
    chat = {"messages": [{"role": "user", "content": "See", "images": [in_base64()]}]}
    reply = await service.reply("/api/chat", chat | options)
    assert seen(engine) == ["user:", PICTURE, "See|"]
    assert reply["prompt_eval_count"] == len(engine.spec.prompt)
    made = await service.reply("/api/generate", {"prompt": "See", "images": [in_base64()]} | options)
    assert seen(engine) == ["user:", PICTURE, "See|"]
    assert "context" not in made, "no ids can tell what is in a picture"
    await service.reply("/api/generate", {"prompt": "See", "images": [in_base64()], "raw": True} | options)
    assert seen(engine) == [PICTURE, "See"]


async def test_tgi_finds_pictures_in_its_text(service: Service, engine: ScriptedEngine) -> None:
    inputs = f"See ![]({data_url()}) and ![a](b)"
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 3, "decoder_input_details": True}}
    reply = await service.reply("/generate", body)
    assert seen(engine) == ["See ", PICTURE, " and ![a](b)"]
    assert len(reply["details"]["prefill"]) == len(engine.spec.prompt) - MEDIA_CELLS
    await service.events("/generate_stream", {"inputs": inputs, "parameters": {"max_new_tokens": 3}})
    assert seen(engine) == ["See ", PICTURE, " and ![a](b)"]


async def test_a_model_that_does_not_see_gets_tgis_text_as_it_is() -> None:
    engine = ScriptedEngine(model=CHAT_MODEL)
    async with serving(engine) as service:
        await service.reply("/generate", {"inputs": "![](data:image/png;base64,AAAA)"})
        assert seen(engine) == ["![](data:image/png;base64,AAAA)"]


def item(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def input_image(url: str | None = None) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url() if url is None else url}


async def test_responses_have_pictures_and_keep_them(service: Service, engine: ScriptedEngine) -> None:
    given = item({"type": "input_text", "text": "See"}, input_image())
    first = await service.reply("/v1/responses", {"input": [given], "max_output_tokens": 3})
    assert seen(engine) == ["user:See", PICTURE, "|"]
    details = first["usage"]["input_tokens_details"]
    assert details["image_tokens"] == MEDIA_CELLS
    assert "audio_tokens" not in details
    body = {"input": "More", "previous_response_id": first["id"], "max_output_tokens": 3}
    await service.reply("/v1/responses", body)
    assert seen(engine)[:2] == ["user:See", PICTURE]
    async with service.client.get(f"/v1/responses/{first['id']}/input_items") as listed:
        (stored,) = (await listed.json())["data"]
    assert stored["content"][1] == input_image() | {"detail": "auto"}


async def test_outputs_of_tools_in_responses_have_pictures(service: Service, engine: ScriptedEngine) -> None:
    items = [
        item({"type": "input_text", "text": "Look"}),
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [input_image()]},
    ]
    await service.reply("/v1/responses", {"input": items, "max_output_tokens": 3})
    assert PICTURE in seen(engine)


async def test_responses_have_sounds(service: Service, engine: ScriptedEngine) -> None:
    await service.reply("/v1/responses", {"input": [item(sound_part(wav(tone(0.2))))], "max_output_tokens": 3})
    assert engine.spec.media is not None
    count = await service.reply("/v1/responses/input_tokens", {"input": [item(sound_part(wav(tone(0.2))))]})
    assert count["input_tokens"] == len(engine.spec.prompt)


SMALL = in_base64(picture_file(noise(1)))
CASES: list[tuple[str, Callable[[str], Any], str]] = [
    ("/v1/messages", lambda data: message(block(data)), "messages[0].content[0].source.data"),
    (
        "/v1/messages",
        lambda data: message({"type": "tool_result", "tool_use_id": "t", "content": [block(data)]}),
        "messages[0].content[0].content[0].source.data",
    ),
    (
        "/api/chat",
        lambda data: {"model": "m", "messages": [{"role": "user", "content": "a", "images": [data]}]},
        "messages[0].images[0]",
    ),
    ("/api/generate", lambda data: {"model": "m", "prompt": "a", "images": [data]}, "images[0]"),
    ("/generate", lambda data: {"inputs": f"![](data:;base64,{data})"}, "inputs"),
    (
        "/v1/responses",
        lambda data: {"input": [item(input_image(f"data:;base64,{data}"))]},
        "input[0].content[0].image_url",
    ),
    (
        "/v1/responses",
        lambda data: {"input": [{"type": "function_call_output", "call_id": "c", "output": [input_image(data)]}]},
        "input[0].output[0].image_url",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), CASES)
async def test_what_is_wrong_with_a_picture_names_the_field_of_the_dialect(
    service: Service, path: str, body: Callable[[str], Any], field: str
) -> None:
    wrong = {"AAAA": "", "http://x/a.png": "", "A": "", SMALL: ""}
    for data in wrong:
        response = await service.post(path, body(data))
        assert response.status in (400, 422), (data, await response.text())
        assert f"`{field}`" in await response.text(), data
    assert not service.engine.streams


async def test_a_url_in_messages_is_refused_by_name(service: Service) -> None:
    given = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    response = await service.post("/v1/messages", message(given))
    assert response.status == 400
    assert "`messages[0].content[0].source.type` is not supported" in await response.text()
    assert "nothing is fetched" in await response.text()


async def test_a_picture_where_a_model_sees_none_is_refused_or_told() -> None:
    async with serving(ScriptedEngine(model=replace(CHAT_MODEL, chat_template=ROLES))) as service:
        refused = await service.post("/v1/responses", {"input": [item(input_image())]})
        assert refused.status == 400
        assert "`input[0].content[0]` must be text: the model does not read images" in await refused.text()
        output = {"type": "function_call_output", "call_id": "c", "output": [input_image("x")]}
        await service.reply("/v1/responses", {"input": [item(), output], "max_output_tokens": 3})
        assert "[image]" in str(seen(service.engine))


async def test_pictures_that_cannot_be_honoured_are_refused_by_name(service: Service) -> None:
    body = {"inputs": f"![]({data_url()})", "parameters": {"truncate": 5}}
    response = await service.post("/generate", body)
    assert response.status == 422
    assert "`truncate` is not supported" in await response.text()


async def test_llama_servers_marked_prompts_are_refused_by_name_with_pictures(service: Service) -> None:
    marked = {"prompt_string": "a", "multimodal_data": [in_base64()]}
    response = await service.post("/completion", {"prompt": marked})
    assert response.status == 400
    assert "`prompt.multimodal_data` is not supported" in await response.text()
    await service.reply("/completion", {"prompt": {"prompt_string": "a"}, "n_predict": 1})
    assert seen(service.engine) == ["a"]


async def test_a_prompt_with_a_picture_can_be_pinned(service: Service, engine: ScriptedEngine) -> None:
    body = {"messages": [{"role": "user", "content": [picture_part()] * 8 + [{"type": "text", "text": "x" * 40}]}]}
    await service.reply("/admin/prefixes", body)
    (spec,) = engine.pinned_specs
    assert spec.media is not None
    assert len(spec.media.spans) == 8


async def test_a_model_tells_what_it_sees_and_hears() -> None:
    async with serving(ScriptedEngine(model=SEEING_MODEL)) as service:
        async with service.client.get("/v1/models") as listed:
            for entry in (await listed.json())["data"]:
                assert entry["architecture"]["input_modalities"] == ["text", "image", "audio"]
        shown = await service.reply("/api/show", {"model": "scripted"})
        assert {"vision", "audio"} <= {*shown["capabilities"]}
        async with service.client.get("/props?model=scripted") as told:
            props = await told.json()
        assert props["modalities"] == {"vision": True, "audio": True}
        assert props["default_generation_settings"]["n_ctx"] == 256
        assert (props["chat_template"], props["bos_token"]) == (SEEING_MODEL.chat_template, "<s>")
    async with serving(ScriptedEngine(model=CHAT_MODEL)) as service:
        async with service.client.get("/v1/models/scripted") as one:
            assert "architecture" not in await one.json()
        async with service.client.get("/props") as told:
            assert (await told.json())["modalities"] == {"vision": False, "audio": False}
        shown = await service.reply("/api/show", {"model": "scripted"})
        assert not {"vision", "audio"} & {*shown["capabilities"]}


@pytest.mark.parametrize(("model", "status"), [(SEEING_MODEL, 400), (CHAT_MODEL, 413)])
async def test_bodies_may_be_large_where_a_model_sees(model: ModelFacts, status: int) -> None:
    async with serving(ScriptedEngine(model=model)) as service:
        assert (await large_body(service))[0] == status
    async with serving(ScriptedEngine(model=model), Limits(payload_limit=2_500_000)) as service:
        found, words = await large_body(service)
        assert found == 413
        assert "at most 2500000 bytes" in words


async def large_body(service: Service) -> tuple[int, str]:
    """Send a message of 3 MB; return the status and the body of the reply."""
    data = io.BytesIO(b'{"messages":[{"role":"user","content":"' + b"x" * 3_000_000 + b'"}]}')
    headers = {"Content-Type": "application/json"}
    async with service.client.post("/v1/chat/completions", data=data, headers=headers) as response:
        return response.status, await response.text()
