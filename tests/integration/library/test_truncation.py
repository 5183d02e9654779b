"""Chats, sessions and conversations stepped by hand leave out their oldest turns rather than end at the context."""

from collections.abc import Iterator
from typing import Any

import pytest

from caravan import LLM, Client, ContextLengthError, Executor, SamplingParams, StateError

_SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
_SYSTEM = {"role": "system", "content": "Always."}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", backend="fake", parallel=2, ctx_size=1024, kv_layout="split") as opened:
        yield opened


def _turns(count: int) -> list[dict[str, Any]]:
    """A chat of ``count`` turns of which about seven fit into 512 tokens, and a question."""
    turns: list[dict[str, Any]] = [_SYSTEM]
    for number in range(count):
        turns += [
            {"role": "user", "content": f"Question {number} " + "x" * 20},
            {"role": "assistant", "content": f"Answer {number} " + "y" * 10},
        ]
    return [*turns, {"role": "user", "content": "The last question"}]


def test_a_chat_leaves_out_its_oldest_turns_and_tells_which(llm: LLM) -> None:
    messages = _turns(20)
    with pytest.raises(ContextLengthError):
        llm.chat(messages, _SHORT)
    (output,) = llm.chat(messages, _SHORT, truncation="auto")
    gone = list(output.left_out)
    assert gone == list(range(1, len(gone) + 1))
    kept = [message for at, message in enumerate(messages) if at not in gone]
    assert llm.detokenize(output.prompt_token_ids) == llm.detokenize(
        llm.tokenize(llm.apply_chat_template(kept), add_special=False)
    )
    *_, last = llm.stream_chat(messages, _SHORT, truncation="auto")
    assert last.left_out == gone
    assert llm.chat(_turns(2), _SHORT, truncation="auto")[0].left_out == ()


def test_a_client_is_told_too(llm: LLM) -> None:
    with llm.serve(port=0) as server, Client(server.url) as client:
        messages = _turns(20)
        (expected,) = llm.chat(messages, _SHORT, truncation="auto")
        (output,) = client.chat(messages, _SHORT, truncation="auto")
        *_, last = client.stream_chat(messages, _SHORT, truncation="auto")
    assert list(output.left_out) == list(last.left_out) == list(expected.left_out)


def test_a_session_never_ends_and_begins_alike_as_long_as_it_fits(llm: LLM) -> None:
    session = llm.chat_session(system="Always.", truncation="auto")
    cuts = list[int]()
    for number in range(40):
        reply = session.respond(f"Question {number} " + "x" * 20, _SHORT)
        cuts.append(len(reply.left_out))
    assert cuts[0] == 0
    assert cuts == sorted(cuts)
    # Each cut makes room for several turns.
    assert 2 < len(set(cuts)) < 20
    assert len(session.messages) == 81
    again = llm.load_chat_session(session.save())
    assert len(again.respond("One more", _SHORT).left_out) >= cuts[-1]
    session.rewind(38)
    assert session.respond("Anew", _SHORT).left_out == ()


def test_a_turn_may_ask_for_it_alone(llm: LLM) -> None:
    session = llm.chat_session(_turns(20)[:-1])
    with pytest.raises(ContextLengthError):
        session.respond("Too long", _SHORT)
    assert session.respond("Too long", _SHORT, truncation="auto").left_out


def test_sessions_of_earlier_versions_are_read(llm: LLM) -> None:
    saved = llm.chat_session(system="S").save()
    earlier = saved.replace(b', "kept_from": 0', b"")
    assert earlier != saved
    assert llm.load_chat_session(earlier).messages == [{"role": "system", "content": "S"}]
    with pytest.raises(StateError, match="lacks adapter"):
        llm.load_chat_session(saved.replace(b'"adapter"', b'"other"'))


def test_a_conversation_leaves_out_its_oldest_turns() -> None:
    with Executor("toy.gguf", backend="fake", parallel=2, ctx_size=1024, kv_layout="split") as executor:
        conversation = executor.create()
        messages = _turns(20)
        gone = conversation.prompt_messages(messages, truncation="auto")
        assert gone == list(range(1, len(gone) + 1))
        assert gone
        while executor.infer().waiting:
            pass
        held = conversation.token_count
        messages += [{"role": "assistant", "content": "z"}, {"role": "user", "content": "And now?"}]
        fork = conversation.fork()
        assert fork.prompt_messages(messages, truncation="auto") == gone
        # It begins as before, so that only the new turn is computed.
        assert fork.held > held - 20
        # Other messages, all of which fit.
        assert conversation.prompt_messages(_turns(2), truncation="auto") == []
