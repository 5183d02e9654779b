"""Thoughts are read apart from the answer in chat completions and in Ollama's routes."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from caravan_dialects.api.limits import Limits
from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_proto.messages.results import FinishReason
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_scheduler.core.generation import Tenant
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, MODEL, Pause, ScriptedEngine, Step, letters, word

# Shows earlier thoughts, as Qwen's templates do, and tools. The model opens its thoughts itself.
QWEN = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools><tool_call>{% endif %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens the thought in the prompt, as the templates of DeepSeek-R1 do.
DEEPSEEK = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
MAGISTRAL = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for b in m.content %}{{ '[THINK]' + b.thinking + '[/THINK]' if b.type == 'thinking' else b.text }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}"
    "<|end|><|start|>assistant{% endif %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# tools <|channel|>commentary #}"
)
SEED = "{% for m in messages %}{{ m.content }}{% endfor %}{# <seed:think> </seed:think> #}"
GRANITE = (
    "{{ 'Write your thoughts between <think></think> and your response between <response></response>.' }}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)

HI = [{"role": "user", "content": "hi"}]
THOUGHT, ANSWER = "Two and\n\n two.", "It is 4."
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def control(text: str) -> Step:
    return word(text, special=True)


CHANNEL, MESSAGE, END, START = map(control, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
HARMONY_THOUGHT = [CHANNEL, word("analysis"), MESSAGE, *letters(THOUGHT)[:-1], END, START, word("assistant")]

FAMILIES: list[tuple[str, Sequence[Step]]] = [
    (QWEN, letters(f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}")),
    (DEEPSEEK, letters(f"{THOUGHT}\n</think>\n\n{ANSWER}")),
    (MAGISTRAL, [control("[THINK]"), *letters(THOUGHT)[:-1], control("[/THINK]"), *letters(ANSWER)]),
    (GPT_OSS, [*HARMONY_THOUGHT, CHANNEL, word("final"), MESSAGE, *letters(ANSWER)]),
    (SEED, letters(f"<seed:think>{THOUGHT}</seed:think>{ANSWER}")),
    (GRANITE, letters(f"<think>{THOUGHT}</think>\n<response>{ANSWER}</response>")),
]


@pytest.fixture
def engine() -> ScriptedEngine:
    return engine_of(QWEN, FAMILIES[0][1])


def engine_of(template: str, output: Sequence[Step]) -> ScriptedEngine:
    model = replace(MODEL, chat_template=template, max_sequence_tokens=4096)
    return ScriptedEngine(model=model, script=lambda _: output)


def text_of(engine: ScriptedEngine) -> str:
    return "".join(chr(token_id - 100) for token_id in engine.spec.prompt[1:])


async def chat(service: Service, messages: Any = HI, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply("/v1/chat/completions", {"messages": messages, **body})
    return reply


async def streamed(service: Service, **body: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the fields of all deltas, each joined, and the last chunk, which has the usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = await service.events("/v1/chat/completions", {"messages": HI, **options, **body})
    assert done == "[DONE]"
    joined: dict[str, str] = {}
    for chunk in chunks:
        for field, value in chunk["choices"][0]["delta"].items():
            joined[field] = joined.get(field, "") + str(value)
    return joined, last


@pytest.mark.parametrize(("template", "output"), FAMILIES)
async def test_thoughts_are_split_off_whole_and_streamed(template: str, output: Sequence[Step]) -> None:
    async with serving(engine_of(template, output)) as service:
        whole = await chat(service)
        [choice] = whole["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": ANSWER,
            "reasoning_content": THOUGHT,
            "reasoning": THOUGHT,
        }
        assert choice["finish_reason"] == "stop"
        joined, last = await streamed(service)
        assert joined == {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT, "reasoning": THOUGHT}
        assert last["usage"] == whole["usage"]
        # Markers, the answer and the end token do not count.
        thought_tokens = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert len(THOUGHT) // 3 <= thought_tokens <= len(THOUGHT) // 3 + 3


async def test_a_model_without_thoughts_has_no_count_of_them(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters(ANSWER)
    reply = await chat(service)
    assert "reasoning_content" not in reply["choices"][0]["message"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    engine.model = replace(MODEL, chat_template="{{ messages[0].content }}")
    assert "completion_tokens_details" not in (await chat(service))["usage"]


async def test_the_format_none_returns_the_raw_text(service: Service) -> None:
    reply = await chat(service, reasoning_format="none")
    message = reply["choices"][0]["message"]
    assert message == {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"}
    assert "completion_tokens_details" not in reply["usage"]
    assert "reasoning_content" in (await chat(service, reasoning_format="deepseek"))["choices"][0]["message"]


async def test_an_unfinished_thought_is_no_answer(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [word("<think>"), word("Hm"), word(".", finish=FinishReason.LENGTH)]
    [choice] = (await chat(service))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "", "reasoning_content": "Hm.", "reasoning": "Hm."}
    assert choice["finish_reason"] == "length"


async def test_calls_in_thoughts_are_no_calls(service: Service, engine: ScriptedEngine) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    engine.script = lambda _: letters(f"<think>Call {call}?</think>\n\n{call}")
    [choice] = (await chat(service, tools=[TOOL]))["choices"]
    assert choice["message"]["reasoning_content"] == f"Call {call}?"
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": "{}"}]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    joined, _ = await streamed(service, tools=[TOOL])
    assert joined["reasoning_content"] == f"Call {call}?"
    assert "'name': 'f'" in joined["tool_calls"]


@pytest.mark.parametrize(
    "call",
    [
        [CHANNEL, word("commentary"), word(" to"), word("=functions.f "), control("<|constrain|>"), word("json")],
        [word(" to=functions"), word(".f"), CHANNEL, word("commentary"), word(" json")],
    ],
)
async def test_the_calls_of_gpt_oss_follow_its_thoughts(call: Sequence[Step]) -> None:
    output = [*HARMONY_THOUGHT, *call, MESSAGE, *letters('{"a": 1}')]
    async with serving(engine_of(GPT_OSS, output)) as service:
        [choice] = (await chat(service, tools=[TOOL]))["choices"]
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize(
    ("stop", "content"), [("two", ANSWER), (" is", "It"), (["\n", "4"], "It is "), ("<think>", ANSWER)]
)
async def test_stop_strings_end_the_answer_only(service: Service, stop: Any, content: str) -> None:
    [choice] = (await chat(service, stop=stop))["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": content,
        "reasoning_content": THOUGHT,
        "reasoning": THOUGHT,
    }
    assert choice["finish_reason"] == "stop"
    joined, _ = await streamed(service, stop=stop)
    assert (joined["content"], joined["reasoning_content"]) == (content, THOUGHT)


async def test_a_stop_string_may_be_kept_and_may_be_too_early(service: Service) -> None:
    [choice] = (await chat(service, stop=" is", include_stop_str_in_output=True))["choices"]
    assert choice["message"]["content"] == "It is"
    [choice] = (await chat(service, stop=" is", min_tokens=100))["choices"]
    assert choice["message"]["content"] == ANSWER


async def test_earlier_thoughts_go_to_the_template_as_it_reads_them(service: Service, engine: ScriptedEngine) -> None:
    async def prompt(template: str, turn: dict[str, Any]) -> str:
        engine.model = replace(MODEL, chat_template=template, max_sequence_tokens=4096)
        await chat(service, [HI[0], {"role": "assistant", **turn}, HI[0]])
        return text_of(engine)

    turn = {"content": "A.", "reasoning_content": "T."}
    assert "<think>\nT.\n</think>\n\nA." in await prompt(QWEN, turn)
    assert "<think>\nT.\n</think>\n\nA." in await prompt(QWEN, {"content": "A.", "reasoning": "T."})
    assert "<|assistant|>A." in await prompt(DEEPSEEK, turn)
    assert "[assistant][THINK]T.[/THINK]A.[user]" in await prompt(MAGISTRAL, turn)
    assert "analysis<|message|>T.<|end|><|start|>assistant<|channel|>final<|message|>A." in await prompt(GPT_OSS, turn)
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    assert "T." not in await prompt(GPT_OSS, {**turn, "tool_calls": [call]})
    assert "T." in await prompt(GPT_OSS, {"reasoning_content": "T.", "tool_calls": [call]})


SWITCHED = QWEN + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
LEVELS = QWEN + "{{ reasoning_effort }}"
EMPTY = "<think>\n\n</think>\n\n"
OFF: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"chat_template_kwargs": {"reasoning_effort": "none"}},
    {"reasoning_budget_tokens": 0},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"max_tokens": 0}},
    {"thinking": {"type": "disabled"}},
    {"reasoning_effort": "none", "response_format": {"type": "json_object"}},
]


@pytest.mark.parametrize("body", OFF)
async def test_thoughts_are_switched_off(service: Service, engine: ScriptedEngine, body: dict[str, Any]) -> None:
    engine.script = lambda _: letters(ANSWER)
    for template, end in (
        (QWEN, f"assistant\n{EMPTY}"),
        (SWITCHED, f"assistant\n{EMPTY}"),
        (DEEPSEEK, "<|assistant|><think>\n</think>\n\n"),
        (MAGISTRAL, "[user]hi[THINK]\n\n[/THINK]\n\n"),
        (
            GPT_OSS,
            "<|start|>assistant<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>",
        ),
    ):
        engine.model = replace(MODEL, chat_template=template, max_sequence_tokens=4096)
        [choice] = (await chat(service, **body))["choices"]
        assert choice["message"] == {"role": "assistant", "content": ANSWER}
        assert text_of(engine).endswith(end)
        assert text_of(engine).count("</think>") <= 1
        assert engine.spec.thought is None


async def test_an_effort_goes_to_the_template(service: Service, engine: ScriptedEngine) -> None:
    for template, effort, shown in ((LEVELS, "high", "high"), (LEVELS, "max", "max"), (GPT_OSS, "minimal", "low")):
        engine.model = replace(MODEL, chat_template=template + "{{ reasoning_effort }}", max_sequence_tokens=4096)
        await chat(service, reasoning_effort=effort)
        assert text_of(engine).endswith(shown)
        assert engine.spec.thought is None


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"reasoning": {"effort": "high", "exclude": False}}, "high"),
        ({"reasoning": {"enabled": True}}, "medium"),
        ({"reasoning": {"enabled": True, "effort": "low"}}, "low"),
        ({"thinking": {"type": "enabled"}}, "medium"),
        ({"thinking": {"type": "adaptive"}, "reasoning_effort": "high"}, "high"),
    ],
)
async def test_objects_of_other_servers_switch_thoughts_on(
    service: Service, engine: ScriptedEngine, body: dict[str, Any], shown: str
) -> None:
    engine.model = replace(MODEL, chat_template=LEVELS, max_sequence_tokens=4096)
    await chat(service, **body)
    assert text_of(engine).endswith(shown)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({}, "True"),
        ({"reasoning_effort": "none"}, "False"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "False"),
    ],
)
async def test_a_template_is_told_to_think_unless_the_request_says_otherwise(
    service: Service, engine: ScriptedEngine, body: dict[str, Any], shown: str
) -> None:
    engine.model = replace(MODEL, chat_template=QWEN + "{{ enable_thinking }}", max_sequence_tokens=4096)
    await chat(service, **body)
    assert text_of(engine).endswith(shown)


async def test_objects_of_other_servers_limit_thoughts(service: Service, engine: ScriptedEngine) -> None:
    for body in ({"reasoning": {"max_tokens": 17}}, {"thinking": {"type": "enabled", "budget_tokens": 17}}):
        await chat(service, **body)
        assert engine.spec.thought is not None
        assert engine.spec.thought.max_tokens == 17


HIDDEN: list[dict[str, Any]] = [
    {"include_reasoning": False},
    {"reasoning": {"exclude": True}},
    {"reasoning": {"exclude": True, "effort": "low"}, "include_reasoning": False},
]


@pytest.mark.parametrize("body", HIDDEN)
async def test_reasoning_is_left_out_of_the_reply(service: Service, body: dict[str, Any]) -> None:
    shown = await chat(service)
    hidden = await chat(service, **body)
    assert shown["choices"][0]["message"] == hidden["choices"][0]["message"] | {
        "reasoning_content": THOUGHT,
        "reasoning": THOUGHT,
    }
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": ANSWER}
    assert hidden["usage"] == shown["usage"]
    assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"]
    response = await service.post("/v1/chat/completions", {"messages": HI, "stream": True} | body)
    text = await response.text()
    assert "reasoning_content" not in text
    assert '"role":"assistant","content"' in text


@pytest.mark.parametrize("body", [{"include_reasoning": True}, {"reasoning": {"exclude": False}}])
async def test_reasoning_is_in_the_reply_where_it_is_asked_for(service: Service, body: dict[str, Any]) -> None:
    assert (await chat(service, **body))["choices"][0]["message"]["reasoning"] == THOUGHT


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"include_reasoning": True, "reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"include_reasoning": False, "reasoning_format": "none"}, "reasoning_format"),
        ({"reasoning_effort": "high", "thinking": {"type": "disabled"}}, "thinking.type"),
        ({"reasoning_effort": "high", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning_budget_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 6}}, "thinking.budget_tokens"),
    ],
)
async def test_two_fields_about_thoughts_must_not_differ(service: Service, body: dict[str, Any], field: str) -> None:
    response = await service.post("/v1/chat/completions", {"messages": HI} | body)
    assert (response.status, (await response.json())["error"]["param"]) == (400, field)


@pytest.mark.parametrize("field", ["reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"])
async def test_a_budget_opens_the_thought_and_tells_the_shard(
    service: Service, engine: ScriptedEngine, field: str
) -> None:
    engine.script = lambda _: letters(f"{THOUGHT}</think>{ANSWER}")
    for template, end in ((QWEN, "assistant\n<think>"), (DEEPSEEK, "<|assistant|><think>\n")):
        engine.model = replace(MODEL, chat_template=template, max_sequence_tokens=4096)
        [choice] = (await chat(service, **{field: 17}))["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": ANSWER,
            "reasoning_content": THOUGHT,
            "reasoning": THOUGHT,
        }
        assert text_of(engine).endswith(end)
        thought = engine.spec.thought
        assert thought is not None
        assert (thought.closings, thought.max_tokens) == ((b"</think>",), 17)
        assert "".join(chr(token_id - 100) for token_id in thought.ending) == "</think>\n\n"
    await chat(service, **{field: -1})
    assert engine.spec.thought is None


CONTROL = "/v1/chat/completions/control"


async def test_the_reasoning_of_a_running_completion_is_ended(engine: ScriptedEngine) -> None:
    alice, bob = (ApiKey(tenant=Tenant(name=name), digest=digest_of(name)) for name in ("alice", "bob"))
    engine.script = lambda _: [word("a"), Pause(), *letters("b</think>c")]
    body = {"messages": HI, "stream": True, "n": 2, "reasoning_control": True}
    async with serving(engine, access=Access(keyring=Keyring([alice, bob], time.monotonic()))) as service:

        async def control(key: str, reply_id: str) -> Any:
            asked = {"id": reply_id, "action": "reasoning_end", "model": "any"}
            return await (await service.post(CONTROL, asked, Authorization=f"Bearer {key}")).json()

        reply = await service.post("/v1/chat/completions", body, Authorization="Bearer alice", X_Request_Id="me")
        first = msgspec.json.decode((await reply.content.readuntil(b"\n\n")).removeprefix(b"data: "))
        assert text_of(engine).endswith("<think>")
        for key, named in (("bob", first["id"]), ("alice", "other"), ("alice", "")):
            assert await control(key, named) == {"success": False, "message": "no request of this id is in progress"}
        assert not any(stream.thought_ended for stream in engine.streams)
        assert await control("alice", first["id"]) == {"success": True}
        assert all(stream.thought_ended for stream in engine.streams)
        assert await control("alice", "me") == {"success": True}
        engine.resume.set()
        assert "[DONE]" in await reply.text()
        assert not (await control("alice", first["id"]))["success"]


@pytest.mark.parametrize("body", [{}, {"reasoning_control": True, "reasoning_effort": "none"}])
async def test_reasoning_that_cannot_be_ended_is_left_alone(
    service: Service, engine: ScriptedEngine, body: dict[str, Any]
) -> None:
    engine.script = lambda _: [word("a"), Pause(), *letters("b")]
    reply = await service.post("/v1/chat/completions", {"messages": HI, "stream": True, **body}, X_Request_Id="me")
    await reply.content.readuntil(b"\n\n")
    answer = await service.reply(CONTROL, {"id": "me", "action": "reasoning_end"})
    assert not answer["success"]
    assert "reasoning_control" in answer["message"]
    assert not engine.streams[0].thought_ended
    engine.resume.set()
    await reply.text()
    response = await service.post(CONTROL, {"id": "me", "action": "stop"})
    assert (response.status, (await response.json())["error"]["param"]) == (400, "action")


@pytest.mark.parametrize(
    ("default", "body", "end"),
    [
        ("high", {}, "high"),
        ("high", {"reasoning_effort": "low"}, "low"),
        ("high", {"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
        ("high", {"reasoning": {"effort": "low"}}, "low"),
        ("high", {"reasoning_effort": "none"}, EMPTY),
        ("high", {"chat_template_kwargs": {"enable_thinking": False}}, EMPTY),
        ("none", {}, EMPTY),
        ("none", {"chat_template_kwargs": {"enable_thinking": True}}, "assistant\n"),
        ("none", {"reasoning_budget_tokens": 9}, "<think>"),
        ("none", {"reasoning_effort": "low"}, "low"),
    ],
)
async def test_the_effort_of_requests_that_name_none_is_the_servers(
    engine: ScriptedEngine, default: str, body: dict[str, Any], end: str
) -> None:
    engine.model = replace(MODEL, chat_template=LEVELS, max_sequence_tokens=4096)
    async with serving(engine, Limits(reasoning_effort=default)) as service:
        await chat(service, **body)
        assert text_of(engine).endswith(end)
        # A model that does not reason has no effort.
        engine.model = CHAT_MODEL
        await chat(service)


async def test_a_constraint_applies_behind_a_thought_that_is_open(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters("{}")
    schema = {"response_format": {"type": "json_object"}}
    # Not if the model has the choice: it would be the constraint's.
    await chat(service, **schema)
    assert (engine.spec.thought, text_of(engine)[-10:]) == (None, "assistant\n")
    await chat(service, **schema, reasoning_effort="low")
    assert text_of(engine).endswith("<think>")
    assert engine.spec.thought is not None
    assert (engine.spec.thought.closings, engine.spec.thought.max_tokens) == ((b"</think>",), None)
    assert engine.spec.constraint is not None
    engine.model = replace(MODEL, chat_template=DEEPSEEK, max_sequence_tokens=4096)
    await chat(service, **schema)
    assert engine.spec.thought is not None
    engine.model = replace(MODEL, chat_template=GPT_OSS, max_sequence_tokens=4096)
    await chat(service, tools=[TOOL], tool_choice="required")
    assert engine.spec.thought is not None
    assert engine.spec.thought.closings[0] == b"<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_budget_tokens": 5}, "reasoning_budget_tokens"),
        ({"reasoning_budget_tokens": -2}, "reasoning_budget_tokens"),
        ({"reasoning_budget_tokens": 5, "thinking_token_budget": 6}, "thinking_token_budget"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
async def test_what_a_model_without_thoughts_cannot_do_is_refused(
    service: Service, engine: ScriptedEngine, body: dict[str, Any], field: str
) -> None:
    engine.model = replace(MODEL, chat_template="{{ messages[0].content }}")
    response = await service.post("/v1/chat/completions", {"messages": HI, **body})
    assert response.status == 400
    assert (await response.json())["error"]["param"] == field
    # To switch off what there is not is no error.
    await chat(service, reasoning_effort="none", reasoning_budget_tokens=0)


async def test_a_continued_message_begins_where_it_ends(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: letters("a</think>b")
    for content, thought, answer in (("<think>x", "a", "b"), ("Well,", None, "a</think>b")):
        reply = await chat(service, [HI[0], {"role": "assistant", "content": content}])
        message = reply["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (thought, answer)


async def test_ollama_returns_thoughts_as_thinking(service: Service) -> None:
    async def ask(path: str, **body: Any) -> list[dict[str, Any]]:
        response = await service.post(path, {"model": "any", **body})
        assert response.status == 200
        return [msgspec.json.decode(line) for line in (await response.text()).splitlines()]

    [reply] = await ask("/api/chat", messages=HI, stream=False)
    assert reply["message"] == {"role": "assistant", "content": ANSWER, "thinking": THOUGHT}
    [reply] = await ask("/api/generate", prompt="hi", stream=False)
    assert (reply["response"], reply["thinking"]) == (ANSWER, THOUGHT)
    lines = [line["message"] for line in await ask("/api/chat", messages=HI)]
    assert "".join(line.get("thinking", "") for line in lines) == THOUGHT
    assert "".join(line["content"] for line in lines) == ANSWER
    parts = await ask("/api/generate", prompt="hi")
    assert "".join(part.get("thinking", "") for part in parts) == THOUGHT
    assert "".join(part["response"] for part in parts) == ANSWER
    for think, options in ((True, True), (False, False)):
        service.engine.model = replace(MODEL, chat_template=QWEN + "{{ enable_thinking }}", max_sequence_tokens=4096)
        await ask("/api/chat", messages=HI, think=think)
        assert text_of(service.engine).endswith(str(options))
    service.engine.model = replace(MODEL, chat_template=QWEN + "{{ reasoning_effort }}", max_sequence_tokens=4096)
    await ask("/api/chat", messages=HI, think="high")
    assert text_of(service.engine).endswith("high")
    assert (await service.post("/api/chat", {"model": "m", "messages": HI, "think": "much"})).status == 400
    assert "thinking" in (await service.reply("/api/show", {"model": "any"}))["capabilities"]
    turns = [*HI, {"role": "assistant", "content": "A.", "thinking": "T."}, *HI]
    await ask("/api/chat", messages=turns)
    assert "<think>\nT.\n</think>\n\nA." in text_of(service.engine)
