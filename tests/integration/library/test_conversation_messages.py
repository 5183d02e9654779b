"""Messages of hand-stepped conversations over the toy model: prompts of `LLM.chat`, with the tokens that are there."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import caravan
from caravan import LLM, AsyncExecutor, Conversation, Executor, SamplingParams, State

_OPTIONS: dict[str, Any] = {"backend": "fake", "ctx_size": 4096, "parallel": 4, "kv_layout": "unified"}
_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <|im_end|>"}]
_TOOL = {"type": "function", "function": {"name": "roll", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", **_OPTIONS) as opened:
        yield opened


@pytest.fixture
def executor() -> Iterator[Executor]:
    with Executor("toy.gguf", **_OPTIONS) as made:
        yield made


def _reply(conversation: Conversation, params: SamplingParams = _GREEDY) -> dict[str, str]:
    """Generate a reply, and return its message."""
    return {"role": "assistant", "content": "".join(token.text for token in conversation.generate(sampler=params))}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns_have_the_tokens_of_a_chat_session(llm: LLM, executor: Executor) -> None:
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True, frequency_penalty=1.5, logit_bias={65: 9.0})
    session, conversation = llm.chat_session(_START[:1]), executor.create()
    messages = list(_START)
    for question in ("And now?", "And then?", ""):
        session.respond(messages[-1]["content"], params)
        conversation.prompt_messages(messages)
        messages.append(_reply(conversation, params))
        assert messages == session.messages
        assert tuple(conversation.tokens) == session._awaited._state.token_ids
        messages.append(_user(question))


@pytest.mark.parametrize(
    "options",
    [{}, {"tools": [_TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}],
    ids=["plain", "tools", "variables"],
)
def test_a_prompt_is_that_of_a_chat(llm: LLM, executor: Executor, options: dict[str, Any]) -> None:
    for messages in (_START, [*_START, {"role": "assistant", "content": "I go on"}]):
        (answer,) = llm.chat(messages, _GREEDY, **options)
        conversation = executor.create()
        conversation.prompt_messages(messages, **options)
        assert conversation.tokens == answer.prompt_token_ids
    opened, closed = executor.create(), executor.create()
    opened.prompt_messages(messages, add_generation_prompt=True)
    closed.prompt_messages(messages, add_generation_prompt=False)
    assert opened.text.startswith(closed.text)
    assert opened.text.removeprefix(closed.text) == "\nassistant\n"


def test_the_text_of_a_control_token_in_a_reply_stays_text(executor: Executor) -> None:
    conversation = executor.create()
    conversation.prompt_messages(_START)
    executor.infer()
    reply = executor.tokenize("a", add_special=False) + list(b"<|im_end|>")
    conversation.prompt(reply)
    executor.infer()
    before, held = conversation.tokens, conversation.held
    conversation.prompt_messages([*_START, {"role": "assistant", "content": "a<|im_end|>"}, _user("And now?")])
    assert conversation.tokens[: len(before)] == before
    assert (conversation.state, conversation.held) == (State.PENDING, held)


def test_a_fork_goes_on_with_other_messages(executor: Executor) -> None:
    conversation = executor.create()
    conversation.prompt_messages(_START)
    messages = [*_START, _reply(conversation)]
    turn = conversation.tokens
    fork = conversation.fork()
    conversation.prompt_messages([*messages, _user("one")])
    fork.prompt_messages([*messages, _user("two")])
    texts = [_reply(one)["content"] for one in (conversation, fork)]
    for one, question, text in ((conversation, "one", texts[0]), (fork, "two", texts[1])):
        assert one.tokens[: len(turn)] == turn
        alone = executor.create()
        alone.prompt_messages([*messages, _user(question)])
        assert _reply(alone)["content"] == text
    # Back to a question that was not asked: what is common stays.
    fork.prompt_messages([_START[0], _user("three")])
    assert 0 < fork.held < len(turn)
    assert "three" in fork.text
    assert "Hello" not in fork.text


def test_the_same_messages_again_compute_nothing_that_is_there(executor: Executor) -> None:
    conversation = executor.create()
    conversation.prompt_messages(_START)
    executor.infer()
    expected = conversation.sample()
    conversation.prompt_messages(_START)
    assert conversation.state is State.READY
    conversation.rewind(1)
    conversation.prompt_messages(_START)
    assert conversation.held == conversation.token_count - 1
    executor.infer()
    assert conversation.sample() == expected


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([], {}),
        ([{"role": "user"}], {}),
        ([{"role": "user", "content": 3}], {}),
        ([{"role": "user", "content": "x" * 200_000}], {}),
        (_START, {"tools": [{"type": "x"}]}),
    ],
)
def test_what_a_chat_refuses_is_refused_and_changes_nothing(
    llm: LLM, executor: Executor, messages: Any, options: Any
) -> None:
    conversation = executor.create()
    conversation.prompt("before")
    executor.infer()
    with pytest.raises(caravan.RequestError) as expected:
        llm.chat(messages, _GREEDY, **options)
    with pytest.raises(caravan.RequestError) as refused:
        conversation.prompt_messages(messages, **options)
    assert str(refused.value) == str(expected.value)
    assert (conversation.text, conversation.state) == ("before", State.READY)


def test_misuse_has_a_name_and_changes_nothing() -> None:
    with Executor("toy.gguf", backend="fake", ctx_size=64, parallel=2) as executor:
        conversation = executor.create()
        with pytest.raises(caravan.TooLong):
            conversation.prompt_messages([_user("x" * 80)])
        conversation.prompt("waits")
        with pytest.raises(caravan.AlreadyPrompted):
            conversation.prompt_messages([_user("a")])
        assert (conversation.text, conversation.state) == ("waits", State.PENDING)
        conversation.close()
        with pytest.raises(caravan.ConversationEnded):
            conversation.prompt_messages([_user("a")])


def _loops() -> int:
    """Return how many event loops the package runs."""
    return sum(thread.name == "caravan" for thread in threading.enumerate())


def test_the_renderer_starts_with_the_first_messages_and_ends_with_the_executor() -> None:
    before = _loops()
    with Executor("toy.gguf", **_OPTIONS) as executor:
        conversation = executor.create()
        conversation.prompt("text")
        assert _loops() == before
        executor.create().prompt_messages(_START)
        executor.create().prompt_messages(_START)
        assert _loops() == before + 1
        processes = list(executor.chat_prompts._context.templates.processes._idle)
        assert [process.returncode for process in processes] == [None]
    assert _loops() == before
    assert all(process.returncode is not None for process in processes)


async def test_an_asynchronous_conversation_takes_messages(executor: Executor) -> None:
    conversation = executor.create()
    conversation.prompt_messages(_START, add_generation_prompt=True)
    reply = _reply(conversation)
    async with AsyncExecutor("toy.gguf", **_OPTIONS) as other:
        awaited = await other.create()
        await awaited.prompt_messages(_START, add_generation_prompt=True)
        texts = [token.text async for token in awaited.generate(sampler=_GREEDY)]
        assert ("".join(texts), awaited.tokens) == (reply["content"], conversation.tokens)
        with pytest.raises(caravan.RequestError):
            await awaited.prompt_messages([])
