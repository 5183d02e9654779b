"""Decisions on models with real words: probabilities are those of the labels, and the input is computed once."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from caravan import LLM, SamplingParams
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.openai.decisions.prompts import Readings, readings_of
from caravan_dialects.api.openai.decisions.reply import DecisionReply
from caravan_dialects.api.openai.decisions.schema import (
    ChoiceAnswer,
    Decision,
    DecisionRequest,
    PredicateAnswer,
    ScoreAnswer,
)
from caravan_testing.shard_models import DEMO_MODEL, WORDS_MODEL, fetched
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama

pytestmark = pytest.mark.model

INPUT = "The customer was charged twice for one renewal and asks for a refund. " * 4
PREDICATE = {"type": "predicate", "instructions": "The customer was charged more than once."}
SCORE = {
    "type": "score",
    "instructions": "How angry is the customer?",
    "levels": [{"label": "calm"}, {"label": "angry"}],
}
# More than 26 options have labels of two letters, of which many are two tokens.
CHOICE = {"type": "choice", "instructions": "Which number?", "choices": [{"value": str(one)} for one in range(40)]}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(fetched(WORDS_MODEL), exact=True, threads=1, ctx_size=16384) as model:
        yield model


def probabilities(decision: Decision) -> list[list[float]]:
    found = []
    for answer in decision.answers:
        match answer:
            case PredicateAnswer(probability=likely):
                found.append([likely, 1 - likely])
            case ChoiceAnswer() | ScoreAnswer():
                found.append([one.probability for one in answer.probabilities])
    return found


def test_probabilities_are_those_of_the_labels_after_the_same_prompt(llm: LLM) -> None:
    questions: list[Any] = [PREDICATE, CHOICE, SCORE]
    decided = llm.decide(INPUT, questions)
    readings = _readings(llm, questions)
    for reading, found in zip(readings.readings, probabilities(decided), strict=True):
        labels = reading.labels.labels
        whole = [{"prompt_token_ids": [*reading.prompt, *label]} for label in labels]
        outputs = llm.generate(whole, SamplingParams(max_tokens=1, prompt_logprobs=0))  # type: ignore[arg-type]
        logprobs = []
        for label, output in zip(labels, outputs, strict=True):
            assert output.prompt_logprobs is not None
            known = output.prompt_logprobs[len(reading.prompt) :]
            logprobs.append(sum((one or {})[token].logprob for token, one in zip(label, known, strict=True)))
        weights = [math.exp(value) for value in logprobs]
        assert found == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-6)
        assert sum(found) == pytest.approx(1.0, abs=1e-9)
    assert any(len(label) > 1 for label in readings.readings[1].labels.labels)


def test_the_input_is_computed_once_and_each_question_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a model that computes the input far more slowly than it copies it, or it may well be computed again."""
    shape = Shape(embedding=256, layers=4, inner=1024, context=16384)
    model = write_tiny_llama(tmp_path / "m.gguf", shape, DEMO_MODEL)
    computed: list[int] = []
    decision = DecisionReply.decision

    async def counted(self: DecisionReply, runs: Sequence[Run]) -> Decision:
        made = await decision(self, runs)
        computed.extend(len(run.spec.prompt) - run.cached_tokens for run in runs)
        return made

    monkeypatch.setattr(DecisionReply, "decision", counted)
    questions = [PREDICATE | {"instructions": f"The customer is number {number}."} for number in range(20)]
    with LLM(model, exact=True, threads=1, ctx_size=16384) as llm:
        decided = llm.decide(f"Once. {INPUT * 5}", questions)
    assert sum(computed) <= decided.usage.input_tokens
    assert decided.usage.output_tokens == 0
    assert len(computed) == len(decided.answers) == 20


def _readings(llm: LLM, questions: Sequence[Any]) -> Readings:
    """Return what is computed for these questions."""
    body = msgspec.convert({"input": INPUT, "questions": questions}, DecisionRequest)
    return llm._opened.loop.run(readings_of(llm._opened.local._context(), body))
