"""Anthropic's Messages API: the prompts that requests become, and the replies, whole and streamed."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from caravan_proto.messages.constraint import ConstraintKind
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.errors import GenerationError
from caravan_testing.http_server import Service, named_events, serving
from caravan_testing.scripted_engine import MODEL, ScriptedEngine, letters, word

# Knows tools and thoughts, which the model opens itself.
TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools><tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }} "
    "{{ c.function.arguments | tojson }} {{ c.id }}){% endfor %}{% if m.tool_call_id %}<{{ m.tool_call_id }}>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "d", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
THOUGHTFUL = f"<think>\nHm, Łódź.\n</think>\n\nLet me look.\n{CALL}"


@pytest.fixture
def engine() -> ScriptedEngine:
    model = replace(MODEL, chat_template=TEMPLATE, max_sequence_tokens=4096)
    return ScriptedEngine(model=model, script=lambda _: letters("Yes so"))


def text_of(engine: ScriptedEngine) -> str:
    return "".join(chr((token_id - 100) % 800) for token_id in engine.spec.prompt[1:])


async def create(service: Service, messages: Any = HI, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply("/v1/messages", {"max_tokens": 100, "messages": messages, **body})
    return reply


async def stream(service: Service, messages: Any = HI, **body: Any) -> list[dict[str, Any]]:
    """Return the data of all events, whose names must be their types."""
    sent = {"max_tokens": 100, "messages": messages, "stream": True, **body}
    response = await service.post("/v1/messages?beta=true", sent)
    assert response.status == 200, await response.text()
    assert response.content_type == "text/event-stream"
    return named_events(await response.text())


async def refused(service: Service, body: dict[str, Any], path: str = "/v1/messages") -> dict[str, Any]:
    response = await service.post(path, {"max_tokens": 100, "messages": HI, **body}, X_Request_Id="abc")
    assert response.status == 400, await response.text()
    reply = await response.json()
    assert (reply["type"], reply["request_id"]) == ("error", "abc")
    assert response.headers["request-id"] == "abc"
    error: dict[str, Any] = reply["error"]
    assert error["type"] == "invalid_request_error"
    return error


def blocks_of(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the blocks of a stream together as Anthropic's clients do."""
    blocks: list[dict[str, Any]] = []
    open_index: int | None = None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                assert event["index"] == len(blocks)
                open_index = event["index"]
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == open_index
                for field, value in event["delta"].items():
                    name = "json" if field == "partial_json" else field
                    if field != "type":
                        blocks[-1][name] += value
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
            case _:
                pass
    assert open_index is None
    for block in blocks:
        if text := block.pop("json"):
            block["input"] = msgspec.json.decode(text)
    return blocks


# -- replies


async def test_a_whole_reply(service: Service, engine: ScriptedEngine) -> None:
    engine.cached_tokens = lambda _: 4
    reply = await create(service, model="claude-any")
    assert reply.pop("id").startswith("msg_")
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [{"type": "text", "text": "Yes so"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("[user]hi[assistant]") + 1 - 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 3,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }
    assert text_of(engine) == "[user]hi[assistant]"


async def test_the_events_of_a_stream_come_in_order(service: Service, engine: ScriptedEngine) -> None:
    engine.cached_tokens = lambda _: 4
    events = await stream(service)
    assert [event["type"] for event in events] == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[2] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert events[3] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Yes"}}
    assert events[6]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    usage = events[6]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (16, 4, 3)


async def test_thoughts_text_and_calls_are_blocks_whole_and_streamed(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters(THOUGHTFUL)
    whole = await create(service, tools=[WEATHER])
    thought, text, call = whole["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hm, Łódź.")
    assert len(thought["signature"]) == 32
    assert text == {"type": "text", "text": "Let me look."}
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Łódź"}}
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] == 3
    events = await stream(service, tools=[WEATHER])
    blocks = blocks_of(events)
    assert blocks[2].pop("id").startswith("toolu_")
    assert blocks == [thought, text, call]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[2]["input"] == {}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_call_that_is_cut_off_is_text_in_a_whole_reply(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [*letters(CALL[:55])[:-1], word("x", finish=FinishReason.LENGTH)]
    reply = await create(service, tools=[WEATHER])
    [block] = reply["content"]
    assert (block["type"], reply["stop_reason"]) == ("text", "max_tokens")
    assert block["text"].startswith('{"name": "weather", "arguments": {')
    events = await stream(service, tools=[WEATHER])
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert [event["type"] for event in events].count("content_block_stop") == 1


async def test_several_calls_are_several_blocks(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters(CALL + CALL)
    assert [block["type"] for block in (await create(service, tools=[WEATHER]))["content"]] == ["tool_use"] * 2
    assert len({block["id"] for block in blocks_of(await stream(service, tools=[WEATHER]))}) == 2
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len((await create(service, tools=[WEATHER], tool_choice=choice))["content"]) == 1


async def test_a_stop_sequence_is_named(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters("<think>no, no</think>One, two, three")
    for sequences, text, found in ((["two", " th"], "One, ", "two"), ([", three", "x"], "One, two", ", three")):
        reply = await create(service, stop_sequences=sequences)
        assert reply["content"][-1]["text"] == text
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", found)
        events = await stream(service, stop_sequences=sequences)
        assert blocks_of(events)[-1]["text"] == text
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": found}
    assert (await create(service, stop_sequences=["no"]))["stop_reason"] == "end_turn"


async def test_the_length_is_a_stop_reason_and_is_clamped(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [word("Hi", finish=FinishReason.LENGTH)]
    reply = await create(service, max_tokens=1_000_000)
    assert reply["stop_reason"] == "max_tokens"
    assert engine.spec.stopping.max_new_tokens == 4096 - len(engine.spec.prompt)


async def test_an_error_in_a_stream_is_an_event(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [word("Hi"), GenerationError("the shard is lost")]
    events = await stream(service)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"] == {
        "type": "api_error",
        "message": "Request failed during generation: the shard is lost",
    }
    assert len(events[-1]["request_id"]) > 10


# -- prompts


async def test_system_texts_and_blocks_lose_the_billing_line(service: Service, engine: ScriptedEngine) -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1; cch=8f2a1;"
    cache = {"type": "ephemeral"}
    for system, expected in (
        ("Be brief.", "[system]Be brief."),
        (f"{billing}\nBe brief.", "[system]Be brief."),
        ([{"type": "text", "text": billing}, {"type": "text", "text": "A", "cache_control": cache}], "[system]A"),
        ([{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], "[system]A\nB"),
        (f"Say {billing}", f"[system]Say {billing}"),
        (billing, ""),
        ([], ""),
    ):
        await create(service, system=system)
        assert text_of(engine) == f"{expected}[user]hi[assistant]"


async def test_calls_and_results_become_turns(service: Service, engine: ScriptedEngine) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "A"}}
    thinking = {"type": "thinking", "thinking": "T.", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Sun"}]}
    turns = [
        *HI,
        {"role": "assistant", "content": [thinking, {"type": "redacted_thinking", "data": "x"}, use]},
        {"role": "user", "content": [{"type": "text", "text": "So?"}, result]},
    ]
    await create(service, turns, tools=[WEATHER])
    assert text_of(engine) == (
        "<tools>weather </tools><tool_call>[user]hi[assistant]<think>T.</think>"
        '(weather {"city": "A"} toolu_1)[tool]Sun<toolu_1>[user]So?[assistant]'
    )
    turns[2] = {"role": "user", "content": [result | {"content": "Rain", "is_error": True}]}
    await create(service, turns, tools=[WEATHER])
    assert text_of(engine).endswith("[tool]Error: Rain<toolu_1>[assistant]")


async def test_pictures_in_results_are_shown_as_words(service: Service, engine: ScriptedEngine) -> None:
    parts = [{"type": "text", "text": "See:"}, {"type": "image", "source": {}}, {"type": "document", "source": {}}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": parts}
    await create(service, [*HI, {"role": "assistant", "content": "A"}, {"role": "user", "content": [result]}])
    assert "See:\n[image]\n[document]" in text_of(engine)


async def test_system_messages_join_their_neighbours(service: Service, engine: ScriptedEngine) -> None:
    turns = [
        {"role": "system", "content": "S1"},
        *HI,
        {"role": "system", "content": "S2"},
        {"role": "assistant", "content": "A"},
        {"role": "ctx", "content": [{"type": "text", "text": "S3"}]},
        {"role": "user", "content": "ho"},
    ]
    await create(service, turns)
    assert text_of(engine) == "[user]S1\n\nhi\n\nS2[assistant]A[user]S3\n\nho[assistant]"


async def test_a_last_message_of_the_assistant_is_continued(service: Service, engine: ScriptedEngine) -> None:
    await create(service, [*HI, {"role": "assistant", "content": "Well, "}])
    assert text_of(engine) == "[user]hi[assistant]Well, "


async def test_the_choice_of_tools(service: Service, engine: ScriptedEngine) -> None:
    await create(service, tools=[WEATHER], tool_choice={"type": "any"})
    assert engine.spec.constraint is not None
    assert engine.spec.constraint.kind is ConstraintKind.LARK
    await create(service, tools=[WEATHER | {"type": "custom"}], tool_choice={"type": "tool", "name": "weather"})
    assert engine.spec.constraint is not None
    await create(service, tools=[WEATHER], tool_choice={"type": "none"})
    assert "weather" not in text_of(engine)
    await create(service, tools=[WEATHER], tool_choice={"type": "auto"})
    assert engine.spec.constraint is None
    await create(service, tools=[WEATHER | {"strict": True}], tool_choice={"type": "auto"})
    assert engine.spec.constraint is not None
    await create(service, tool_choice={"type": "auto"})


async def test_thinking_is_bounded_or_switched_off(service: Service, engine: ScriptedEngine) -> None:
    await create(service, thinking={"type": "enabled", "budget_tokens": 2000})
    assert text_of(engine).endswith("[assistant]<think>")
    assert engine.spec.thought is not None
    assert engine.spec.thought.max_tokens == 2000
    await create(service, thinking={"type": "adaptive"})
    assert engine.spec.thought is None
    await create(service, thinking={"type": "disabled"})
    assert text_of(engine).endswith("[assistant]<think>\n\n</think>\n\n")
    engine.model = replace(engine.model, chat_template=TEMPLATE + "{{ reasoning_effort }}")
    await create(service, output_config={"effort": "high"})
    assert text_of(engine).endswith("high")
    # A model that does not think ignores what it is asked: Claude Code asks every model.
    engine.model = replace(engine.model, chat_template=PLAIN)
    await create(service, thinking={"type": "enabled", "budget_tokens": 2000}, output_config={"effort": "max"})
    assert engine.spec.thought is None


async def test_an_output_format_is_a_constraint(service: Service, engine: ScriptedEngine) -> None:
    asked = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_format": asked}, {"output_config": {"format": asked}}):
        await create(service, **fields)
        assert engine.spec.constraint is not None
        assert engine.spec.constraint.kind is ConstraintKind.JSON_SCHEMA


async def test_sampling_and_serving_fields(service: Service, engine: ScriptedEngine) -> None:
    await create(service, temperature=0, top_p=0.5, top_k=7, priority=-3)
    sampling = engine.spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert engine.spec.priority == -3


# -- what is ignored, refused and asked beside


async def test_unknown_fields_are_ignored_and_logged_once(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "caravan_router.http.server.ignored"):
        for _ in range(2):
            await create(service, metadata={"user_id": "u"}, betas=["x"], **{"f" * 100: 1})
    ignored = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert sorted(ignored) == [
        "ignored 'betas' in /v1/messages",
        f"ignored '{'f' * 60}' in /v1/messages",
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"mcp_servers": [{"url": "u"}]}, "`mcp_servers` is not supported"),
        ({"container": "c"}, "`container` is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "`tools[0].type` is not supported"),
        ({"tools": [{"type": "custom"}]}, "`tools[0].name` is missing"),
        ({"thread": {"type": "create"}}, "`thread` is not supported"),
        ({"tools": [], "tool_choice": {"type": "any"}}, "`tool_choice` may be set only when `tools` has functions"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "`tool_choice` may be set only when `tools` has functions"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "`tool_choice.name` is missing"),
        ({"tools": [{"name": "a b"}]}, "`tools[0].function.name`"),
        ({"system": [{"type": "image"}]}, "`system[0]` must be text"),
        ({"max_tokens": 0}, "`max_tokens` must be strictly positive"),
        ({"max_tokens": None}, "Expected `int`"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "`thinking.budget_tokens` must be strictly positive"),
        ({"messages": []}, "`messages` cannot be empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "Invalid enum value"),
        ({"temperature": -1}, "`temperature`"),
        ({"stop_sequences": ["a"] * 65}, "stop sequences"),
    ],
)
async def test_what_changes_the_meaning_is_refused_by_name(
    service: Service, body: dict[str, Any], message: str
) -> None:
    assert message in (await refused(service, body))["message"]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_client_is_told_to_send_all_messages(service: Service, thread: dict[str, str]) -> None:
    """The tool runner of Anthropic's package sends the first of these by itself, and looks for the code."""
    error = await refused(service, {"thread": thread})
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "details" not in await refused(service, {"temperature": -1})


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "image", "source": {"type": "base64", "data": "AAAA"}}, "type 'image'"),
        ({"type": "document", "source": {}}, "type 'document'"),
        ({"type": "text"}, "`messages[0].content[0].text` is missing"),
        (
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "x"}]},
            "content[0].content[0]` must be text",
        ),
        ({"type": "thinking", "thinking": "x"}, "type 'thinking'"),
    ],
)
async def test_blocks_that_are_no_text_are_refused(service: Service, block: dict[str, Any], message: str) -> None:
    error = await refused(service, {"messages": [{"role": "user", "content": [block]}]})
    assert message in error["message"]


async def test_tokens_are_counted_as_they_are_sent(service: Service, engine: ScriptedEngine) -> None:
    body = {"messages": HI, "system": "Be brief.", "tools": [WEATHER]}
    counted = await service.reply("/v1/messages/count_tokens", body)
    reply = await create(service, **body)
    assert counted == {"input_tokens": reply["usage"]["input_tokens"]}
    assert not (await refused(service, {"messages": []}, "/v1/messages/count_tokens"))["message"].startswith("Internal")


async def test_errors_have_anthropics_types(engine: ScriptedEngine) -> None:
    engine.expected = ("scripted",)
    async with serving(engine) as service:
        response = await service.post("/v1/messages", {"model": "other", "max_tokens": 1, "messages": HI})
        assert (response.status, (await response.json())["error"]["type"]) == (404, "not_found_error")
        response = await service.client.get("/v1/messages")
        assert (response.status, (await response.json())["error"]["type"]) == (405, "invalid_request_error")
        response = await service.client.get("/v1/messages/none")
        assert (response.status, (await response.json())["error"]["type"]) == (404, "not_found_error")
        engine.joined = False
        response = await service.post("/v1/messages", {"max_tokens": 1, "messages": HI})
        assert (response.status, (await response.json())["error"]["type"]) == (503, "overloaded_error")


async def test_claude_code_probes_with_head(service: Service, engine: ScriptedEngine) -> None:
    assert (await service.client.head("/")).status == 200
    engine.healthy = False
    assert (await service.client.head("/")).status == 503
