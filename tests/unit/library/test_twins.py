"""The calls that block, and those that are awaited, are the same ones."""

import inspect
from collections.abc import AsyncGenerator, Iterator
from typing import Any, get_args, get_origin

import pytest

from caravan import LLM, AsyncChatSession, AsyncClient, AsyncLLM, ChatSession, Client
from caravan.client import AsyncServedConversation, ServedConversation
from caravan.prompts import ChatOptions

_TWINS = [
    (LLM, AsyncLLM),
    (Client, AsyncClient),
    (ChatSession, AsyncChatSession),
    (ServedConversation, AsyncServedConversation),
]
_MESSAGES = [{"role": "user", "content": "Hi"}]


def _calls(kind: type) -> dict[str, Any]:
    members = inspect.getmembers(kind, inspect.isfunction)
    return {name: member for name, member in members if not name.startswith("_")}


@pytest.mark.parametrize(("blocking", "awaited"), _TWINS)
def test_every_call_is_there_twice_with_its_parameters(blocking: type, awaited: type) -> None:
    ours, theirs = _calls(blocking), _calls(awaited)
    assert ours.keys() == theirs.keys()
    for name, call in ours.items():
        assert call.__doc__
        assert not inspect.iscoroutinefunction(call)
        mine, other = inspect.signature(call), inspect.signature(theirs[name])
        own = [one for one in mine.parameters.values() if one.name != "use_tqdm"]
        assert own == list(other.parameters.values())
        if get_origin(other.return_annotation) is AsyncGenerator:
            assert get_origin(mine.return_annotation) is Iterator
            assert get_args(mine.return_annotation)[0] is get_args(other.return_annotation)[0]
        else:
            assert "Async" not in str(mine.return_annotation)


def test_a_client_has_the_generating_calls_of_a_model() -> None:
    for name in ("generate", "stream", "chat", "stream_chat"):
        assert getattr(LLM, name) is getattr(Client, name)
        assert getattr(AsyncLLM, name) is getattr(AsyncClient, name)


@pytest.mark.parametrize("name", [*ChatOptions.__annotations__, "messages", "sampling_params", "use_tqdm"])
def test_help_explains_every_parameter_of_a_chat(name: str) -> None:
    assert f"``{name}``" in (LLM.chat.__doc__ or "")


async def test_an_unknown_option_of_a_chat_is_refused() -> None:
    client: Any = AsyncClient("http://localhost:1")
    with pytest.raises(TypeError, match="unknown options: tool"):
        await client.chat(_MESSAGES, tool="x")
    with pytest.raises(TypeError, match="unknown options: tool"):
        client.stream_chat(_MESSAGES, tool="x")
    await client.close()
