"""Values of a wrong type are refused at once by an error of the package that says what was expected."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from caravan import LLM, Executor, ModelError, RequestError, SamplingParams

_MESSAGES = [{"role": "user", "content": "Hi"}]
# As a program without types calls it.
_Call = Callable[[Any], object]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", backend="fake") as opened:
        yield opened


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.generate(5),
            "a prompt is a text, a list of token ids, or an object with one of them. Given: 5",
        ),
        (lambda llm: llm.generate([5.5]), "a prompt is a text"),
        (lambda llm: llm.generate("hi", {"max_tokens": 2}), "sampling_params must be SamplingParams"),
        (lambda llm: llm.generate("hi", [{"max_tokens": 2}]), "sampling_params must be SamplingParams"),
        (lambda llm: llm.stream("hi", {}), "sampling_params must be SamplingParams"),
        (lambda llm: llm.stream(["a", "b"]), "there must be one prompt here. Given: 2"),
        (
            lambda llm: llm.chat("hello"),
            'messages are a list such as [{"role": "user", "content": "Hi"}]. Given: \'hello\'',
        ),
        (lambda llm: llm.chat(["hello"]), "a message is an object such as"),
        (lambda llm: llm.stream_chat("hello"), "messages are a list"),
        (lambda llm: llm.chat(_MESSAGES, tools=5), "tools must be a list of objects. Given: 5"),
        (lambda llm: llm.chat(_MESSAGES, schema=5), "`schema`: expected `str | dict | None`, got `int`"),
        (lambda llm: llm.chat([{"role": "user", "content": 5}]), "`messages[0].content`: expected"),
        (lambda llm: llm.chat_session("hello"), "messages are a list"),
        (lambda llm: llm.chat_session().respond("hi", {}), "sampling_params must be SamplingParams"),
        (lambda llm: llm.tokenize(5), "a text must be a str. Given: 5"),
        (lambda llm: llm.detokenize("ab"), "token ids must be a list of whole numbers. Given: 'ab'"),
        (lambda llm: llm.score("a", 5), "a text must be a str. Given: 5"),
        (lambda llm: llm.embed("a"), "they need a model that was opened with embeddings=True"),
    ],
)
def test_a_model_names_what_was_expected(llm: LLM, call: _Call, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        # The parameters of what streams are checked when it begins.
        next(call(llm))  # type: ignore[call-overload]
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda conversation: conversation.prompt(5.5),
            "a prompt is a text, a token, an image, audio, embeddings, or a list of them",
        ),
        (lambda conversation: conversation.prompt([5.5]), "token ids must be a list of whole numbers"),
        (lambda conversation: conversation.prompt_messages("hello"), "messages are a list"),
        (lambda conversation: conversation.sample(5), "a sampler is SamplingParams or a function of the logits"),
        (lambda conversation: conversation.generate("5"), "`max_tokens` must be a whole number, or None"),
    ],
)
def test_a_conversation_names_what_was_expected(call: _Call, message: str) -> None:
    with Executor("toy.gguf", backend="fake") as executor:
        conversation = executor.create()
        conversation.prompt("a")
        executor.infer()
        with pytest.raises(RequestError) as refused:
            call(conversation)
        assert message in str(refused.value)


def test_a_model_that_is_not_there_is_asked_for_in_pythons_words() -> None:
    with pytest.raises(ModelError, match="pass model the path of a GGUF file"):
        LLM("nope.gguf")
    not_a_path: Any = 5
    with pytest.raises(TypeError, match=r"model must be a path or a name\. Given: 5"):
        LLM(not_a_path)


def test_objects_are_shown_in_short(llm: LLM) -> None:
    assert repr(llm) == "LLM('toy.gguf', backend='fake')"
    (output,) = llm.generate("x" * 300, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=1))
    assert len(repr(output)) < 900
    session = llm.chat_session(system="S")
    assert repr(session) == "<ChatSession: 1 messages>"
    with Executor("toy.gguf", backend="fake", ctx_size=1024) as executor:
        conversation = executor.create()
        conversation.prompt([1, 2])
        assert repr(conversation) == "<Conversation: pending, 2 tokens>"
    assert repr(executor) == "<closed Executor('toy.gguf', backend='fake', ctx_size=1024)>"
