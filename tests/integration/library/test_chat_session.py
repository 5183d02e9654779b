"""Chat sessions over the toy model: what they keep, and what leaves them as they were."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import caravan
from caravan import LLM, AsyncLLM, ChatSession, Picture, SamplingParams
from caravan_testing.media_prompts import spelled_picture
from caravan_testing.waiting import eventually

_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_ENDLESS = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
_TOOL = {
    "type": "function",
    "function": {
        "name": "roll",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", backend="fake", parallel=4, ctx_size=4096, kv_layout="unified", fake_step_ms=1.0) as opened:
        yield opened


def test_a_session_keeps_the_turns_with_their_exact_tokens(llm: LLM) -> None:
    session = llm.chat_session(system="Be brief. " * 10)
    first = session.respond("Hello", _GREEDY)
    assert (first.finish_reason, len(first.token_ids)) == ("length", 12)
    assert session.messages == [
        {"role": "system", "content": "Be brief. " * 10},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.text},
    ]
    before = session._awaited._state.token_ids
    second = session.respond("And now?", _GREEDY)
    assert session._awaited._state.token_ids[: len(before)] == before
    assert second.prompt_tokens > len(before)
    assert session._awaited._state.token_ids == (
        *session._awaited._state.token_ids[: second.prompt_tokens],
        *second.token_ids,
    )
    assert len(session.messages) == 5


def test_the_cells_of_an_image_count_as_tokens_of_the_prompt() -> None:
    image = Picture.of(*spelled_picture("a cat" * 30))
    with LLM("toy.gguf", backend="fake", mmproj="toy", ctx_size=1024, cache_ram=0) as seeing:
        session = seeing.chat_session()
        first = session.respond([{"role": "user", "content": ["see ", image]}], _GREEDY)
        second = session.respond("And now?", _GREEDY)
        assert first.prompt_tokens > 150 < second.cached_tokens < second.prompt_tokens
        (again,) = seeing.chat(session.messages, _GREEDY)
        assert len(again.prompt_token_ids) < 150 < again.num_cached_tokens < again.num_prompt_tokens


def test_the_first_turn_is_that_of_a_chat(llm: LLM) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}]
    (answer,) = llm.chat(messages, _GREEDY)
    for session in (llm.chat_session(system="S"), llm.chat_session(messages[:1])):
        assert session.respond("Hello", _GREEDY).text == answer.outputs[0].text


def test_a_stream_is_the_reply(llm: LLM) -> None:
    whole, streamed = llm.chat_session(), llm.chat_session()
    reply = whole.respond("Hello", _GREEDY)
    *parts, last = streamed.stream("Hello", _GREEDY)
    assert "".join(part.text for part in (*parts, last)) == reply.text
    assert {part.reply for part in parts} == {None}
    assert last.reply is not None
    assert (last.reply.text, last.reply.token_ids, last.reply.finish_reason) == (
        reply.text,
        reply.token_ids,
        reply.finish_reason,
    )
    assert streamed._awaited._state == whole._awaited._state


def test_a_stream_that_is_left_leaves_the_session_as_it_was(llm: LLM) -> None:
    session = llm.chat_session()
    session.respond("Hello", _GREEDY)
    before = session._awaited._state
    parts = session.stream("endless", _ENDLESS)
    next(parts)
    for call in (lambda: session.respond("x", _GREEDY), lambda: session.rewind(), lambda: next(session.stream("x"))):
        with pytest.raises(caravan.ReplyUnderWay):
            call()
    parts.close()  # type: ignore[attr-defined]
    assert session._awaited._state == before
    assert session.respond("again", _GREEDY).text


def test_the_next_turn_may_follow_the_last_part_at_once(llm: LLM) -> None:
    session = llm.chat_session()
    parts = session.stream("Hello", _GREEDY)
    while next(parts).reply is None:
        pass
    assert session.respond("And now?", _GREEDY).text
    assert list(parts) == []
    assert len(session.messages) == 4


def test_a_session_forks_and_rewinds(llm: LLM) -> None:
    session = llm.chat_session(system="S")
    first = session.respond("one " * 20, _GREEDY)
    fork = session.fork()
    session.respond("two", _GREEDY)
    assert (len(session.messages), len(fork.messages)) == (5, 3)
    fork.respond("three", _GREEDY)
    assert (
        fork._awaited._state.token_ids[: first.prompt_tokens]
        == session._awaited._state.token_ids[: first.prompt_tokens]
    )
    session.rewind()
    session.rewind(turns=1)
    assert session.messages == [{"role": "system", "content": "S"}]
    assert session.respond("one " * 20, _GREEDY).text == first.text
    for turns in (0, 2):
        with pytest.raises(caravan.RequestError, match=f"`turns` must be >= 1 and <= 1. Given: {turns}"):
            session.rewind(turns)


def test_a_saved_session_goes_on_in_another_process_with_its_tokens(llm: LLM, tmp_path: Path) -> None:
    session = llm.chat_session(system="S", chat_template_kwargs={"enable_thinking": False})
    session.respond("Hello", _GREEDY)
    data = session.save(tmp_path / "session.json")
    assert (tmp_path / "session.json").read_bytes() == data
    assert json.loads(data)["messages"] == session.messages
    expected = session.fork().respond("And now?", _GREEDY)
    for saved in (data, tmp_path / "session.json"):
        loaded = llm.load_chat_session(saved)
        assert loaded._awaited._state == session._awaited._state
        assert loaded.respond("And now?", _GREEDY).text == expected.text
    # The tokens of another model say nothing.
    other = json.loads(data) | {"fingerprint": "another", "token_ids": [1, 2]}
    assert llm.load_chat_session(json.dumps(other).encode()).respond("And now?", _GREEDY).text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "no JSON"),
        (b"[]", "no saved chat session"),
        ({"version": 2}, "no saved chat session of this version"),
        ({"messages": [1]}, "`messages` must be a list of objects"),
        ({"token_ids": ["1"]}, "`token_ids` must be a list of whole numbers"),
        ({"adapter": 1}, "`adapter` a text"),
    ],
)
def test_a_damaged_session_is_refused(llm: LLM, data: Any, message: str) -> None:
    if isinstance(data, dict):
        data = json.dumps(json.loads(llm.chat_session().save()) | data).encode()
    with pytest.raises(caravan.StateError, match=message):
        llm.load_chat_session(data)


def test_a_session_calls_tools_and_reads_their_results(llm: LLM) -> None:
    session = llm.chat_session(tools=[_TOOL])
    reply = session.respond("Roll", SamplingParams(temperature=0, max_tokens=200), tool_choice="roll")
    (call,) = reply.tool_calls
    assert (call.name, reply.finish_reason) == ("roll", "tool_calls")
    assert session.messages[-1]["tool_calls"][0]["function"] == {"name": "roll", "arguments": call.arguments}
    answer = session.respond([{"role": "tool", "tool_call_id": call.id, "content": "6"}], _GREEDY, tool_choice="none")
    assert answer.text
    assert [message["role"] for message in session.messages] == ["user", "assistant", "tool", "assistant"]
    # Both messages of the assistant are of one turn.
    session.rewind()
    assert session.messages == []


def test_a_reply_keeps_to_a_schema(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    reply = llm.chat_session().respond("?", SamplingParams(seed=1, max_tokens=60), schema=schema)
    assert set(json.loads(reply.text)) == {"ok"}


@pytest.mark.parametrize(
    ("given", "params", "message"),
    [
        ("x", SamplingParams(n=2), "`n` must be 1"),
        ("x", SamplingParams(logprobs=1), "`logprobs` None"),
        ("x", SamplingParams(stop_token_ids=[9999]), "`stop_token_ids`"),
        ([], None, "a message to answer"),
        ([{"role": "assistant", "content": "a"}], None, "a message to answer"),
        ("x" * 5000, None, "`messages` must have at most"),
    ],
)
def test_a_turn_that_is_refused_leaves_the_session_as_it_was(
    llm: LLM, given: Any, params: SamplingParams | None, message: str
) -> None:
    session = llm.chat_session(system="S")
    for call in (lambda: session.respond(given, params), lambda: list(session.stream(given, params))):
        with pytest.raises(caravan.RequestError, match=message) as found:
            call()
        assert isinstance(found.value, caravan.ContextLengthError) == ("at most" in message)
    assert session.messages == [{"role": "system", "content": "S"}]
    assert session.respond("Hello", _GREEDY).text


def test_messages_are_copies(llm: LLM) -> None:
    first: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    session = llm.chat_session([first])
    first["content"][0]["text"] = "changed"
    session.messages[0]["content"][0]["text"] = "changed"
    assert session.messages[0]["content"][0]["text"] == "Hello"


def test_threads_have_sessions_of_their_own(llm: LLM) -> None:
    sessions = [llm.chat_session() for _ in range(4)]

    def work(session: ChatSession) -> None:
        for number in range(3):
            session.respond(f"turn {number}", _GREEDY)

    threads = [threading.Thread(target=work, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {json.dumps(session.messages) for session in sessions} == {json.dumps(sessions[0].messages)}
    assert len(sessions[0].messages) == 6


def test_a_template_is_applied_without_generating(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello <|im_end|>"}]
    text = llm.apply_chat_template(messages)
    assert text.startswith("<|im_start|>user\nHello <|im_end|>")
    assert text.endswith("<|im_start|>assistant\n")
    assert text.startswith(llm.apply_chat_template(messages, add_generation_prompt=False))
    (answer,) = llm.chat([{"role": "user", "content": "Hello"}], _GREEDY)
    assert llm.tokenize(llm.apply_chat_template([{"role": "user", "content": "Hello"}])) == answer.prompt_token_ids
    with pytest.raises(caravan.RequestError):
        llm.apply_chat_template([])


async def test_sessions_of_an_asynchronous_model() -> None:
    async with AsyncLLM("toy.gguf", backend="fake", ctx_size=4096, parallel=4, fake_step_ms=1.0) as llm:
        session = llm.chat_session(system="S")
        first = await session.respond("Hello", _GREEDY)
        fork = session.fork()
        parts = [part async for part in fork.stream("And now?", _GREEDY)]
        second = await session.respond("And now?", _GREEDY)
        assert "".join(part.text for part in parts) == second.text
        assert llm.load_chat_session(session.save())._state == session._state
        session.rewind()
        assert session.messages[-1]["content"] == first.text
        call = asyncio.create_task(session.respond("endless", _ENDLESS))
        await eventually(lambda: session._current is not None, "the reply is under way")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await session.respond("after", _GREEDY)).text
        assert "Hello" in await llm.apply_chat_template([{"role": "user", "content": "Hello"}])
    with pytest.raises(caravan.ClosedError):
        await session.respond("late", _GREEDY)
