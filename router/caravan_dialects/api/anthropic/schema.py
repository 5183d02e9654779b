"""Bodies, replies and events of Anthropic's Messages API. Fields that a body has beside these are ignored."""

from typing import Annotated, Any, Literal

import msgspec

from caravan_dialects.api.generation.schema import (
    NEUTRAL,
    CacheSalt,
    FirstDifference,
    OnlyNull,
    Priority,
    RefusedByRule,
    ServiceTier,
    SessionId,
    Speculate,
    Timeout,
)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The file of an image, or the text of a document. Nothing is fetched.

    ``type``: "base64" (``data``) for an image, a PNG, JPEG, WebP or GIF file, whatever ``media_type`` says; "text"
    (``data``) or "content" (``content``) for a document.
    """

    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: "str | list[Block] | None" = None


class ToolChange(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that is added or removed: by its ``name`` in ``tools``, or by its ``definition``."""

    name: str | None = None
    definition: "ToolParam | None" = None


class CacheControl(msgspec.Struct, frozen=True, kw_only=True):
    """Keep what is computed of the prompt for ``ttl`` after its last use, by default 5 minutes.

    It is kept in memory or files, or in the KV cache where there are none, while the share of the API key pays for
    that. The longest of a request counts for all of its prompt.
    """

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message.

    ``type``: "text" (with ``text``), "image" (``source``) if the model reads images, "document" (``source``, ``title``,
    ``context``) if it is a text, "search_result" (``source``, ``title``, ``content``), "thinking" (``thinking``),
    "redacted_thinking", "tool_use" (``id``, ``name``, ``input``), "tool_result" (``tool_use_id``, ``content``,
    ``is_error``), in it "tool_reference" (``tool_name``). In an assistant's turn "compaction" (``content``), which
    stands for all before it, and what tools that Anthropic runs have left: "server_tool_use", "mcp_tool_use" and
    their results. In a system's turn "tool_addition" and "tool_removal" (``tool``). Others are refused.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | dict[str, Any] | None" = None
    source: Source | str | None = None
    is_error: bool | None = None
    title: str | None = None
    context: str | None = None
    url: str | None = None
    tool_name: str | None = None
    tool: ToolChange | None = None
    cache_control: CacheControl | None = None


class MessageParam(msgspec.Struct, frozen=True, kw_only=True):
    """A turn. Turns of "system", and "ctx" and "msg" as Claude Code sends them, join the user's turn beside them."""

    role: Literal["user", "assistant", "system", "ctx", "msg"]
    content: str | list[Block]


class ToolParam(msgspec.Struct, frozen=True, kw_only=True):
    """A function. ``type`` may be "custom".

    Tools that Anthropic runs, such as "web_search_20250305", are left out; those that it defines, such as
    "bash_20250124", are refused. ``strict``: calls of the request match their schemas, as in chat completions.
    """

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoiceParam(msgspec.Struct, frozen=True, kw_only=True):
    """``name``: the function to call if ``type`` is "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model reasons; a model that cannot ignores it. Reasoning is cut off after ``budget_tokens``."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON schema that the answer matches."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``effort``: how much the model reasons; ignored by a model that cannot."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that decide the prompt. ``system``: a text or blocks of text."""

    messages: list[MessageParam]
    model: str = ""
    system: str | list[Block] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: Annotated[list[Any] | None, msgspec.Meta(extra={NEUTRAL: ([],)})] = None
    thread: RefusedByRule = None
    # Edits are not made, and the reply says so.
    context_management: Any = None
    cache_control: CacheControl | None = None


class CountTokensRequest(PromptFields, frozen=True, kw_only=True):
    """The fields of a request for a message that decide its prompt."""


class DiagnosticsParam(msgspec.Struct, frozen=True, kw_only=True):
    """``previous_message_id``: id of the message whose request this one is compared with; null in the first turn."""

    previous_message_id: str | None = None


class MessagesRequest(PromptFields, frozen=True, kw_only=True):
    """A request for a message. ``max_tokens``: more than fits in the context means all that fits.

    ``diagnostics``: report why the prompt was not in the cache, and remember hashes of this request for the next one.
    Of ``metadata``, only the session that ``user_id`` names has an effect, as Claude Code sends it.
    """

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    container: OnlyNull = None
    diagnostics: DiagnosticsParam | None = None
    metadata: Any = None
    service_tier: ServiceTier = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    session_id: SessionId = None
    speculate: Speculate = None


class CountedEdits(msgspec.Struct, frozen=True):
    """``original_input_tokens``: tokens before edits of the context, of which none are made."""

    original_input_tokens: int


class TokenCount(msgspec.Struct, frozen=True):
    """``context_management``: present if the request has it."""

    input_tokens: int
    context_management: CountedEdits | msgspec.UnsetType = msgspec.UNSET


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """``signature``: a digest of the thinking. It is not checked when the block comes back."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ReplyBlock = TextBlock | ThinkingBlock | ToolUseBlock


class AppliedEdits(msgspec.Struct, frozen=True):
    """Edits of the context that were made: none."""

    applied_edits: list[Any] = []


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """``thinking_tokens``: tokens of the reasoning, without its markers."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """``input_tokens``: tokens of the prompt that were not in the cache. The others are read from it.

    ``output_tokens_details``: absent if the model does not reason. ``service_tier``: "standard", "priority" or, for the
    lowest priority, "batch".
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | msgspec.UnsetType = msgspec.UNSET
    service_tier: str = "standard"


class CacheMissReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why the prompt of a request could not begin as the one before it.

    ``type``: "model_changed", "system_changed", "tools_changed", "messages_changed", "previous_message_not_found", or
    "unavailable" for another field. ``cache_missed_input_tokens``: tokens of the earlier prompt after what both have in
    common.
    """

    type: str
    cache_missed_input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    first_difference: FirstDifference | msgspec.UnsetType = msgspec.UNSET


class Diagnostics(msgspec.Struct, frozen=True):
    cache_miss_reason: CacheMissReason


class AnthropicMessage(msgspec.Struct, kw_only=True, tag="message"):
    """``stop_reason``: "end_turn", "max_tokens", "stop_sequence" or "tool_use"; null where a stream begins.

    ``context_management`` and ``diagnostics``: present if the request has it. ``diagnostics`` is null if the prompt
    continues the one it was compared with.
    """

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ReplyBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    context_management: AppliedEdits | msgspec.UnsetType = msgspec.UNSET
    diagnostics: Diagnostics | msgspec.UnsetType | None = msgspec.UNSET


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    message: AnthropicMessage


class ContentBlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: ReplyBlock


class ContentBlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    context_management: AppliedEdits | msgspec.UnsetType = msgspec.UNSET


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    """The last event."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """An event that only keeps the connection open."""


BlockEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop
Event = MessageStart | BlockEvent | MessageDelta | MessageStop | Ping
