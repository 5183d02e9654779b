"""Google's Gemini API: replies whole and streamed, errors, counts, vectors and models."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.constraint import ConstraintKind
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.errors import GenerationError
from caravan_testing.http_server import Service, events, keys, serving
from caravan_testing.scripted_engine import (
    MODEL,
    FailingEmbedEngine,
    ScriptedEngine,
    count_up,
    length_vector,
    letters,
    word,
)

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools><tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{{ reasoning_effort }}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HI = [{"role": "user", "parts": [{"text": "hi"}]}]
SCHEMA = {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "d", "parameters": SCHEMA}
TOOLS = [{"functionDeclarations": [WEATHER]}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
THOUGHTFUL = f"<think>\nHm, Łódź.\n</think>\n\nLet me look.\n{CALL}"
THOUGHTS = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
PATH = "/v1beta/models/any"


@pytest.fixture
def engine() -> ScriptedEngine:
    model = replace(MODEL, chat_template=TEMPLATE, max_sequence_tokens=4096)
    return ScriptedEngine(model=model, script=lambda _: letters("Yes so"))


def text_of(engine: ScriptedEngine) -> str:
    return "".join(chr((token_id - 100) % 800) for token_id in engine.spec.prompt[1:])


async def generate(service: Service, contents: Any = HI, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply(f"{PATH}:generateContent", {"contents": contents, **body})
    return reply


async def configured(service: Service, **config: Any) -> dict[str, Any]:
    return await generate(service, generationConfig=config)


async def stream(service: Service, contents: Any = HI, **body: Any) -> list[dict[str, Any]]:
    path = f"{PATH}:streamGenerateContent?alt=sse"
    response = await service.post(path, {"contents": contents, **body})
    assert response.status == 200, await response.text()
    assert response.content_type == "text/event-stream"
    return events(await response.text())


async def listed(service: Service, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream that is a JSON list."""
    response = await service.post(f"{PATH}:streamGenerateContent", {"contents": HI, **body})
    assert response.status == 200, await response.text()
    assert response.content_type == "application/json"
    return await response.json()  # type: ignore[no-any-return]


async def refused(service: Service, body: dict[str, Any], method: str = "generateContent") -> str:
    response = await service.post(f"{PATH}:{method}", body)
    error = (await response.json())["error"]
    assert response.status == 400, error
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    return str(error["message"])


def parts_of(reply: dict[str, Any]) -> list[dict[str, Any]]:
    [candidate] = reply["candidates"]
    assert candidate["content"]["role"] == "model"
    return candidate["content"]["parts"]  # type: ignore[no-any-return]


# -- replies


async def test_a_whole_reply(service: Service, engine: ScriptedEngine) -> None:
    engine.cached_tokens = lambda _: 4
    reply = await generate(service)
    assert len(reply.pop("responseId")) > 10
    assert reply == {
        "candidates": [
            {"content": {"parts": [{"text": "Yes so"}], "role": "model"}, "finishReason": "STOP", "index": 0}
        ],
        "usageMetadata": {
            "promptTokenCount": len("[user]hi[assistant]") + 1,
            "candidatesTokenCount": 3,
            "totalTokenCount": len("[user]hi[assistant]") + 4,
            "cachedContentTokenCount": 4,
            "thoughtsTokenCount": 0,
        },
        "modelVersion": "scripted",
    }
    assert text_of(engine) == "[user]hi[assistant]"


async def test_a_stream_is_events_or_a_list_with_the_same_chunks(service: Service) -> None:
    for chunks in (await stream(service), await listed(service)):
        assert ["".join(part["text"] for part in parts_of(chunk)) for chunk in chunks] == ["Yes", " so", ""]
        reasons = [chunk["candidates"][0].get("finishReason") for chunk in chunks]
        assert reasons == [None, None, "STOP"]
        assert chunks[-1]["usageMetadata"]["candidatesTokenCount"] == 3
        assert len({chunk["responseId"] for chunk in chunks}) == 1


async def test_thoughts_text_and_calls_are_parts(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters(THOUGHTFUL)
    whole = await generate(service, tools=TOOLS, **THOUGHTS)
    thought, text, call = parts_of(whole)
    assert thought["thought"] is True
    assert (thought["text"].strip(), text) == ("Hm, Łódź.", {"text": "Let me look."})
    assert call["functionCall"].pop("id").startswith("call_")
    assert call == {"functionCall": {"name": "weather", "args": {"city": "Łódź"}}}
    assert whole["candidates"][0]["finishReason"] == "STOP"
    usage = whole["usageMetadata"]
    assert usage["thoughtsTokenCount"] == 3
    total = usage["promptTokenCount"] + usage["candidatesTokenCount"] + usage["thoughtsTokenCount"]
    assert usage["totalTokenCount"] == total
    chunks = await stream(service, tools=TOOLS, **THOUGHTS)
    parts = [part for chunk in chunks for part in parts_of(chunk)]
    assert "".join(part["text"] for part in parts if part.get("thought")) == thought["text"]
    texts = [part["text"] for part in parts if "text" in part and not part.get("thought")]
    assert "".join(texts) == "Let me look."
    [called] = [part["functionCall"] for part in parts if "functionCall" in part]
    assert called["args"] == {"city": "Łódź"}
    assert chunks[-1]["usageMetadata"] | {"cachedContentTokenCount": 0} == usage


async def test_thoughts_are_hidden_unless_they_are_asked_for(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters(THOUGHTFUL)
    reply = await generate(service, tools=TOOLS)
    assert [sorted(part) for part in parts_of(reply)] == [["text"], ["functionCall"]]
    assert reply["usageMetadata"]["thoughtsTokenCount"] == 3
    streamed = [part for chunk in await stream(service, tools=TOOLS) for part in parts_of(chunk)]
    assert "".join(part.get("text", "") for part in streamed) == "Let me look."


async def test_a_call_that_is_cut_off_is_text(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [*letters(CALL[:55])[:-1], word("x", finish=FinishReason.LENGTH)]
    [part] = parts_of(reply := await generate(service, tools=TOOLS))
    assert part["text"].startswith('{"name": "weather", "arguments": {')
    assert reply["candidates"][0]["finishReason"] == "MAX_TOKENS"
    last = (await stream(service, tools=TOOLS))[-1]
    assert last["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert parts_of(last) == [part]


async def test_several_calls_are_several_parts(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters(CALL + CALL)
    assert len(parts_of(await generate(service, tools=TOOLS))) == 2
    parts = [part for chunk in await stream(service, tools=TOOLS) for part in parts_of(chunk)]
    assert len({part["functionCall"]["id"] for part in parts if "functionCall" in part}) == 2


async def test_candidates_have_indices_and_are_counted_together(service: Service) -> None:
    reply = await configured(service, candidateCount=2)
    assert [candidate["index"] for candidate in reply["candidates"]] == [0, 1]
    assert reply["usageMetadata"]["candidatesTokenCount"] == 6
    for chunks in (
        await stream(service, generationConfig={"candidateCount": 2}),
        await listed(service, generationConfig={"candidateCount": 2}),
    ):
        texts = ["", ""]
        for chunk in chunks:
            [candidate] = chunk["candidates"]
            texts[candidate["index"]] += candidate["content"]["parts"][0]["text"]
        assert texts == ["Yes so"] * 2
        assert chunks[-1]["usageMetadata"]["candidatesTokenCount"] == 6


async def test_logprobs(engine: ScriptedEngine) -> None:
    engine.script = count_up
    async with serving(engine) as service:
        config = {"responseLogprobs": True, "logprobs": 2, "maxOutputTokens": 3}
        [candidate] = (await configured(service, **config))["candidates"]
        result = candidate["logprobsResult"]
        assert [one["token"] for one in result["chosenCandidates"]] == [" w1", " w2", " w3"]
        assert len(result["topCandidates"]) == 3
        assert engine.spec.sampling.logprobs
        chunks = await stream(service, generationConfig=config)
        chosen = [
            one["token"] for chunk in chunks for one in chunk["candidates"][0]["logprobsResult"]["chosenCandidates"]
        ]
        assert chosen == [" w1", " w2", " w3"]


async def test_stop_sequences_end_the_answer_alone(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters("<think>no, no</think>One, two, three")
    reply = await configured(service, stopSequences=["two", " th"])
    assert parts_of(reply)[-1]["text"] == "One, "
    assert reply["candidates"][0]["finishReason"] == "STOP"


async def test_the_number_of_tokens_is_clamped(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [word("Hi", finish=FinishReason.LENGTH)]
    for tokens in (1_000_000, None):
        reply = await configured(service, maxOutputTokens=tokens)
        assert reply["candidates"][0]["finishReason"] == "MAX_TOKENS"
        assert engine.spec.stopping.max_new_tokens == 4096 - len(engine.spec.prompt)
    await configured(service, maxOutputTokens=7)
    assert engine.spec.stopping.max_new_tokens == 7


async def test_an_error_in_a_stream_is_json_where_googles_packages_look(
    service: Service, engine: ScriptedEngine
) -> None:
    engine.script = lambda _: [word("Hi"), GenerationError("the shard is lost")]
    message = "Request failed during generation: the shard is lost"
    response = await service.post(f"{PATH}:streamGenerateContent?alt=sse", {"contents": HI})
    *_, last = (await response.text()).removesuffix("\n\n").split("\n\n")
    assert msgspec.json.decode(last) == {"error": {"code": 424, "message": message, "status": "INTERNAL"}}
    first, error = await listed(service)
    assert parts_of(first) == [{"text": "Hi"}]
    assert error == msgspec.json.decode(last)
    engine.script = lambda _: [GenerationError("the shard is lost")]
    assert await listed(service) == [error]


# -- fields


async def test_sampling_and_serving_fields(service: Service, engine: ScriptedEngine) -> None:
    config = {"temperature": 0.7, "topP": 0.5, "topK": 7.0, "presencePenalty": 0.5, "frequencyPenalty": 0.25, "seed": 9}
    for names in (config, {"temperature": 0.7, "top_p": 0.5, "top_k": 7} | {"presence_penalty": 0.5, "seed": 9}):
        await generate(service, generationConfig=names, priority=-3)
        sampling = engine.spec.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.5, 7)
        assert (sampling.presence_penalty, sampling.seed, engine.spec.priority) == (0.5, 9, -3)


async def test_fields_with_underscores_mean_the_same(service: Service, engine: ScriptedEngine) -> None:
    body = {"system_instruction": {"parts": {"text": "S"}}, "generation_config": {"max_output_tokens": 5}}
    tools = [{"function_declarations": [WEATHER]}]
    config = {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["weather"]}}
    await generate(service, tools=tools, tool_config=config, **body)
    assert text_of(engine) == "<tools>weather </tools><tool_call>[system]S[user]hi[assistant]"
    assert engine.spec.stopping.max_new_tokens == 5
    assert engine.spec.constraint is not None
    response = await service.post(f"{PATH}:generateContent", {"contents": HI, **body, "safety_settings": []})
    assert response.headers["X-Caravan-Ignored"] == "safetySettings"


async def test_thinking_is_bounded_or_switched_off(service: Service, engine: ScriptedEngine) -> None:
    await configured(service, thinkingConfig={"thinkingBudget": 2000})
    assert text_of(engine).endswith("[assistant]<think>")
    assert engine.spec.thought is not None
    assert engine.spec.thought.max_tokens == 2000
    await configured(service, thinkingConfig={"thinkingBudget": -1})
    assert engine.spec.thought is None
    await configured(service, thinkingConfig={"thinkingBudget": 0})
    assert text_of(engine).endswith("[assistant]<think>\n\n</think>\n\n")
    for level in ("HIGH", "high"):
        await configured(service, thinkingConfig={"thinkingLevel": level})
        assert "[assistant]high" in text_of(engine)
    await configured(service, thinkingConfig={"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"})
    # A model that does not think ignores what it is asked: Gemini CLI asks every model.
    engine.model = replace(engine.model, chat_template=PLAIN)
    await configured(service, thinkingConfig={"thinkingBudget": 8192, "thinkingLevel": "LOW", "includeThoughts": True})
    assert engine.spec.thought is None


@pytest.mark.parametrize(
    ("config", "kind", "source"),
    [
        ({"responseMimeType": "application/json"}, ConstraintKind.JSON_SCHEMA, '{"type":["object","array"]}'),
        ({"responseMimeType": "application/json", "responseSchema": SCHEMA}, ConstraintKind.JSON_SCHEMA, '"city"'),
        ({"responseSchema": {"type": "INTEGER"}}, ConstraintKind.JSON_SCHEMA, '{"type":"integer"}'),
        ({"responseJsonSchema": {"type": "integer"}}, ConstraintKind.JSON_SCHEMA, '{"type":"integer"}'),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a", "b+"]}},
            ConstraintKind.REGEX,
            r"a|b\+",
        ),
    ],
)
async def test_a_schema_is_a_constraint(
    service: Service, engine: ScriptedEngine, config: dict[str, Any], kind: ConstraintKind, source: str
) -> None:
    await configured(service, **config)
    assert engine.spec.constraint is not None
    assert engine.spec.constraint.kind is kind
    assert source in engine.spec.constraint.source
    await configured(service, responseMimeType="text/plain", responseModalities=["TEXT"])
    assert engine.spec.constraint is None


async def test_the_choice_of_functions(service: Service, engine: ScriptedEngine) -> None:
    tools = [{"functionDeclarations": [WEATHER, {"name": "time", "parametersJsonSchema": {"type": "object"}}]}]

    async def choose(mode: str, *allowed: str) -> bool:
        calling = {"mode": mode, "allowedFunctionNames": list(allowed)}
        await generate(service, tools=tools, toolConfig={"functionCallingConfig": calling})
        return engine.spec.constraint is not None

    assert await choose("ANY")
    assert "<tools>weather time </tools>" in text_of(engine)
    assert await choose("ANY", "time")
    assert "<tools>weather time </tools>" in text_of(engine)
    assert engine.spec.constraint is not None
    assert "weather" not in engine.spec.constraint.source
    assert not await choose("AUTO")
    assert not await choose("NONE")
    assert "weather" not in text_of(engine)
    assert await choose("VALIDATED", "time")
    assert "<tools>time </tools>" in text_of(engine)


async def test_tools_that_google_runs_are_left_out(service: Service, engine: ScriptedEngine) -> None:
    hosted: list[dict[str, Any]] = [{"googleSearch": {}}, {"codeExecution": {}}, {"urlContext": {}}]
    await generate(service, tools=hosted)
    assert text_of(engine) == "[user]hi[assistant]"
    await generate(service, tools=[*hosted, *TOOLS])
    assert "<tools>weather </tools>" in text_of(engine)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"contents": []}, "`contents` cannot be empty"),
        ({"contents": [{"role": "assistant", "parts": []}]}, "Invalid enum value"),
        ({"cachedContent": "cachedContents/x"}, "`cachedContent` is not supported"),
        ({"generationConfig": {"temperature": -1}}, "`generationConfig.temperature`"),
        ({"generationConfig": {"topP": 2}}, "`generationConfig.topP`"),
        ({"generationConfig": {"topK": -5}}, "`generationConfig.topK`"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "`generationConfig.maxOutputTokens` must be strictly positive"),
        ({"generationConfig": {"candidateCount": 0}}, "`generationConfig.candidateCount` must be > 0"),
        ({"generationConfig": {"logprobs": 2}}, "`generationConfig.logprobs` may be set only when `responseLogprobs`"),
        ({"generationConfig": {"responseLogprobs": True, "logprobs": 99}}, "`generationConfig.logprobs` must be >= 0"),
        ({"generationConfig": {"thinkingConfig": {"thinkingBudget": -2}}}, "thinkingConfig.thinkingBudget` must be"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "`generationConfig.responseModalities`"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseSchema is not valid"),
        ({"generationConfig": {"responseSchema": {}, "responseJsonSchema": {}}}, "cannot be used together"),
        ({"generationConfig": {"stopSequences": ["a"] * 65}}, "stop sequences"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "`tools[0].functionDeclarations[0].name` is missing"),
        ({"tools": [{"mcpServers": [{"name": "m"}]}]}, "`tools[0].mcpServers` is not supported"),
        ({"tools": [{"computerUse": {}}]}, "`tools[0].computerUse` is not supported"),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
            "`toolConfig.functionCallingConfig.mode` may be set only when `tools` has functions",
        ),
        (
            {"tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}}},
            "allowedFunctionNames` is not supported: leave it out, or use names of functions in `tools`. Given: 'x'",
        ),
        (
            {"tools": TOOLS, "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["weather"]}}},
            "allowedFunctionNames` may be set only when the `mode` is",
        ),
    ],
)
async def test_what_changes_the_meaning_is_refused_by_name(
    service: Service, body: dict[str, Any], message: str
) -> None:
    assert message in await refused(service, {"contents": HI} | body)
    assert message in await refused(service, {"contents": HI} | body, "streamGenerateContent?alt=sse")


async def test_other_forms_of_streams_are_refused(service: Service) -> None:
    assert "`alt` is not supported" in await refused(service, {"contents": HI}, "streamGenerateContent?alt=proto")


# -- counts, vectors, models


async def test_tokens_are_counted_as_they_are_sent(service: Service) -> None:
    body = {"contents": HI, "systemInstruction": {"parts": [{"text": "Be brief."}]}, "tools": TOOLS}
    expected = await generate(service, HI, **{key: body[key] for key in ("systemInstruction", "tools")})
    path = f"{PATH}:countTokens"
    for counted in (body, {"generateContentRequest": {"model": "models/any", **body}}):
        assert await service.reply(path, counted) == {"totalTokens": expected["usageMetadata"]["promptTokenCount"]}
    assert "`contents` is missing" in await refused(service, {}, "countTokens")
    both = {"contents": HI, "generateContentRequest": {"contents": HI}}
    assert "`contents` may be set only when" in await refused(service, both, "countTokens")


def text(content: str) -> dict[str, Any]:
    return {"content": {"parts": [{"text": content}]}, "taskType": "RETRIEVAL_QUERY"}


async def test_vectors(service: Service) -> None:
    one = await service.reply(f"{PATH}:embedContent", text("ab"))
    assert one == {"embedding": {"values": length_vector(3)}}
    several = await service.reply(f"{PATH}:batchEmbedContents", {"requests": [text("ab"), text("c")]})
    assert several == {"embeddings": [{"values": length_vector(3)}, {"values": length_vector(2)}]}
    short = await service.reply(f"{PATH}:embedContent", text("ab") | {"outputDimensionality": 4})
    values = short["embedding"]["values"]
    assert len(values) == 4
    assert sum(value * value for value in values) == pytest.approx(1)


@pytest.mark.parametrize(
    ("method", "body", "message"),
    [
        ("embedContent", {"content": {"parts": []}}, "`content` cannot be empty"),
        ("embedContent", text("a") | {"outputDimensionality": 9}, "`outputDimensionality` must be >= 1 and <= 8"),
        ("batchEmbedContents", {"requests": [text("a"), text("")]}, "`requests[1].content` cannot be empty"),
        ("batchEmbedContents", {"requests": [text("a")] * 3}, "maximum allowed batch size of 2. Given: 3"),
    ],
)
async def test_texts_that_cannot_be_embedded(
    engine: ScriptedEngine, method: str, body: dict[str, Any], message: str
) -> None:
    async with serving(engine, Limits(max_embed_texts=2)) as service:
        assert message in await refused(service, body, method)


async def test_shards_that_cannot_embed() -> None:
    async with serving(FailingEmbedEngine()) as service:
        response = await service.post(f"{PATH}:embedContent", text("a"))
        assert (await response.json())["error"]["status"] in {"INTERNAL", "UNAVAILABLE"}


async def test_the_list_of_models(service: Service) -> None:
    page = await (await service.client.get("/v1beta/models")).json()
    first, adapter = page["models"]
    assert first == {
        "name": "models/scripted",
        "baseModelId": "scripted",
        "version": "1",
        "displayName": "scripted",
        "supportedGenerationMethods": ["generateContent", "countTokens", "embedContent", "batchEmbedContents"],
        "inputTokenLimit": 4096,
        "outputTokenLimit": 4096,
    }
    assert adapter["name"] == "models/pirate"
    assert adapter["supportedGenerationMethods"] == ["generateContent", "countTokens"]
    assert await (await service.client.get("/v1beta/models/pirate")).json() == adapter
    page = await (await service.client.get("/v1beta/models?pageSize=1")).json()
    assert ([model["name"] for model in page["models"]], page["nextPageToken"]) == (["models/scripted"], "1")
    page = await (await service.client.get("/v1beta/models?pageSize=1&pageToken=1")).json()
    assert page == {"models": [adapter]}


@pytest.mark.parametrize("query", ["pageSize=0", "pageSize=-1", "pageSize=²", "pageToken=x"])
async def test_pages_that_are_none(service: Service, query: str) -> None:
    response = await service.client.get(f"/v1beta/models?{query}")
    assert (response.status, (await response.json())["error"]["status"]) == (400, "INVALID_ARGUMENT")


async def test_names_of_models_may_have_slashes_and_colons() -> None:
    engine = ScriptedEngine(model=replace(MODEL, name="org/name:Q4_1", chat_template=PLAIN))
    engine.expected = ("org/name:Q4_1",)
    async with serving(engine) as service:
        path = "/v1beta/models/org/name:Q4_1"
        assert (await service.reply(f"{path}:generateContent", {"contents": HI}))["modelVersion"] == "org/name:Q4_1"
        assert (await (await service.client.get(path)).json())["name"] == "models/org/name:Q4_1"


@pytest.mark.parametrize("header", ["x-goog-api-client", "x-goog-api-key"])
async def test_packages_ask_under_v1_since_version_3(service: Service, header: str) -> None:
    headers = {header: "any"}
    for path in ("/models", "/models/pirate", "/models?pageSize=0", "/models?pageSize=1"):
        replies = [await service.client.get(f"{version}{path}", headers=headers) for version in ("/v1", "/v1beta")]
        assert replies[0].status == replies[1].status == (400 if path.endswith("=0") else 200)
        assert await replies[0].json() == await replies[1].json()
    reply = await service.reply("/v1/models/any:generateContent", {"contents": HI})
    assert parts_of(reply) == [{"text": "Yes so"}]
    chunks = await service.events("/v1/models/any:streamGenerateContent?alt=sse", {"contents": HI})
    assert len(chunks) == 3
    assert (await service.reply("/v1/models/any:countTokens", {"contents": HI}))["totalTokens"] == 20
    assert await service.reply("/v1/models/any:embedContent", text("a"))
    assert await service.reply("/v1/models/any:batchEmbedContents", {"requests": [text("a")]})


async def test_a_refused_request_counts_for_the_model_in_the_path(engine: ScriptedEngine) -> None:
    other = ScriptedEngine(model=replace(MODEL, name="other", fingerprint="0" * 16, adapters=()))
    engine.others = [other]
    async with serving(engine) as service:
        bodies: list[Any] = [
            {"contents": []},
            {"contents": HI, "generationConfig": {"candidateCount": 0}},
            {"contents": 5},
        ]
        for body in bodies:
            assert (await service.post("/v1beta/models/other:generateContent", body)).status == 400
        lines = (await service.metrics.render()).decode().splitlines()
        counted = [line for line in lines if line.startswith("tgi_request_failure{") and 'err="validation"' in line]
        assert {line.rpartition(" ")[2] for line in counted if 'model="other"' in line} == {"3"}


# -- errors and keys


async def test_errors_have_googles_statuses(engine: ScriptedEngine) -> None:
    engine.expected = ("scripted",)

    async def error(service: Service, method: str, path: str) -> tuple[int, str]:
        response = await service.client.request(method, path, json={"contents": HI} if method == "POST" else None)
        found = (await response.json())["error"]
        assert found["code"] == response.status
        return response.status, found["status"]

    async with serving(engine) as service:
        assert await error(service, "POST", f"{PATH}:generateContent") == (404, "NOT_FOUND")
        assert await error(service, "GET", PATH) == (404, "NOT_FOUND")
        assert await error(service, "GET", "/v1beta/files") == (404, "NOT_FOUND")
        assert await error(service, "DELETE", "/v1beta/models") == (405, "UNIMPLEMENTED")
        engine.joined = False
        assert await error(service, "POST", "/v1beta/models/scripted:generateContent") == (503, "UNAVAILABLE")


async def test_keys_are_in_googles_header_or_in_the_url(engine: ScriptedEngine) -> None:
    async with serving(engine, access=keys("alice")) as service:
        for path, headers, status in (
            ("/v1beta/models", {"x-goog-api-key": "alice"}, 200),
            ("/v1beta/models?key=alice", {}, 200),
            ("/v1beta/models?key=alice", {"x-goog-api-key": "nope"}, 401),
            ("/v1beta/models?key=nope", {}, 401),
            ("/v1beta/models", {}, 401),
            # Keys in URLs get into logs: no other API asks for them.
            ("/v1/models?key=alice", {}, 401),
            ("/v1/models", {"x-goog-api-key": "alice"}, 200),
        ):
            assert (await service.client.get(path, headers=headers)).status == status, path
        response = await service.client.get("/v1beta/models")
        assert (await response.json())["error"]["status"] == "UNAUTHENTICATED"
