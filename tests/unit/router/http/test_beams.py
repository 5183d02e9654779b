"""Beam search over HTTP: what reaches the engine, and what it cannot be combined with."""

from dataclasses import replace
from typing import Any

import pytest

from caravan_scheduler.core.generation import BeamSearch, EarlyStopping
from caravan_testing.http_server import serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine

MODEL = replace(CHAT_MODEL, eos_token_ids=frozenset({2, 3}), max_top_n_tokens=7)
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}
PATHS = pytest.mark.parametrize("path", [TEXT, CHAT])


@PATHS
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (1.0, EarlyStopping.NO)),
        ({"temperature": 0, "length_penalty": -0.5, "early_stopping": True}, (-0.5, EarlyStopping.YES)),
        ({"length_penalty": 0, "early_stopping": "never"}, (0, EarlyStopping.NEVER)),
    ],
)
async def test_a_search_reaches_the_engine_as_a_group(
    path: str, fields: dict[str, Any], expected: tuple[float, EarlyStopping]
) -> None:
    engine = ScriptedEngine(model=MODEL)
    async with serving(engine) as service:
        reply = await service.reply(path, BODIES[path] | {"use_beam_search": True, "n": 3} | fields)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    specs = [stream.spec for stream in engine.streams]
    penalty, early = expected
    assert [spec.beams for spec in specs] == [
        BeamSearch(width=3, index=index, length_penalty=penalty, early_stopping=early, eos_token_ids=frozenset({2, 3}))
        for index in range(3)
    ]
    assert all(spec.sampling.temperature == 0 and spec.max_draft_tokens == 0 for spec in specs)


@PATHS
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": True}, "`stream` cannot be used with `use_beam_search`. Given: True"),
        ({"temperature": 0.7}, "`temperature` cannot be used with `use_beam_search`. Given: 0.7"),
        ({"seed": 0}, "`seed` cannot be used with `use_beam_search`. Given: 0"),
        ({"repetition_penalty": 1.1}, "`repetition_penalty` cannot be used with `use_beam_search`. Given: 1.1"),
        ({"stop": ["x"]}, "`stop` cannot be used with `use_beam_search`. Given: ['x']"),
        ({"guided_regex": "a+"}, "`guided_regex` cannot be used with `use_beam_search`. Given: 'a+'"),
        ({"length_penalty": 11}, "`length_penalty` must be >= -10.0 and <= 10.0. Given: 11.0"),
        # Two tokens end an output, and a shard returns seven.
        ({"n": 6}, "`n` must be >= 1 and <= 5. Given: 6"),
        (
            {"use_beam_search": False, "early_stopping": True},
            "`early_stopping` may be set only when `use_beam_search` is true. Given: True",
        ),
    ],
)
async def test_other_fields_are_refused_by_name(path: str, fields: dict[str, Any], message: str) -> None:
    async with serving(ScriptedEngine(model=MODEL)) as service:
        response = await service.post(path, BODIES[path] | {"use_beam_search": True, "n": 2} | fields)
        assert response.status == 400
        assert (await response.json())["error"]["message"] == f"Input validation error: {message}"


@pytest.mark.parametrize("field", [{"best_of": 2}, {"echo": True}, {"prompt_logprobs": 0}])
async def test_fields_of_completions_are_refused_by_name(field: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(model=MODEL)) as service:
        response = await service.post(TEXT, BODIES[TEXT] | {"use_beam_search": True, "n": 2} | field)
        assert response.status == 400
        assert f"`{next(iter(field))}` cannot be used" in (await response.json())["error"]["message"]
