"""The prompts that Gemini's contents become."""

import base64
from dataclasses import replace
from typing import Any

import pytest

from caravan_testing.hostile_pictures import tone, wav
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import MODEL, SEEING_MODEL, ScriptedEngine
from caravan_testing.seen_prompts import PICTURE, in_base64, seen

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools><tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }} "
    "{{ c.function.arguments | tojson }} {{ c.id }}){% endfor %}{% if m.tool_call_id %}<{{ m.tool_call_id }}>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
HI: dict[str, Any] = {"role": "user", "parts": [{"text": "hi"}]}
PATH = "/v1beta/models/any:generateContent"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=replace(MODEL, chat_template=TEMPLATE, max_sequence_tokens=4096))


async def prompt_of(service: Service, contents: Any, **body: Any) -> str:
    config = {"maxOutputTokens": 2}
    await service.reply(PATH, {"contents": contents, "generationConfig": config, **body})
    return "".join(chr((token_id - 100) % 800) for token_id in service.engine.spec.prompt[1:])


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {}, **fields}}


def result(name: str, response: Any, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **fields}}


async def test_turns_of_one_role_are_joined(service: Service) -> None:
    contents = [{"parts": [{"text": "a"}, {"text": "b"}]}, {"role": "", "parts": {"text": "c"}}, model({"text": "d"})]
    assert await prompt_of(service, [*contents, HI]) == "[user]a\nb\n\nc[assistant]d[user]hi[assistant]"
    assert await prompt_of(service, HI) == "[user]hi[assistant]"


async def test_the_instruction_is_one_system_message(service: Service) -> None:
    instruction = {"role": "user", "parts": [{"text": "A"}, {"text": "B"}]}
    assert await prompt_of(service, [HI], systemInstruction=instruction) == "[system]A\nB[user]hi[assistant]"
    contents = [{"role": "system", "parts": [{"text": "C"}]}, HI]
    assert await prompt_of(service, contents) == "[system]C[user]hi[assistant]"
    assert await prompt_of(service, [HI], systemInstruction={"parts": []}) == "[user]hi[assistant]"


async def test_a_last_turn_of_the_model_is_continued(service: Service) -> None:
    assert await prompt_of(service, [HI, model({"text": "Well, "})]) == "[user]hi[assistant]Well, "


async def test_thoughts_calls_and_results(service: Service) -> None:
    contents = [
        HI,
        model(
            {"text": "T.", "thought": True, "thoughtSignature": "c2ln"},
            {"text": "Let me see."},
            call("weather", args={"city": "A"}, id="c1"),
        ),
        user(result("weather", {"output": "Sun"}, id="c1"), {"text": "So?"}),
    ]
    assert await prompt_of(service, contents) == (
        '[user]hi[assistant]<think>T.</think>Let me see.(weather {"city": "A"} c1)[tool]Sun<c1>[user]So?[assistant]'
    )
    contents[2] = {"role": "function", "parts": [result("weather", {"result": "Rain"}, id="c1")]}
    assert (await prompt_of(service, contents)).endswith("c1)[tool]Rain<c1>[assistant]")


async def test_calls_without_ids_get_those_of_their_results(service: Service) -> None:
    contents = [
        HI,
        model(call("a"), call("b"), call("a")),
        user(result("a", {"output": "1"}), result("a", {"output": "2"}), result("b", {"output": "3"}), result("c", {})),
    ]
    assert await prompt_of(service, contents) == (
        "[user]hi[assistant](a {} call_1)(b {} call_2)(a {} call_3)"
        "[tool]1<call_1>[tool]2<call_3>[tool]3<call_2>[tool][assistant]"
    )


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ({"output": "x"}, "x"),
        ({"error": "no"}, "Error: no"),
        ({"output": 5}, '{"output":5}'),
        ({"output": "x", "more": 1}, '{"output":"x","more":1}'),
        ({}, ""),
        (None, ""),
    ],
)
async def test_what_a_function_has_returned(service: Service, response: Any, shown: str) -> None:
    prompt = await prompt_of(service, [HI, model(call("f", id="c")), user(result("f", response, id="c"))])
    assert prompt.endswith(f"[tool]{shown}<c>[assistant]")


async def test_texts_in_files_and_what_google_has_run(service: Service) -> None:
    data = base64.b64encode("é?>".encode()).decode()
    file = {"inlineData": {"mimeType": "text/plain", "data": data, "displayName": "a.txt"}}
    assert await prompt_of(service, [user({"text": "See:"}, file)]) == "[user]See:\né?>[assistant]"
    ran = model({"executableCode": {"code": "print(1)"}}, {"codeExecutionResult": {"output": "1\n"}})
    assert await prompt_of(service, [HI, ran, HI]) == "[user]hi[assistant]print(1)1\n[user]hi[assistant]"
    signed = model({"text": "a"}, {"thoughtSignature": "c2ln"})
    assert await prompt_of(service, [HI, signed, HI]) == "[user]hi[assistant]a[user]hi[assistant]"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({}, "`contents[0].parts[0].text` is missing"),
        ({"inlineData": {"data": "AA"}}, "`contents[0].parts[0].inlineData.mimeType` is missing"),
        ({"inlineData": {"mimeType": "video/mp4", "data": "AA"}}, "Given: type 'video/mp4'"),
        ({"inlineData": {"mimeType": "image/png", "data": "AA"}}, "the model does not read images"),
        ({"inlineData": {"mimeType": "audio/wav", "data": "AA"}}, "the model does not read audio"),
        ({"inlineData": {"mimeType": "text/plain", "data": "/w=="}}, "inlineData.data` must be text in UTF-8"),
        ({"inlineData": {"mimeType": "text/plain", "data": "é"}}, "inlineData.data` must be text in UTF-8"),
        ({"fileData": {"fileUri": "gs://x"}}, "`contents[0].parts[0].fileData` is not supported"),
        (call("f"), "`contents[0].parts[0].functionCall` is not supported"),
        (result("", {}), "`contents[0].parts[0].functionResponse.name` is missing"),
    ],
)
async def test_parts_that_cannot_be_read(service: Service, part: dict[str, Any], message: str) -> None:
    response = await service.post(PATH, {"contents": [user(part)]})
    error = (await response.json())["error"]
    assert (response.status, error["status"]) == (400, "INVALID_ARGUMENT")
    assert message in error["message"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (call(""), "`contents[1].parts[0].functionCall.name` is missing"),
        (result("f", {}), "`contents[1].parts[0].functionResponse` is not supported"),
    ],
)
async def test_parts_of_the_model_that_cannot_be_read(service: Service, part: dict[str, Any], message: str) -> None:
    response = await service.post(PATH, {"contents": [HI, model(part)]})
    assert message in (await response.json())["error"]["message"]


def picture(**fields: Any) -> dict[str, Any]:
    return {"inlineData": {"mimeType": "image/png", "data": in_base64(), **fields}}


async def test_pictures_and_sounds() -> None:
    engine = ScriptedEngine(model=replace(SEEING_MODEL, chat_template=TEMPLATE, max_sequence_tokens=4096))
    async with serving(engine) as service:
        await prompt_of(service, [user({"text": "See"}, picture())])
        assert seen(engine) == ["[user]See", PICTURE, "[assistant]"]
        # Google's packages write base64 for URLs.
        for_urls = in_base64().replace("+", "-").replace("/", "_")
        assert for_urls != in_base64()
        await prompt_of(service, [user(picture(data=for_urls))])
        assert PICTURE in seen(engine)
        returned = result("look", {"output": "Screen"}, id="c", parts=[picture(), {"fileData": {"fileUri": "u"}}])
        await prompt_of(service, [HI, model(call("look", id="c")), user(returned)])
        assert PICTURE in seen(engine)
        sound = {"inlineData": {"mimeType": "audio/wav", "data": base64.b64encode(wav(tone(0.5))).decode()}}
        await prompt_of(service, [user(sound)])
        assert len(seen(engine)) == 3
        response = await service.post(PATH, {"contents": [user(picture(data="AAAA"))]})
        assert "`contents[0].parts[0].inlineData.data`" in (await response.json())["error"]["message"]


async def test_pictures_in_results_are_words_for_a_model_that_does_not_see(service: Service) -> None:
    returned = result("look", {"output": "Screen"}, id="c", parts=[picture(), {"fileData": {"fileUri": "u"}}])
    prompt = await prompt_of(service, [HI, model(call("look", id="c")), user(returned)])
    assert "[tool]Screen\n[image]\n[file]<c>" in prompt
