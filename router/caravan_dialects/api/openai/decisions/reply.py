"""Answers ``/v1/decisions``: a row of logits for each label's token, and the probabilities of the answers."""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import Run, ValidRequest, collect
from caravan_dialects.api.openai.decisions.labels import normalized
from caravan_dialects.api.openai.decisions.prompts import Readings, readings_of
from caravan_dialects.api.openai.decisions.questions import PROMPT_FORMAT_VERSION
from caravan_dialects.api.openai.decisions.schema import (
    ChoiceAnswer,
    ChoiceProbability,
    ChoiceQuestion,
    Decision,
    DecisionAnswer,
    DecisionRequest,
    PredicateAnswer,
    PredicateQuestion,
    Question,
    ScoreAnswer,
    ScoreProbability,
    ScoreQuestion,
)
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.responses.schema import InputTokensDetails, OutputTokensDetails, ResponseUsage
from caravan_dialects.text.assembler import Piece, TextOptions
from caravan_proto.messages.sampling import SamplingParams
from caravan_scheduler.core.errors import GenerationError
from caravan_scheduler.core.generation import GenerationSpec, StoppingParams

_ENCODER = msgspec.json.Encoder()


class AskedDecision(Asked):
    """One request for decisions. It counts as one running request: its branches share the input and decode nothing."""

    dialect = OPENAI

    def __init__(self, body: DecisionRequest) -> None:
        self._body = body
        self.model = body.model
        # A body without questions is a request that fails.
        self.generations = max(1, len(body.questions)) * (2 if body.average_orders else 1)
        self.permits = 1

    async def validate(self, context: Context) -> "DecisionReply":
        """Check the body. Raises RequestError, EngineError."""
        readings = await readings_of(context, self._body)
        serving = context.serving(self._body)
        requests = []
        for reading in readings.readings:
            for row in reading.labels.rows:
                prompt = reading.prompt + row.path
                sampling = SamplingParams(temperature=0.0, logprobs=True, score_token_ids=row.following)
                media = None if readings.media is None else readings.media.located(prompt)
                spec = GenerationSpec(
                    prompt=prompt,
                    sampling=sampling,
                    stopping=StoppingParams(max_new_tokens=1),
                    media=media,
                    adapter=context.adapter_key,
                    **serving,
                )
                requests.append(ValidRequest(specs=(spec,), text=TextOptions(), characters=0))
        # The headers of the reply say how long the request was, however many prompts it has.
        requests[0] = replace(requests[0], characters=readings.characters)
        return DecisionReply(self._body, readings, requests, context.adapter or context.model.name)


class DecisionReply(Answer):
    """The answers to all questions, whose rows come in their order."""

    def __init__(self, body: DecisionRequest, readings: Readings, requests: Sequence[ValidRequest], model: str) -> None:
        super().__init__(requests)
        self._body = body
        self._readings = readings
        self._model = model

    async def whole(self, runs: Sequence[Run]) -> bytes:
        return _ENCODER.encode(await self.decision(runs))

    async def decision(self, runs: Sequence[Run]) -> Decision:
        """Read all runs and return the answers. Raises EngineError."""
        rows = iter(await collect(runs))
        for run in runs:
            if run.cut is not None:
                raise run.cut
        found = [
            reading.labels.logprobs([_scored(next(rows)) for _ in reading.labels.rows])
            for reading in self._readings.readings
        ]
        orders = len(found) // len(self._body.questions)
        answers = [
            _answer(question, found[number * orders : (number + 1) * orders])
            for number, question in enumerate(self._body.questions)
        ]
        return Decision(
            model=self._model,
            answers=answers,
            usage=self._usage(runs),
            prompt_format_version=PROMPT_FORMAT_VERSION,
        )

    def _usage(self, runs: Sequence[Run]) -> ResponseUsage:
        shared = self._readings.shared
        tokens = shared + sum(len(reading.prompt) - shared for reading in self._readings.readings)
        # The first branch computes the input; the others find it in the cache.
        cached = min(shared, *(run.cached_tokens for run in runs))
        return ResponseUsage(
            input_tokens=tokens,
            input_tokens_details=InputTokensDetails(cached, 0),
            output_tokens=0,
            output_tokens_details=OutputTokensDetails(0),
            total_tokens=tokens,
        )


def _scored(pieces: Sequence[Piece]) -> dict[int, float]:
    """Return the log probabilities of the tokens that a row was asked for."""
    return {token.token_id: token.logprob for token in pieces[0].token.alternatives}


def _answer(question: Question, found: Sequence[Sequence[float]]) -> DecisionAnswer:
    """Return the answer to a question; ``found``: the log probabilities of its labels, in each order of its options."""
    for logprobs in found:
        if any(map(math.isnan, logprobs)) or max(logprobs) == -math.inf:
            raise GenerationError("the model computed no finite logits for this request")
    orders = len(found)
    probabilities = [math.fsum(of_label) / orders for of_label in zip(*map(normalized, found), strict=True)]
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    confidence = math.fsum(math.exp(logprobs[best]) for logprobs in found) / orders
    match question:
        case PredicateQuestion():
            return PredicateAnswer(name=question.name, probability=probabilities[0])
        case ChoiceQuestion(choices=choices):
            shown = [ChoiceProbability(one.value, likely) for one, likely in zip(choices, probabilities, strict=True)]
            return ChoiceAnswer(
                name=question.name, choice=choices[best].value, confidence=confidence, probabilities=shown
            )
        case ScoreQuestion(levels=levels):
            return ScoreAnswer(
                name=question.name,
                score=math.fsum(value * likely for value, likely in enumerate(probabilities)),
                confidence=confidence,
                probabilities=[
                    ScoreProbability(value, level.label, likely)
                    for value, (level, likely) in enumerate(zip(levels, probabilities, strict=True))
                ],
            )
