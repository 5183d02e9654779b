"""Bodies and replies of ``/v1/score``, with vLLM's fields, and of ``/v1/rerank``, with Jina's and vLLM's."""

import msgspec

from caravan_dialects.api.generation.marks import NoEffect
from caravan_dialects.api.generation.schema import ModelName


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either side has one text, or both have as many. ``queries`` and ``documents`` are newer names of the fields."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    model: ModelName = None
    user: NoEffect = None


class Score(msgspec.Struct, frozen=True):
    """The cosine of the angle between the two vectors: 1 for texts with equal vectors. From a model that ranks: how
    relevant the second text is to the first, from 0 to 1.
    """

    index: int
    object: str
    score: float


class ScoreUsage(msgspec.Struct, frozen=True):
    """Counts what is computed: each different text once, or from a model that ranks each pair."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class ScoreList(msgspec.Struct, frozen=True):
    """One entry per pair, in order."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``top_n``: how many of the best documents to return; 0 or null returns all."""

    query: str
    documents: list[str | Document]
    model: ModelName = None
    top_n: int | None = None
    return_documents: bool | None = None
    user: NoEffect = None


class RankedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """``index``: the place in the request. ``document``: absent if ``return_documents`` is false."""

    index: int
    relevance_score: float
    document: Document | None = None


class RankedList(msgspec.Struct, frozen=True):
    """The documents, the most relevant one first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: ScoreUsage
