"""Bodies and replies of ``/v1/responses``. Unknown fields are ignored: agents add new ones all the time."""

from typing import Annotated, Any, Literal

import msgspec

from caravan_dialects.api.generation.schema import (
    CacheOptions,
    CacheRetention,
    CacheSalt,
    FirstDifference,
    JsonObjectFormat,
    ModelName,
    NoEffect,
    OnlyEchoed,
    Priority,
    PromptCacheKey,
    RefusedByRule,
    Schema,
    ServiceTier,
    SessionId,
    Speculate,
    TextFormat,
    Timeout,
)
from caravan_dialects.api.openai.chat.schema import Effort
from caravan_dialects.api.openai.schema import SamplingFields

Item = Annotated[
    dict[str, Any],
    msgspec.Meta(
        description="OpenAI's item: a message, a function or custom tool call, its output, a reasoning item, or a "
        "reference to an earlier item. The model is shown calls, results and texts of other types. The default `type` "
        "is message."
    ),
]
Input = str | list[Item]
Metadata = dict[str, str]


class NamedSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, tag="json_schema"):
    """JSON that matches a schema, whatever ``strict`` says."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer."""

    format: TextFormat | JsonObjectFormat | NamedSchemaFormat | None = None
    verbosity: NoEffect = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """``effort``: how much the model reasons; a model that cannot ignores it. A ``summary`` is never made."""

    effort: Effort | None = None
    summary: Annotated[str | None, OnlyEchoed] = None


class ConversationName(msgspec.Struct, frozen=True, kw_only=True):
    id: str


class InputFields(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The fields that decide the prompt.

    ``instructions`` count for this response alone. ``previous_response_id`` continues a response and ``conversation`` a
    conversation. ``truncation``: "auto" leaves out the oldest turns if not all fit. Function tools and custom tools,
    also in a ``namespace``, are offered to the model, and with ``type`` "mcp" those of a configured server, which are
    called here; others are left out. ``reasoning_budget_tokens``: maximum number of reasoning tokens, as in chat.
    """

    model: ModelName = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    truncation: Literal["auto", "disabled"] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    reasoning_budget_tokens: int | None = None
    prompt: RefusedByRule = None


class PromptCacheOptions(CacheOptions, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """``prewarm``: true is the same as ``generate`` false. ``mode`` changes nothing: all prompts are cached.

    ``comparison_response_id``: compare the request with that of a response of this API key, for
    ``prompt_cache_diagnostics``.
    """

    prewarm: bool | None = None
    comparison_response_id: str | None = None


class BackgroundOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``completion_window``: by when the response must have ended; with "2h" or "8h" it goes after all others.

    ``continuation_id``: the job that it belongs to, which names its session if nothing else does.
    """

    completion_window: Literal["soonest", "2h", "8h"] | None = None
    continuation_id: str | None = None


class ResponseRequest(InputFields, frozen=True, kw_only=True):
    """``store``: keep the response, so that it can be continued; by default true. ``background``: generate it also
    if no client waits for it; the answer is a response with the status "queued", or with ``stream`` its events.

    ``max_output_tokens`` above what is left of the context counts as all that is left. ``generate``: false computes the
    prompt, so that it is in the cache, and generates nothing. ``include`` with "message.output_text.logprobs" or
    ``top_logprobs`` above 0 returns log probabilities of the tokens of messages. ``max_tool_calls``: maximum number of
    calls to MCP servers. These change nothing: ``stream_options``, ``user`` and what OpenAI's platform adds.
    """

    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None
    metadata: Metadata | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    generate: bool | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    stream_options: NoEffect = None
    user: NoEffect = None
    safety_identifier: Annotated[str | None, OnlyEchoed] = None
    service_tier: ServiceTier = None
    prompt_cache_key: PromptCacheKey = None
    prompt_cache_retention: CacheRetention = None
    max_tool_calls: int | None = None
    client_metadata: NoEffect = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    session_id: SessionId = None
    speculate: Speculate = None


class InputTokensDetails(msgspec.Struct, frozen=True):
    """``cache_write_tokens`` is always 0: what is cached costs nothing extra.

    ``image_tokens`` and ``audio_tokens``: those of images and audio; absent if there are none.
    """

    cached_tokens: int
    cache_write_tokens: int = 0
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET
    audio_tokens: int | msgspec.UnsetType = msgspec.UNSET


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    def plus(self, other: "ResponseUsage") -> "ResponseUsage":
        """Return the sum, in which every prompt counts."""
        mine, its = self.input_tokens_details, other.input_tokens_details
        return ResponseUsage(
            input_tokens=self.input_tokens + other.input_tokens,
            input_tokens_details=InputTokensDetails(
                mine.cached_tokens + its.cached_tokens,
                image_tokens=_sum(mine.image_tokens, its.image_tokens),
                audio_tokens=_sum(mine.audio_tokens, its.audio_tokens),
            ),
            output_tokens=self.output_tokens + other.output_tokens,
            output_tokens_details=OutputTokensDetails(
                self.output_tokens_details.reasoning_tokens + other.output_tokens_details.reasoning_tokens
            ),
            total_tokens=self.total_tokens + other.total_tokens,
        )


def _sum(first: int | msgspec.UnsetType, second: int | msgspec.UnsetType) -> int | msgspec.UnsetType:
    if first is msgspec.UNSET:
        return second
    return first if second is msgspec.UNSET else first + second


NO_USAGE = ResponseUsage(
    input_tokens=0,
    input_tokens_details=InputTokensDetails(0),
    output_tokens=0,
    output_tokens_details=OutputTokensDetails(0),
    total_tokens=0,
)


class ResponseFailure(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class Truncated(msgspec.Struct, frozen=True):
    """The turns and the ids of the items that ``truncation`` left out of the prompt."""

    turns: int
    items: list[str]


class PromptCacheDiagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the prompt could begin as the one it was compared with.

    ``type``: "cache_hit", "cache_miss", "comparison_response_not_found", or "unavailable" for a field without a
    ``reason``. ``reason``: "model_changed", "tools_changed", "text_format_changed",
    "reasoning_effort_changed", "context_compacted" or "input_changed". ``cache_missed_tokens``: tokens of the prompt
    after what both have in common, which has ``comparison_reusable_tokens``.
    """

    type: str
    reason: str | msgspec.UnsetType = msgspec.UNSET
    cache_missed_tokens: int | msgspec.UnsetType = msgspec.UNSET
    comparison_reusable_tokens: int | msgspec.UnsetType = msgspec.UNSET
    first_difference: FirstDifference | msgspec.UnsetType = msgspec.UNSET


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. ``status``: "queued", "in_progress", "completed", "incomplete", "cancelled" or "failed".

    ``truncated``: what was left out of the prompt; null if nothing was. ``service_tier``: the one that was used.
    ``prompt_cache_diagnostics``: present if the request asks for a comparison.
    """

    id: str
    created_at: int
    model: str
    status: str
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationName | None
    reasoning: Reasoning
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    metadata: Metadata
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_tool_calls: int | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    output: list[dict[str, Any]] = msgspec.field(default_factory=list)
    object: str = "response"
    background: bool = False
    service_tier: str = "default"
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    truncated: Truncated | None = None
    usage: ResponseUsage | None = None
    prompt_cache_diagnostics: PromptCacheDiagnostics | msgspec.UnsetType = msgspec.UNSET


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream. ``type`` says which of the other fields it has; the event is named by it, too.

    ``stream_id``: that of the request, on a WebSocket connection.
    """

    type: str
    sequence_number: int
    response: ResponseObject | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    item: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    part: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    input: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET
    stream_id: str | msgspec.UnsetType = msgspec.UNSET


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True):
    """One page of items. ``last_id`` is what ``after`` takes for the next page."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class InputTokenCount(msgspec.Struct, frozen=True):
    input_tokens: int
    object: str = "response.input_tokens"
