"""Replies of Google's Gemini API, whole and streamed."""

from typing import Any, Literal

import msgspec


class ReplyCall(msgspec.Struct, frozen=True, kw_only=True):
    """A function call."""

    id: str
    name: str
    args: dict[str, Any]


class ReplyPart(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``text``, which is reasoning if ``thought`` is true, or a ``functionCall``."""

    text: str | msgspec.UnsetType = msgspec.UNSET
    thought: bool | msgspec.UnsetType = msgspec.UNSET
    function_call: ReplyCall | msgspec.UnsetType = msgspec.UNSET


class ReplyContent(msgspec.Struct, frozen=True):
    parts: list[ReplyPart]
    role: Literal["model"] = "model"


class LogprobCandidate(msgspec.Struct, frozen=True, rename="camel"):
    token: str
    token_id: int
    log_probability: float | None


class TopCandidates(msgspec.Struct, frozen=True):
    """Alternatives of one token, the most probable first."""

    candidates: list[LogprobCandidate]


class LogprobsResult(msgspec.Struct, frozen=True, rename="camel"):
    """An entry for each token, in both lists."""

    chosen_candidates: list[LogprobCandidate]
    top_candidates: list[TopCandidates]


class GeminiCandidate(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``finishReason``: "STOP" or "MAX_TOKENS"; in a stream, in a candidate's last chunk only."""

    content: ReplyContent
    finish_reason: str | msgspec.UnsetType = msgspec.UNSET
    index: int = 0
    avg_logprobs: float | msgspec.UnsetType = msgspec.UNSET
    logprobs_result: LogprobsResult | msgspec.UnsetType = msgspec.UNSET


class UsageMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``promptTokenCount``: with those that were cached. ``candidatesTokenCount``: without reasoning.

    ``thoughtsTokenCount``: absent if the model does not think.
    """

    prompt_token_count: int
    candidates_token_count: int
    total_token_count: int
    cached_content_token_count: int
    thoughts_token_count: int | msgspec.UnsetType = msgspec.UNSET


class GenerateContentResponse(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A whole reply, or a chunk of a stream."""

    candidates: list[GeminiCandidate]
    usage_metadata: UsageMetadata
    model_version: str
    response_id: str


class CountTokensResponse(msgspec.Struct, frozen=True, rename="camel"):
    total_tokens: int


class ContentEmbedding(msgspec.Struct, frozen=True):
    """A vector of length 1."""

    values: list[float]


class EmbedContentResponse(msgspec.Struct, frozen=True):
    embedding: ContentEmbedding


class BatchEmbedContentsResponse(msgspec.Struct, frozen=True):
    embeddings: list[ContentEmbedding]


class GeminiModel(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``inputTokenLimit``: the context, for prompt and output together, as ``outputTokenLimit``; absent if unknown."""

    name: str
    base_model_id: str
    version: str
    display_name: str
    supported_generation_methods: list[str]
    input_token_limit: int | msgspec.UnsetType = msgspec.UNSET
    output_token_limit: int | msgspec.UnsetType = msgspec.UNSET


class GeminiModelList(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A page of models. ``nextPageToken``: absent on the last one."""

    models: list[GeminiModel]
    next_page_token: str | msgspec.UnsetType = msgspec.UNSET
