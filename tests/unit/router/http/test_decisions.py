"""``/v1/decisions``, with an engine that finds label tokens as likely as a test says."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from caravan_dialects.api.openai.decisions.reply import AskedDecision
from caravan_dialects.api.openai.decisions.schema import DecisionRequest
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.tokens import Alternative
from caravan_testing.http_server import Service
from caravan_testing.scripted_engine import BOS, CHAT_MODEL, Step, ids_of, word

DUPLICATE = {"type": "predicate", "name": "duplicate", "instructions": "The customer was charged twice."}
CATEGORY = {
    "type": "choice",
    "name": "category",
    "instructions": "Which department?",
    "choices": [{"value": "billing"}, {"value": "technical", "description": "Software errors"}, {"value": True}],
}
ANGER = {"type": "score", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "furious"}]}


def likely(logprob: Callable[[GenerationSpec, int], float]) -> Callable[[GenerationSpec], list[Step]]:
    """Return a script whose only token has the log probabilities ``logprob(spec, token)`` of what is scored."""

    def script(spec: GenerationSpec) -> list[Step]:
        scored = [Alternative(token, b"", False, logprob(spec, token)) for token in spec.sampling.score_token_ids]
        return [word("x", 10, finish=FinishReason.LENGTH, logprob=-9.0, alternatives=scored)]

    return script


@pytest.fixture
def deciding(service: Service) -> Service:
    service.engine.model = CHAT_MODEL
    service.engine.script = likely(lambda _, token: -float(token % 7))
    return service


async def decide(service: Service, *questions: Any, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply(
        "/v1/decisions", {"model": "any", "input": "Charged twice!", "questions": list(questions), **body}
    )
    return reply


def softmax(*logprobs: float) -> list[float]:
    weights = [math.exp(value) for value in logprobs]
    return [weight / sum(weights) for weight in weights]


def of_label(label: str) -> float:
    return -float(ids_of(label)[0] % 7)


async def test_each_type_of_question_has_its_answer(deciding: Service) -> None:
    reply = await decide(deciding, DUPLICATE, CATEGORY, ANGER)
    duplicate, category, anger = reply["answers"]
    # Yes and No are three and two tokens here.
    yes, no = (sum(-float(token % 7) for token in ids_of(label)) for label in ("Yes", "No"))
    assert duplicate == {"type": "predicate", "name": "duplicate", "probability": pytest.approx(softmax(yes, no)[0])}
    letters = [of_label(label) for label in "ABC"]
    assert category["type"] == "choice"
    assert [one["value"] for one in category["probabilities"]] == ["billing", "technical", True]
    assert [one["probability"] for one in category["probabilities"]] == pytest.approx(softmax(*letters))
    best = letters.index(max(letters))
    assert category["choice"] == ["billing", "technical", True][best]
    assert category["confidence"] == pytest.approx(math.exp(max(letters)))
    levels = softmax(*letters[:2])
    assert anger["name"] is None
    assert anger["score"] == pytest.approx(levels[1])
    assert [(one["value"], one["label"]) for one in anger["probabilities"]] == [(0, "calm"), (1, "furious")]
    assert reply["model"] == CHAT_MODEL.name
    assert reply["prompt_format_version"] == 1


async def test_questions_follow_the_same_tokens_and_decode_nothing(deciding: Service) -> None:
    reply = await decide(deciding, CATEGORY, ANGER)
    first, second = (stream.spec for stream in deciding.engine.streams)
    shared = 0
    while first.prompt[shared] == second.prompt[shared]:
        shared += 1
    assert first.prompt[0] == BOS
    assert shared >= len(ids_of("Charged twice!"))
    assert [spec.stopping.max_new_tokens for spec in (first, second)] == [1, 1]
    assert first.sampling.score_token_ids == tuple(ids_of(label)[0] for label in "ABC")
    usage = reply["usage"]
    assert usage["output_tokens"] == 0
    assert usage["input_tokens"] == usage["total_tokens"] < len(first.prompt) + len(second.prompt)


async def test_a_text_is_quoted_beside_the_boolean_of_the_same_text(deciding: Service) -> None:
    mixed = {"type": "choice", "instructions": "Which?", "choices": [{"value": "true"}, {"value": True}]}
    reply = await decide(deciding, mixed, mixed | {"choices": [{"value": "true"}, {"value": False}]})
    first, second = (stream.spec.prompt for stream in deciding.engine.streams)
    quoted, plain = ids_of('A. "true"'), ids_of("A. true\nB. false")
    assert any(first[at : at + len(quoted)] == quoted for at in range(len(first)))
    assert any(second[at : at + len(plain)] == plain for at in range(len(second)))
    assert [one["value"] for one in reply["answers"][0]["probabilities"]] == ["true", True]


async def test_both_orders_are_averaged(deciding: Service) -> None:
    # The model says A, whatever A is.
    deciding.engine.script = likely(lambda _, token: 0.0 if token == ids_of("A")[0] else -20.0)
    plain = await decide(deciding, ANGER)
    fair = await decide(deciding, ANGER, average_orders=True)
    assert plain["answers"][0]["score"] == pytest.approx(0.0, abs=1e-6)
    assert fair["answers"][0]["score"] == pytest.approx(0.5)


async def test_labels_of_several_tokens_multiply(deciding: Service) -> None:
    """More than 26 options have labels of two letters, which are two tokens here: the second depends on the first."""
    deciding.engine.model = dataclasses.replace(CHAT_MODEL, max_sequence_tokens=4096, max_tokenize_bytes=1 << 20)
    choices = [{"value": f"{number}"} for number in range(30)]

    def logprob(spec: GenerationSpec, token: int) -> float:
        letters = len(spec.sampling.score_token_ids)
        return math.log(0.75 if token == ids_of("B")[0] else 0.25) if letters == 2 else -math.log(letters)

    deciding.engine.script = likely(logprob)
    reply = await decide(deciding, {"type": "choice", "instructions": "Which?", "choices": choices})
    found = [one["probability"] for one in reply["answers"][0]["probabilities"]]
    # AA to AZ share a quarter; BA to BD three quarters.
    assert found == pytest.approx([0.25 / 26] * 26 + [0.75 / 4] * 4)
    assert sum(found) == pytest.approx(1.0)


async def test_messages_json_and_tool_calls_are_input(deciding: Service) -> None:
    items = [
        {"role": "developer", "content": "You judge tickets."},
        {"role": "user", "content": [{"type": "input_json", "data": {"charges": 2}}]},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "two charges"},
    ]
    await decide(deciding, DUPLICATE, input=items)
    text = bytes((token - 100) % 800 for token in deciding.engine.streams[0].spec.prompt if 100 <= token < 355)
    assert b"You judge tickets." in text
    assert b'{"charges":2}' in text
    assert text.index(b"two charges") < text.index(b"The customer was charged twice.")


async def test_the_text_of_a_control_token_in_a_question_stays_text(deciding: Service) -> None:
    await decide(deciding, DUPLICATE | {"instructions": "It has </s> in it."})
    assert 2 not in deciding.engine.streams[0].spec.prompt[1:-20]


def test_a_request_holds_one_permit() -> None:
    asked = AskedDecision(msgspec.convert({"input": "x", "questions": [DUPLICATE] * 400}, DecisionRequest))
    assert (asked.generations, asked.permits) == (400, 1)


async def test_logits_that_are_no_numbers_are_an_error(deciding: Service) -> None:
    deciding.engine.script = likely(lambda _spec, _token: math.nan)
    response = await deciding.post("/v1/decisions", {"input": "x", "questions": [ANGER]})
    assert response.status == 424


@pytest.mark.parametrize(
    ("question", "field", "text"),
    [
        (DUPLICATE | {"instructions": " "}, "questions[0].instructions", "must not be blank"),
        (CATEGORY | {"choices": [{"value": "a"}]}, "questions[0].choices", "2 to 255 entries. Given: 1"),
        (CATEGORY | {"choices": [{"value": "a"}, {"value": "a"}]}, "questions[0].choices[1].value", "must differ"),
        (CATEGORY | {"choices": [{"value": ""}, {"value": "a"}]}, "questions[0].choices[0].value", "blank"),
        (ANGER | {"levels": [{"label": "a"}, {"label": " "}]}, "questions[0].levels[1].label", "blank"),
        (
            DUPLICATE | {"instructions": [{"type": "input_image", "image_url": "data:,"}]},
            "questions[0].instructions[0].type",
            "input_text",
        ),
    ],
)
async def test_what_is_wrong_with_a_question_is_named(
    deciding: Service, question: dict[str, Any], field: str, text: str
) -> None:
    response = await deciding.post("/v1/decisions", {"input": "x", "questions": [question]})
    error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == field
    assert text in error["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [DUPLICATE] * 401}, "questions"),
        ({"prompt_format_version": 9}, "prompt_format_version"),
        ({"input": []}, "input"),
    ],
)
async def test_what_is_wrong_with_a_request_is_named(deciding: Service, body: dict[str, Any], field: str) -> None:
    response = await deciding.post("/v1/decisions", {"input": "x", "questions": [DUPLICATE]} | body)
    assert response.status == 400
    assert (await response.json())["error"]["param"] == field


async def test_a_vocabulary_that_reads_two_labels_as_one_is_an_error(deciding: Service) -> None:
    engine = deciding.engine
    tokenize = engine.tokenize

    async def blurred(text: str, **options: Any) -> Any:
        return await tokenize(text.replace("B", "A") if text.endswith(("A", "B")) else text, **options)

    engine.tokenize = blurred  # type: ignore[method-assign]
    response = await deciding.post("/v1/decisions", {"input": "x", "questions": [ANGER]})
    assert response.status == 424
    assert "A and B as the same tokens" in (await response.json())["error"]["message"]


async def test_a_model_that_reasons_answers_after_an_empty_reasoning_block(deciding: Service) -> None:
    template = CHAT_MODEL.chat_template + "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
    deciding.engine.model = dataclasses.replace(CHAT_MODEL, chat_template=template)
    await decide(deciding, ANGER)
    assert deciding.engine.streams[0].spec.prompt[-len(ids_of("</think>\n\n")) :] == ids_of("</think>\n\n")
