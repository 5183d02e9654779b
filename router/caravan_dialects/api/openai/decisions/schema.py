"""Body and reply of ``/v1/decisions``, with OpenAI's fields."""

from typing import Annotated, Any

import msgspec

from caravan_dialects.api.generation.schema import (
    CacheSalt,
    ModelName,
    NoEffect,
    Priority,
    PromptCacheKey,
    SessionId,
    Timeout,
)
from caravan_dialects.api.openai.responses.schema import Item, ResponseUsage

Instructions = Annotated[
    str | list[dict[str, Any]],
    msgspec.Meta(description="Text, or parts of type `input_text` and `input_json`. Images belong in `input`."),
]
ChoiceValue = str | bool


class PredicateQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="predicate"):
    """How likely it is that a statement about the input is true."""

    instructions: Instructions
    name: str | None = None


class DecisionOption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A string and a boolean with the same text are different values."""

    value: ChoiceValue
    description: str | None = None


class ChoiceQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="choice"):
    """Which of 2 to 255 options fits the input."""

    instructions: Instructions
    choices: list[DecisionOption]
    name: str | None = None


class DecisionLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    label: str
    description: str | None = None


class ScoreQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="score"):
    """Where the input is on a scale of 2 to 255 ordered levels."""

    instructions: Instructions
    levels: list[DecisionLevel]
    name: str | None = None


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """1 to 400 questions about one input.

    ``average_orders``: ask each question twice, with its options in both orders, and average the probabilities: models
    prefer some places in a list. ``prompt_format_version``: refuse the request unless the server asks questions in the
    words of this version, so that probabilities can be compared with earlier ones.
    """

    input: str | list[Item]
    questions: list[Question]
    model: ModelName = None
    average_orders: bool = False
    prompt_format_version: int | None = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    session_id: SessionId = None
    prompt_cache_key: PromptCacheKey = None
    prompt_cache_options: NoEffect = None
    safety_identifier: NoEffect = None

    @property
    def speculate(self) -> int | None:
        """Nothing is decoded, so there is nothing to draft."""
        return 0


class PredicateAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="predicate"):
    """``probability``: of the statement being true."""

    name: str | None
    probability: float


class ChoiceProbability(msgspec.Struct, frozen=True):
    value: ChoiceValue
    probability: float


class ChoiceAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="choice"):
    """``choice``: the likeliest option. ``probabilities``: of all options, in their order; their sum is 1.

    ``confidence``: the probability of the likeliest option among everything that the model could say. It is far below
    that among the options where the model would rather not answer with any of them.
    """

    name: str | None
    choice: ChoiceValue
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreProbability(msgspec.Struct, frozen=True):
    """``value``: the place of the level, from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """``score``: the expected value, from 0 to the number of levels - 1. ``confidence``: see ChoiceAnswer."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[ScoreProbability]


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The answers in the order of the questions. ``prompt_format_version``: of the words around them.

    ``usage`` counts the tokens of the input once, and those of each question. Nothing is generated.
    """

    model: str
    answers: list[DecisionAnswer]
    usage: ResponseUsage
    prompt_format_version: int
