"""Bodies of Google's Gemini API. Each field may also be written with underscores, as in Protobuf's JSON."""

from typing import Annotated, Any, Literal

import msgspec

from caravan_dialects.api.generation.schema import (
    NEUTRAL,
    CacheSalt,
    NoEffect,
    OnlyNull,
    Priority,
    ServiceTier,
    SessionId,
    Speculate,
    Timeout,
    Unsupported,
)

_Level = Literal["THINKING_LEVEL_UNSPECIFIED", "MINIMAL", "LOW", "MEDIUM", "HIGH", "minimal", "low", "medium", "high"]
_TextAlone = Annotated[
    Any,
    msgspec.Meta(description='Accepted only with `["TEXT"]`, which changes nothing.', extra={NEUTRAL: (["TEXT"],)}),
]


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """An object in a body. Its types inherit how names are written, and that unknown fields are noticed."""


class Blob(_Body, frozen=True, kw_only=True):
    """A file in base64. Images may be PNG, JPEG, WebP or GIF files, audio WAV, MP3 or FLAC."""

    mime_type: str = ""
    data: str = ""
    display_name: NoEffect = None


class FileData(_Body, frozen=True, kw_only=True):
    """A file that Google has. It is refused: nothing is fetched."""

    file_uri: str = ""
    mime_type: str | None = None
    display_name: NoEffect = None


class FunctionCallPart(_Body, frozen=True, kw_only=True):
    name: str = ""
    args: dict[str, Any] | None = None
    id: str | None = None


class FunctionResponseFile(_Body, frozen=True, kw_only=True):
    """An image that a function has returned."""

    inline_data: Blob | None = None
    file_data: FileData | None = None


class FunctionResponsePart(_Body, frozen=True, kw_only=True):
    """What a function has returned: the text of ``output``, ``result`` or ``error`` if that is all, else the object."""

    name: str = ""
    response: dict[str, Any] | None = None
    id: str | None = None
    parts: list[FunctionResponseFile] | None = None
    will_continue: NoEffect = None
    scheduling: NoEffect = None


class ExecutableCode(_Body, frozen=True, kw_only=True):
    """A program that Google has run in an earlier turn."""

    code: str = ""
    language: NoEffect = None
    id: NoEffect = None


class CodeExecutionResult(_Body, frozen=True, kw_only=True):
    """What that program has printed."""

    output: str | None = None
    outcome: NoEffect = None
    id: NoEffect = None


class ContentPartBody(_Body, frozen=True, kw_only=True):
    """A part of a content: one of ``text``, ``inlineData``, ``functionCall``, ``functionResponse``,
    ``executableCode`` and ``codeExecutionResult``.

    ``thought``: the text is reasoning. ``inlineData``: an image, audio or text.
    """

    text: str | None = None
    thought: bool | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    function_call: FunctionCallPart | None = None
    function_response: FunctionResponsePart | None = None
    executable_code: ExecutableCode | None = None
    code_execution_result: CodeExecutionResult | None = None
    # What a reply has of it comes back with each turn, and is not checked.
    thought_signature: str | None = None
    video_metadata: NoEffect = None
    media_resolution: NoEffect = None
    part_metadata: NoEffect = None


class Content(_Body, frozen=True, kw_only=True):
    """A turn. ``role``: "user", which is the default, or "model"; "function" and "tool" are older words for "user"."""

    parts: list[ContentPartBody] | ContentPartBody | None = None
    role: Literal["user", "model", "function", "tool", "system", ""] | None = None


class FunctionDeclaration(_Body, frozen=True, kw_only=True):
    """``parameters``: a schema in OpenAPI's form, or a JSON schema. ``parametersJsonSchema``: a JSON schema."""

    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None
    response: NoEffect = None
    response_json_schema: NoEffect = None
    behavior: NoEffect = None


class GeminiTool(_Body, frozen=True, kw_only=True):
    """Functions. Tools that only Google runs are left out."""

    function_declarations: list[FunctionDeclaration] | None = None
    google_search: NoEffect = None
    google_search_retrieval: NoEffect = None
    code_execution: NoEffect = None
    url_context: NoEffect = None
    google_maps: NoEffect = None
    file_search: NoEffect = None
    enterprise_web_search: NoEffect = None
    retrieval: NoEffect = None
    mcp_servers: Unsupported = None
    computer_use: OnlyNull = None


class FunctionCallingConfig(_Body, frozen=True, kw_only=True):
    """``mode``: "AUTO", "ANY" (the model must call a function), "NONE", or "VALIDATED" (calls match their schemas).

    ``allowedFunctionNames``: with "ANY" and "VALIDATED", the functions that may be called.
    """

    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] | None = None
    allowed_function_names: list[str] | None = None
    stream_function_call_arguments: NoEffect = None


class ToolConfig(_Body, frozen=True, kw_only=True):
    function_calling_config: FunctionCallingConfig | None = None
    retrieval_config: NoEffect = None
    include_server_side_tool_invocations: NoEffect = None


class ThinkingConfig(_Body, frozen=True, kw_only=True):
    """How much a model thinks; one that does not ignores it.

    ``includeThoughts``: replies have parts with reasoning. ``thinkingBudget``: reasoning ends by force after this
    number of tokens; 0 switches reasoning off, -1 means no limit.
    """

    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: _Level | None = None


class GenerationConfig(_Body, frozen=True, kw_only=True):
    """``maxOutputTokens``: more than fits in the context means all that fits, which is also the default.

    ``responseMimeType``: "text/plain", "application/json", or "text/x.enum" with the texts of ``responseSchema``.
    ``responseSchema``: a schema in OpenAPI's form; ``responseJsonSchema``: a JSON schema. ``logprobs``: how many
    alternatives each token has, with ``responseLogprobs``.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    candidate_count: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_mime_type: Literal["", "text/plain", "application/json", "text/x.enum"] | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_logprobs: bool | None = None
    logprobs: int | None = None
    thinking_config: ThinkingConfig | None = None
    response_modalities: _TextAlone = None
    response_format: Unsupported = None
    speech_config: NoEffect = None
    image_config: NoEffect = None
    media_resolution: NoEffect = None
    audio_timestamp: NoEffect = None
    enable_affective_dialog: NoEffect = None
    enable_enhanced_civic_answers: NoEffect = None
    model_selection_config: NoEffect = None
    routing_config: NoEffect = None


class GenerateContentRequest(_Body, frozen=True, kw_only=True):
    """A request for the next turn of a conversation."""

    contents: list[Content] | Content
    system_instruction: Content | None = None
    tools: list[GeminiTool] | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    cached_content: Unsupported = None
    safety_settings: NoEffect = None
    labels: NoEffect = None
    service_tier: ServiceTier = None
    store: NoEffect = None
    # The path names the model.
    model: str | None = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
    session_id: SessionId = None
    speculate: Speculate = None


class CountTokensBody(_Body, frozen=True, kw_only=True):
    """Either ``contents``, with what belongs to their prompt, or a whole ``generateContentRequest``."""

    contents: list[Content] | Content | None = None
    generate_content_request: GenerateContentRequest | None = None
    system_instruction: Content | None = None
    tools: list[GeminiTool] | None = None
    generation_config: GenerationConfig | None = None
    model: str | None = None


class EmbedContentRequest(_Body, frozen=True, kw_only=True):
    """``outputDimensionality``: the first numbers of the vector, scaled to length 1."""

    content: Content
    output_dimensionality: int | None = None
    task_type: NoEffect = None
    title: NoEffect = None
    model: str | None = None


class BatchEmbedContentsRequest(_Body, frozen=True, kw_only=True):
    """One vector for each of the ``requests``."""

    requests: list[EmbedContentRequest]
    model: str | None = None


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
