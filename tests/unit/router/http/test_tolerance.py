"""Fields that agents and other clients send, by dialect: none fails a request that is good without it."""

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from caravan_dialects.api.limits import Limits
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine, count_up

HEADER = "X-Caravan-Ignored"
HI = [{"role": "user", "content": "hi"}]
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": HI, "max_tokens": 2})
COMPLETIONS: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "hi", "max_tokens": 2})
GENERATE: tuple[str, dict[str, Any]] = ("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 2}})
MESSAGES: tuple[str, dict[str, Any]] = ("/v1/messages", {"model": "any", "max_tokens": 2, "messages": HI})
RESPONSES: tuple[str, dict[str, Any]] = ("/v1/responses", {"input": "hi", "max_output_tokens": 2})
LLAMA: tuple[str, dict[str, Any]] = ("/completion", {"prompt": "hi", "n_predict": 2})
INFILL: tuple[str, dict[str, Any]] = ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 2})
GEMINI: tuple[str, dict[str, Any]] = (
    "/v1beta/models/any:generateContent",
    {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 2}},
)
OLLAMA_CHAT: tuple[str, dict[str, Any]] = ("/api/chat", {"model": "any", "stream": False, "messages": HI})
OLLAMA_GENERATE: tuple[str, dict[str, Any]] = ("/api/generate", {"model": "any", "stream": False, "prompt": "hi"})
OLLAMA_EMBED: tuple[str, dict[str, Any]] = ("/api/embed", {"model": "any", "input": "hi"})
EMBEDDINGS: tuple[str, dict[str, Any]] = ("/v1/embeddings", {"input": "hi"})
RERANK: tuple[str, dict[str, Any]] = ("/v1/rerank", {"query": "hi", "documents": ["a"]})
Route = tuple[str, dict[str, Any]]

CALL = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
OLLAMA_CALL = {
    "type": "function",
    "index": 0,
    "id": "c",
    "function": {"name": "f", "arguments": {}, "description": "d", "index": 0},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OPENAI_FIELDS = (
    "store", "metadata", "safety_identifier",
    "verbosity", "moderation", "cache_control", "client_metadata", "provider", "transforms", "plugins",
)  # fmt: skip
OLLAMA_OPTIONS = {
    "num_keep": 5, "penalize_newline": True, "numa": False, "num_batch": 2, "num_gpu": 1, "main_gpu": 0,
    "use_mmap": True, "num_thread": 8, "use_mlock": False, "low_vram": False, "tfs_z": 0.5, "f16_kv": True,
    "vocab_only": False, "logits_all": False, "draft_num_predict": 4,
}  # fmt: skip

# The route, the fields, and the paths that the reply names.
IGNORED: list[tuple[Route, dict[str, Any], list[str]]] = [
    *((route, {name: "x"}, [name]) for route in (CHAT, COMPLETIONS) for name in OPENAI_FIELDS),
    # pi
    (CHAT, {"store": False, "reasoning_effort": None, "tools": [TOOL], "stream_options": None}, ["store"]),
    (CHAT, {"store": True}, ["store"]),
    (CHAT, {"user": "u"}, ["user"]),
    (CHAT, {"modalities": ["text"], "audio": None, "functions": [], "web_search_options": None}, []),
    (CHAT, {"id_slot": 3, "cache_prompt": True, "timings_per_token": False, "return_progress": False}, ["id_slot"]),
    (CHAT, {"messages": [{"role": "user", "id": "m", "content": [
        {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]},
     ["messages[0].id", "messages[0].content[0].cache_control"]),
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL | {"x": 1}],
                              "annotations": [], "refusal": None, "reasoning_details": [{}]},
                         {"role": "tool", "tool_call_id": "c", "name": "f", "content": "r", "metadata": {}}]},
     ["messages[1].tool_calls[0].x", "messages[1].reasoning_details", "messages[2].metadata",
      "messages[1].annotations"]),
    (CHAT, {"tools": [{**TOOL, "cache_control": {}, "function": {**TOOL["function"], "x": 1}}]},  # type: ignore[dict-item]
     ["tools[0].cache_control", "tools[0].function.x"]),
    (CHAT, {"response_format": {"type": "json_object", "x": 1}}, ["response_format.x"]),
    (CHAT, {"lang_ko": 1, "null_is_nothing": None, "chat_template_kwargs": {}}, ["lang_ko"]),
    (GENERATE, {"x": 1, "parameters": {"max_new_tokens": 2, "use_cache": True, "nope": None}},
     ["x", "parameters.use_cache"]),
    (MESSAGES, {"betas": ["a"], "messages": [{"role": "user", "content": [
        {"type": "text", "text": "hi", "citations": []}]}]}, ["betas", "messages[0].content[0].citations"]),
    (GEMINI, {"safetySettings": [{"category": "C"}], "labels": {}, "x": 1, "tools": [{"googleSearch": {}, "y": 1}],
              "generationConfig": {"speechConfig": {}, "max_output_tokens": 3, "z_z": 1},
              "contents": {"parts": {"text": "hi", "mediaResolution": {}}}},
     ["safetySettings", "labels", "x", "tools[0].y", "tools[0].googleSearch", "generationConfig.speechConfig",
      "generationConfig.z_z", "contents.parts.mediaResolution"]),
    (RESPONSES, {"generate_pictures": True, "reasoning": {"context": "all"}},
     ["generate_pictures", "reasoning.context"]),
    (LLAMA, {"cache": True, "id_slot": 1, "n_keep": 2}, ["cache", "id_slot", "n_keep"]),
    (OLLAMA_CHAT, {"user": "u", "metadata": {}, "tool_choice": "auto", "context": [1]},
     ["user", "metadata", "context"]),
    (OLLAMA_CHAT, {"messages": [*HI, {"role": "assistant", "content": "", "id": "m", "tool_calls": [OLLAMA_CALL]},
                                {"role": "tool", "content": "r", "name": "f"}]},
     ["messages[1].id", "messages[1].tool_calls[0].type", "messages[1].tool_calls[0].index",
      "messages[1].tool_calls[0].function.description", "messages[1].tool_calls[0].function.index"]),
    (OLLAMA_GENERATE, {"options": OLLAMA_OPTIONS}, [f"options.{name}" for name in OLLAMA_OPTIONS]),
    (OLLAMA_GENERATE, {"options": {"num_ctx": 1 << 20}}, []),
    # LangChain
    (OLLAMA_EMBED, {"options": {"num_gpu": None, "num_thread": None, "tfs_z": None, "num_ctx": 1 << 20}}, []),
    (EMBEDDINGS, {"input_type": "query", "user": "u"}, ["input_type", "user"]),
    (RERANK, {"max_tokens_per_doc": 5}, ["max_tokens_per_doc"]),
]  # fmt: skip


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=CHAT_MODEL, script=lambda spec: count_up(spec)[-3:])


@pytest.fixture
async def service(engine: ScriptedEngine) -> AsyncIterator[Service]:
    async with serving(engine) as running:
        yield running


@pytest.mark.parametrize(("route", "fields", "ignored"), IGNORED)
async def test_harmless_fields_are_ignored_and_named(
    service: Service, route: Route, fields: dict[str, Any], ignored: list[str]
) -> None:
    response = await service.post(route[0], route[1] | fields)
    assert response.status == 200, await response.text()
    assert sorted(path for path in response.headers.get(HEADER, "").split(", ") if path) == sorted(ignored)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, MESSAGES, RESPONSES, LLAMA, OLLAMA_CHAT])
async def test_streams_name_them_too_and_the_log_once(
    service: Service, caplog: pytest.LogCaptureFixture, route: Route
) -> None:
    with caplog.at_level(logging.INFO, "caravan_router.http.server.ignored"):
        for _ in range(2):
            response = await service.post(route[0], route[1] | {"stream": True, "x": 1})
            assert (response.status, response.headers[HEADER]) == (200, "x")
            await response.read()
    assert [record.getMessage() for record in caplog.records] == [f"ignored 'x' in {route[0]}"]


async def test_replies_name_the_tier_that_was_used(service: Service) -> None:
    async def used(route: Route, **fields: Any) -> Any:
        reply = await (await service.post(route[0], route[1] | fields)).json()
        return reply["usage"]["service_tier"] if route is MESSAGES else reply.get("service_tier")

    for tier, name in (("auto", "default"), ("flex", "flex"), ("fast", "priority"), ("unheard of", "default")):
        assert await used(CHAT, service_tier=tier) == await used(RESPONSES, service_tier=tier) == name
    assert await used(CHAT) is None
    assert await used(MESSAGES, service_tier="standard_only") == "standard"
    assert await used(MESSAGES, priority=10) == "priority"
    assert await used(MESSAGES, priority=-100) == "batch"


async def test_a_refusal_names_them_too(service: Service) -> None:
    response = await service.post(CHAT[0], CHAT[1] | {"x": 1, "top_p": 9})
    assert (response.status, response.headers[HEADER]) == (400, "x")


async def test_the_header_is_plain_and_short(service: Service) -> None:
    names = ["a b", "ä", "c\r\nd: e", "f,g", "h" * 5000]
    header = (await service.post(CHAT[0], CHAT[1] | dict.fromkeys(names, 1))).headers[HEADER]
    assert header == ", ".join(["a%20b", "%C3%A4", "c%0D%0Ad:%20e", "f%2Cg", "h" * 120])
    many = (await service.post(CHAT[0], CHAT[1] | {f"{n:x<90}": 1 for n in range(60)})).headers[HEADER]
    assert len(many) <= 1024
    assert many.endswith(", ...")


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"functions": [{"name": "f"}]}),
        (CHAT, {"function_call": "auto"}),
        (CHAT, {"modalities": ["text", "audio"]}),
        (CHAT, {"audio": {"voice": "a"}}),
        (CHAT, {"web_search_options": {}}),
        (CHAT, {"prompt_logprobs": 0}),
        (CHAT, {"echo": True}),
        (CHAT, {"documents": [{"text": "a"}]}),
        (CHAT, {"chat_template": "{{ 1 }}"}),
        (CHAT, {"guideline": "g"}),
        (CHAT, {"bad_words": ["a"]}),
        (COMPLETIONS, {"allowed_token_ids": [1]}),
        (COMPLETIONS, {"truncate_prompt_tokens": 5}),
        (COMPLETIONS, {"return_tokens_as_token_ids": True}),
        (COMPLETIONS, {"regex": "a"}),
        (COMPLETIONS, {"ebnf": "root ::= x"}),
        (COMPLETIONS, {"structural_tag": "{}"}),
        (COMPLETIONS, {"lora": [{"id": 0, "scale": 1.0}]}),
        (LLAMA, {"post_sampling_probs": True}),
        (GENERATE, {"parameters": {"watermark": True}}),
    ],
)
async def test_fields_that_change_the_answer_are_refused_by_name(
    service: Service, route: Route, fields: dict[str, Any]
) -> None:
    response = await service.post(route[0], route[1] | fields)
    [name] = fields.get("parameters", fields)
    assert response.status in {400, 422}
    assert f"`{name}` is not supported" in await response.text()


async def test_the_operator_may_want_to_know_of_them(engine: ScriptedEngine) -> None:
    async with serving(engine, Limits(strict_fields=True)) as service:
        for route in (CHAT, COMPLETIONS, GENERATE, LLAMA, OLLAMA_CHAT, EMBEDDINGS, RERANK):
            response = await service.post(route[0], route[1] | {"x": 1})
            assert response.status in {400, 422}, route
            assert "unknown field `x`" in await response.text()
        for route in (MESSAGES, RESPONSES):
            response = await service.post(route[0], route[1] | {"x": 1})
            assert (response.status, response.headers[HEADER]) == (200, "x")
        response = await service.post(CHAT[0], CHAT[1] | {"user": "u", "seed": 2.0})
        assert (response.status, response.headers[HEADER]) == (200, "user")


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"max_tokens": 2.0, "seed": 3.0, "top_k": 40.0, "n": 1.0, "logit_bias": {"5": 1}}),
        (COMPLETIONS, {"prompt": [5.0, 6], "max_tokens": 2.0, "logprobs": 1.0}),
        (GENERATE, {"parameters": {"max_new_tokens": 2.0, "top_k": 5.0}}),
        (MESSAGES, {"max_tokens": 2.0, "top_k": 5.0}),
        (RESPONSES, {"max_output_tokens": 2.0}),
        (LLAMA, {"n_predict": 2.0, "prompt": [5.0, "a"], "logit_bias": [[5.0, 1]]}),
        (OLLAMA_CHAT, {"options": {"num_predict": 2.0, "seed": 1.0}}),
        (OLLAMA_EMBED, {"dimensions": 4.0}),
    ],
)
async def test_whole_numbers_may_have_a_decimal_point(service: Service, route: Route, fields: dict[str, Any]) -> None:
    response = await service.post(route[0], route[1] | fields)
    assert response.status == 200, await response.text()


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, LLAMA])
async def test_other_numbers_may_not(service: Service, route: Route) -> None:
    response = await service.post(route[0], route[1] | {"top_k": 2.5})
    assert (response.status, (await response.json())["error"]["param"]) == (400, "top_k")


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"max_tokens": -1}),
        (CHAT, {"max_tokens": None, "max_completion_tokens": -1}),
        (CHAT, {"max_tokens": -1, "max_completion_tokens": -1}),
        (CHAT, {"max_tokens": None, "n_predict": -1}),
        (COMPLETIONS, {"max_tokens": -1}),
        (COMPLETIONS, {"max_tokens": None, "n_predict": -1}),
        (LLAMA, {"n_predict": -1}),
        (OLLAMA_CHAT, {"options": {"num_predict": -1}}),
    ],
)
async def test_no_limit_means_all_that_fits(
    service: Service, engine: ScriptedEngine, route: Route, fields: dict[str, Any]
) -> None:
    response = await service.post(route[0], route[1] | fields)
    assert response.status == 200, await response.text()
    spec = engine.streams[0].spec
    assert spec.stopping.max_new_tokens == CHAT_MODEL.max_sequence_tokens - len(spec.prompt)


async def test_no_limit_leaves_room_for_the_longest_prompt(service: Service, engine: ScriptedEngine) -> None:
    await service.reply("/v1/completions", {"prompt": ["a", "abcd"], "max_tokens": -1})
    assert {stream.spec.stopping.max_new_tokens for stream in engine.streams} == {256 - 5}


async def test_numbers_that_contradict_no_limit_are_refused(service: Service) -> None:
    for fields in ({"max_tokens": -1, "max_completion_tokens": 5}, {"max_tokens": 3, "n_predict": -1}):
        response = await service.post(CHAT[0], CHAT[1] | fields)
        assert (response.status, "must not differ" in await response.text()) == (400, True)
    response = await service.post(CHAT[0], CHAT[1] | {"max_tokens": -2})
    assert "strictly positive" in await response.text()


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"seed": -1}),
        (COMPLETIONS, {"seed": -1}),
        (COMPLETIONS, {"choice_parameters": [{"seed": -1}]}),
        (RESPONSES, {"seed": -1}),
        (GENERATE, {"parameters": {"seed": -1, "do_sample": True}}),
        (LLAMA, {"seed": -1}),
        (OLLAMA_CHAT, {"options": {"seed": -1}}),
    ],
)
async def test_the_seed_that_means_random(
    service: Service, engine: ScriptedEngine, route: Route, fields: dict[str, Any]
) -> None:
    for _ in range(2):
        await service.reply(route[0], route[1] | fields)
    first, second = (stream.spec.sampling.seed for stream in engine.streams)
    assert first != second


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, LLAMA])
async def test_names_of_llama_server(service: Service, engine: ScriptedEngine, route: Route) -> None:
    body = {name: value for name, value in route[1].items() if name not in {"max_tokens", "n_predict"}}
    await service.reply(route[0], body | {"n_predict": 3, "repeat_penalty": 1.5})
    spec = engine.streams[-1].spec
    assert (spec.stopping.max_new_tokens, spec.sampling.repetition_penalty) == (3, 1.5)
    await service.reply(route[0], body | {"cache_prompt": True})
    assert engine.streams[-1].spec.namespace == spec.namespace
    await service.reply(route[0], body | {"cache_prompt": False})
    assert engine.streams[-1].spec.namespace != spec.namespace
    response = await service.post(route[0], body | {"repeat_penalty": 1000})
    assert (await response.json())["error"]["param"] == "repeat_penalty"


@pytest.mark.parametrize(
    ("route", "field"),
    [(CHAT, "stop"), (COMPLETIONS, "stop"), (LLAMA, "stop"), (MESSAGES, "stop_sequences"), (OLLAMA_CHAT, "options")],
)
async def test_ten_stop_strings_are_few(service: Service, route: Route, field: str) -> None:
    stops = [f"s{n}" for n in range(10)]
    await service.reply(route[0], route[1] | {field: {"stop": stops} if field == "options" else stops})


async def test_the_operator_may_limit_stop_strings(engine: ScriptedEngine) -> None:
    for limits, most in ((Limits(), 4), (Limits(max_stop_sequences=6), 6)):
        async with serving(engine, limits) as service:
            assert (await (await service.client.get("/info")).json())["max_stop_sequences"] == most
            for count, status in ((most, 200), (most + 1, 422)):
                response = await service.post("/generate", {"inputs": "a", "parameters": {"stop": ["x"] * count}})
                assert response.status == status
    async with serving(engine, Limits(max_stop_sequences=1)) as service:
        assert (await service.post(CHAT[0], CHAT[1] | {"stop": ["x", "y"]})).status == 400


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("route", [OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_EMBED, LLAMA, ("/api/show", {"model": "any"})])
async def test_curl_need_not_name_json(service: Service, route: Route) -> None:
    for kind in (FORM, "text/plain;charset=UTF-8", "application/octet-stream"):
        response = await service.client.post(route[0], json=route[1], headers={"Content-Type": kind})
        assert response.status == 200, await response.text()
        # A browser sends these without asking first. Its pages have to send JSON, which it asks for.
        for origin in ("http://elsewhere.example", "null"):
            headers = {"Content-Type": kind, "Origin": origin}
            assert (await service.client.post(route[0], json=route[1], headers=headers)).status == 415
        headers = {"Content-Type": kind, "Origin": service.url}
        assert (await service.client.post(route[0], json=route[1], headers=headers)).status == 200
    headers = {"Content-Type": FORM}
    assert (await service.client.post(route[0], data=b"a=b", headers=headers)).status == 400
    assert (await service.client.post(CHAT[0], json=CHAT[1], headers=headers)).status == 415


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/api/tags", "/api/version"])
async def test_head_tells_whether_the_server_is_up(service: Service, path: str) -> None:
    async with service.client.head(path) as response:
        assert (response.status, await response.read()) == (200, b"")


async def test_ollama_takes_the_tools_choice(service: Service, engine: ScriptedEngine) -> None:
    await service.reply("/api/chat", OLLAMA_CHAT[1] | {"tools": [TOOL], "tool_choice": "required"})
    assert engine.streams[0].spec.constraint is not None


async def test_ollama_returns_log_probabilities(service: Service) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 2}}
    for path, body in (OLLAMA_CHAT, OLLAMA_GENERATE):
        reply = await service.reply(path, body | fields)
        assert [(one["token"], one["logprob"], len(one["top_logprobs"])) for one in reply["logprobs"]] == [
            (" w1", -0.5, 2),
            (" w2", -0.5, 2),
        ]
        assert "logprobs" not in await service.reply(path, body | {"options": {"num_predict": 2}})


async def test_llama_servers_schema_of_a_json_object(service: Service, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for asked in (named, {"type": "json_object", "schema": schema}, {"type": "json_schema", "schema": schema}):
        await service.reply(CHAT[0], CHAT[1] | {"response_format": asked})
    assert len({stream.spec.constraint for stream in engine.streams}) == 1
    both = {"type": "json_object", "schema": schema, "value": schema}
    assert (await service.post(CHAT[0], CHAT[1] | {"response_format": both})).status == 400


async def test_a_chat_is_never_stored(service: Service) -> None:
    for fields in ({}, {"store": False}, {"store": True}):
        assert (await service.reply(CHAT[0], CHAT[1] | fields))["store"] is False
