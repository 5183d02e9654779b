"""Log probabilities of the messages of responses."""

import math
from dataclasses import replace
from typing import Any

import pytest

from caravan_scheduler.core.tokens import Alternative
from caravan_testing.http_server import named_events, serving
from caravan_testing.scripted_engine import EOS_TOKEN, TEMPLATE, WORD_MODEL, ScriptedEngine, Step, word

RESPONSES = "/v1/responses"
WANTED = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


def engine(*pieces: str | bytes) -> ScriptedEngine:
    others = (Alternative(20, b"x", False, -2.0),)
    steps: list[Step] = [*(word(piece, logprob=-0.5, alternatives=others) for piece in pieces), EOS_TOKEN]
    template = TEMPLATE + "{# <think></think> <tool_call> #}"
    return ScriptedEngine(model=replace(WORD_MODEL, chat_template=template), script=lambda _: steps)


async def logprobs(running: ScriptedEngine, **body: Any) -> list[Any]:
    """Return the entries of the last message, which are the same in all places that have them."""
    async with serving(running) as service:
        whole = await service.reply(RESPONSES, {"input": "Hi", **body})
        [part] = whole["output"][-1]["content"]
        response = await service.post(RESPONSES, {"input": "Hi", "stream": True, **body})
        events = named_events(await response.text())
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
        for event in events:
            if event["type"] == "response.output_text.done":
                assert event["logprobs"] == part["logprobs"]
            if event["type"] == "response.content_part.done":
                assert event["part"] == part
        async with service.client.get(f"{RESPONSES}/{whole['id']}") as stored:
            assert (await stored.json())["output"] == whole["output"]
        entries: list[Any] = part["logprobs"]
        return entries


@pytest.mark.parametrize("asked", [WANTED, {"top_logprobs": 1}])
async def test_each_token_of_a_message_has_them(asked: dict[str, Any]) -> None:
    running = engine("Hel", b"\xe2\x82", b"\xac")
    first, *others = await logprobs(running, **asked)
    assert running.spec.sampling.top_n_tokens == 1
    top = {"token": "x", "logprob": -2.0, "bytes": [120]}
    assert first == {"token": "Hel", "logprob": -0.5, "bytes": [72, 101, 108], "top_logprobs": [top]}
    assert [entry["bytes"] for entry in others] == [[0xE2, 0x82], [0xAC]], "parts of one character"


async def test_thoughts_and_marks_are_no_part_of_a_message() -> None:
    found = await logprobs(engine("<think>", "So", "</", "think>", "1 <", " 2"), **WANTED)
    assert [entry["token"] for entry in found] == ["1 <", " 2"]


async def test_without_alternatives_each_token_has_its_own() -> None:
    running = engine("Hi")
    [entry] = await logprobs(running, include=WANTED["include"])
    assert math.isclose(entry["logprob"], -0.5)
    assert running.spec.sampling.top_n_tokens == 0


async def test_they_are_not_computed_unless_asked_for() -> None:
    running = engine("Hi")
    assert await logprobs(running, include=["reasoning.encrypted_content"], top_logprobs=0) == []
    assert not running.spec.sampling.logprobs
