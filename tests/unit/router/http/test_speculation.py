"""Speculation over HTTP: predictions, how many drafts a request may have, and what its reply tells of them."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.results import DraftCount, DraftSource, FinishReason
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine, ids_of, word

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    (CHAT, HI),
    ("/api/generate", {"model": "any", "prompt": "a", "stream": False}),
]
COUNTS = (DraftCount(DraftSource.PREDICTION, 7, 5), DraftCount(DraftSource.CONTEXT, 4, 1))


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=CHAT_MODEL)


@pytest.fixture
async def drafting(engine: ScriptedEngine) -> AsyncIterator[Service]:
    async with serving(engine, Limits(max_draft_tokens=8)) as running:
        yield running


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_requests_have_as_many_drafts_as_they_ask_for(drafting: Service, path: str, body: dict[str, Any]) -> None:
    wanted = drafting.engine
    await drafting.reply(path, body)
    assert wanted.spec.max_draft_tokens == 8
    await drafting.reply(path, body | {"speculate": 3})
    assert wanted.spec.max_draft_tokens == 3
    await (await drafting.post(path, body, X_Speculate="0")).text()
    assert wanted.spec.max_draft_tokens == 0
    await (await drafting.post(path, body | {"speculate": 4}, X_Speculate="2")).text()
    assert wanted.spec.max_draft_tokens == 4


@pytest.mark.parametrize(
    ("fields", "headers", "message"),
    [
        ({"speculate": 9}, {}, "`speculate` must be >= 0 and <= 8. Given: 9"),
        ({"speculate": -1}, {}, "`speculate` must be >= 0 and <= 8. Given: -1"),
        ({}, {"X_Speculate": "9"}, "`X-Speculate` must be >= 0 and <= 8. Given: 9"),
        ({}, {"X_Speculate": "on"}, "header `X-Speculate` must be a whole number. Given: 'on'"),
    ],
)
async def test_more_drafts_than_the_server_allows_are_refused(
    drafting: Service, fields: dict[str, Any], headers: dict[str, str], message: str
) -> None:
    response = await drafting.post(CHAT, HI | fields, **headers)
    assert response.status == 400
    assert (await response.json())["error"]["message"] == f"Input validation error: {message}"


@pytest.mark.parametrize(
    "content", ["abc", [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]], ids=["text", "parts"]
)
async def test_a_prediction_reaches_the_engine_as_tokens(drafting: Service, content: Any) -> None:
    await drafting.reply(CHAT, HI | {"prediction": {"type": "content", "content": content}})
    assert drafting.engine.spec.prediction == ids_of("abc")
    await drafting.reply(CHAT, HI | {"prediction": {"type": "content", "content": "abc"}, "speculate": 0})
    assert drafting.engine.spec.prediction == ()
    await drafting.reply(CHAT, HI | {"prediction": {"type": "content", "content": ""}})
    assert drafting.engine.spec.prediction == ()


@pytest.mark.parametrize("characters", [300, 9000])
async def test_a_prediction_is_no_longer_than_an_output(drafting: Service, characters: int) -> None:
    await drafting.reply(CHAT, HI | {"prediction": {"type": "content", "content": "a" * characters}})
    assert len(drafting.engine.spec.prediction) == 256


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "prediction.content[0]"),
        ({"type": "other", "content": "a"}, "prediction.type"),
    ],
)
async def test_other_predictions_are_refused(drafting: Service, prediction: dict[str, Any], param: str) -> None:
    response = await drafting.post(CHAT, HI | {"prediction": prediction})
    assert response.status == 400
    assert (await response.json())["error"]["param"] == param
    assert not drafting.engine.streams


async def test_without_speculation_a_prediction_is_checked_and_not_used(engine: ScriptedEngine) -> None:
    async with serving(engine) as service:
        await service.reply(CHAT, HI | {"prediction": {"type": "content", "content": "abc"}})
        assert (engine.spec.max_draft_tokens, engine.spec.prediction) == (0, ())
        response = await service.post(CHAT, HI | {"prediction": {"type": "content", "content": [{"type": "file"}]}})
        assert response.status == 400


async def test_the_usage_tells_how_many_drafts_were_right(drafting: Service) -> None:
    details = {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 2,
        "draft_tokens": {"prediction": {"drafted": 7, "accepted": 5}, "context": {"drafted": 4, "accepted": 1}},
    }
    usage = (await drafting.reply(CHAT, HI))["usage"]
    assert "completion_tokens_details" not in usage
    drafting.engine.drafts = COUNTS
    assert (await drafting.reply(CHAT, HI))["usage"]["completion_tokens_details"] == details
    streamed = await drafting.events(CHAT, HI | {"stream": True, "stream_options": {"include_usage": True}})
    assert streamed[-2]["usage"]["completion_tokens_details"] == details
    twice = await drafting.reply("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1})
    assert twice["usage"]["completion_tokens_details"]["draft_tokens"]["prediction"] == {"drafted": 14, "accepted": 10}
    drafting.engine.drafts = COUNTS[1:]
    only_context = (await drafting.reply(CHAT, HI))["usage"]["completion_tokens_details"]
    assert (only_context["accepted_prediction_tokens"], only_context["rejected_prediction_tokens"]) == (0, 0)


async def test_tokens_that_come_together_share_the_time_since_the_token_before_them(engine: ScriptedEngine) -> None:
    engine.script = lambda _spec: [word("a"), [word("b"), word("c"), word("d", finish=FinishReason.LENGTH)]]
    engine.step_s = 0.2
    async with serving(engine) as service:
        await service.reply(CHAT, HI | {"max_tokens": 4})
        exposed = (await (await service.client.get("/metrics")).text()).splitlines()
    values = dict(line.removeprefix("caravan_inter_token_latency_seconds_").rsplit(" ", 1) for line in exposed)
    assert values['bucket{model="scripted",le="0.05"}'] == "0"
    assert values['count{model="scripted"}'] == "3"
    # A clock of milliseconds may let the loop wake a little before the time.
    assert float(values['sum{model="scripted"}']) >= 0.19


def test_the_flag_sets_the_limit() -> None:
    from caravan_router.config import RouterConfig

    assert RouterConfig().limits.max_draft_tokens == RouterConfig().speculate
    assert RouterConfig(speculate=5).limits == replace(RouterConfig().limits, max_draft_tokens=5)
