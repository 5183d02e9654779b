"""Fields beyond OpenAI's that clients of vLLM and llama-server send to both generating routes under /v1."""

from dataclasses import replace
from typing import Any

import pytest

from caravan_router.core.generation import GenerationSpec
from caravan_testing.http_server import events, serving
from caravan_testing.scripted_engine import BOS, EOS, EOS_TOKEN, MODEL, ScriptedEngine, Step, word

TALKS = replace(MODEL, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
COMPLETIONS: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "hi"})
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
BOTH = pytest.mark.parametrize("route", [COMPLETIONS, CHAT], ids=["completions", "chat"])
Route = tuple[str, dict[str, Any]]


async def ask(route: Route, *steps: Step, **fields: Any) -> Any:
    def script(_: GenerationSpec) -> list[Step]:
        return list(steps)

    async with serving(ScriptedEngine(script=script, model=TALKS)) as service:
        response = await service.post(route[0], route[1] | fields)
        assert response.status == 200, await response.text()
        return events(await response.text()) if fields.get("stream") else await response.json()


def text_of(reply: Any) -> str:
    choice = reply["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@BOTH
async def test_a_stop_string_is_kept_if_asked_for(route: Route) -> None:
    steps = (word("a"), word("b"), word("c"), EOS_TOKEN)
    assert text_of(await ask(route, *steps, stop=["b"])) == "a"
    assert text_of(await ask(route, *steps, stop=["b"], include_stop_str_in_output=True)) == "ab"


@BOTH
async def test_special_tokens_are_shown_if_asked_for(route: Route) -> None:
    steps = (word("a"), word("<tool>", special=True), word("b"), EOS_TOKEN)
    assert text_of(await ask(route, *steps)) == "ab"
    assert text_of(await ask(route, *steps, skip_special_tokens=False)).startswith("a<tool>b")


@BOTH
async def test_stop_strings_do_not_match_before_min_tokens(route: Route) -> None:
    steps = (word("b"), word("a"), word("b"), word("c"), EOS_TOKEN)
    assert text_of(await ask(route, *steps, stop=["b"])) == ""
    assert text_of(await ask(route, *steps, stop=["b"], min_tokens=2)) == "ba"


@BOTH
async def test_n_has_the_name_that_llama_server_gives_it(route: Route) -> None:
    reply = await ask(route, word("a"), EOS_TOKEN, n_cmpl=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    reply = await ask(route, word("a"), EOS_TOKEN, n_cmpl=2, n=2)
    assert len(reply["choices"]) == 2


PROMPT = [BOS, 100 + ord("h"), 100 + ord("i")]


async def test_token_ids_of_completions() -> None:
    steps = (word("a", 11), word("b", 12), EOS_TOKEN)
    reply = await ask(COMPLETIONS, *steps, return_token_ids=True, n=2)
    for choice in reply["choices"]:
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["token_ids"] == [11, 12, EOS]
    assert "token_ids" not in (await ask(COMPLETIONS, *steps))["choices"][0]


async def test_token_ids_of_streamed_completions_come_with_their_text() -> None:
    steps = (word("a", 11), word(b"\xc3", 12), word(b"\xa9", 13), EOS_TOKEN)
    *chunks, done = await ask(COMPLETIONS, *steps, return_token_ids=True, stream=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert [choice.get("prompt_token_ids") for choice in choices] == [PROMPT, None, None, None]
    assert [(choice["text"], choice["token_ids"]) for choice in choices] == [
        ("a", [11]),
        ("", [12]),
        ("é", [13]),
        ("", [EOS]),
    ]


async def test_token_ids_of_chat() -> None:
    reply = await ask(CHAT, word("a", 11), EOS_TOKEN, return_token_ids=True)
    assert reply["prompt_token_ids"]
    assert reply["choices"][0]["token_ids"] == [11, EOS]
    *chunks, _ = await ask(CHAT, word("a", 11), EOS_TOKEN, return_token_ids=True, stream=True)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [reply["prompt_token_ids"], None]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[11], [EOS]]


async def test_a_chat_takes_its_whole_prompt_as_token_ids() -> None:
    reply = await ask(CHAT, word("a"), EOS_TOKEN, messages=[], prompt_token_ids=PROMPT, return_token_ids=True)
    assert reply["prompt_token_ids"] == PROMPT
    assert reply["usage"]["prompt_tokens"] == 3


@BOTH
async def test_min_tokens_is_at_most_the_new_tokens(route: Route) -> None:
    async with serving(ScriptedEngine(model=TALKS)) as service:
        response = await service.post(route[0], route[1] | {"max_tokens": 4, "min_tokens": 5})
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "min_tokens"
