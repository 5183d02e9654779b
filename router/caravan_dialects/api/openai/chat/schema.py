"""Bodies and replies of chat completions, with the fields of OpenAI, TGI and vLLM."""

from typing import Any, Literal

import msgspec

from caravan_dialects.api.generation.schema import NoEffect, OnlyNull, TextOnly, Unsupported
from caravan_dialects.api.openai.schema import GeneratingFields, ProgressShown, Timings, Usage


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image. ``url``: ``data:image/png;base64,…``; nothing is fetched. ``detail`` changes nothing.

    The file may be a PNG, JPEG, WebP or GIF file, whatever the URL calls it.
    """

    url: str
    detail: NoEffect = None


class InputAudio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Audio: the base64 of a WAV, MP3 or FLAC file, whatever ``format`` says."""

    data: str
    format: NoEffect = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message.

    ``type``: "text", "refusal", "image_url" if the model reads images, "input_audio" if it reads audio; other parts are
    refused.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None
    file: Any = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``arguments``: JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None
    description: NoEffect = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    function: FunctionCall
    id: str | int | None = None
    type: Literal["function"] = "function"
    index: NoEffect = None


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn. A reply's message may be sent back with all its fields.

    ``reasoning_content`` (vLLM's newer name: ``reasoning``): the reasoning of an earlier reply, for chat templates that
    show it to the model; others leave it out. ``role``: "ipython" is "tool".
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "ipython"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | int | None = None
    refusal: str | None = None
    annotations: NoEffect = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    audio: Unsupported = None
    function_call: Unsupported = None

    def __post_init__(self) -> None:
        # Llama 3.1's name, which TGI hands to the template. Its template has the same for both.
        if self.role == "ipython":
            msgspec.structs.force_setattr(self, "role", "tool")


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``parameters``: a JSON schema; absent if there are none. TGI also calls it ``arguments``.

    ``strict``: if it is true for one function, calls match their schemas also if ``tool_choice`` demands none, where a
    tag opens calls. Those that it demands always do.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class ChosenFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


class AllowedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    function: ChosenFunction
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The functions that may be called; the model is shown all. ``mode`` "required": it must call one."""

    mode: Literal["auto", "required"]
    tools: list[AllowedFunction]


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``function`` to call, or the ``allowed_tools``."""

    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None
    custom: OnlyNull = None
    type: Literal["function", "allowed_tools"] = "function"


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the reply may look like, such as a text that it changes in a few places. It changes the speed only."""

    content: str | list[ContentPart]
    type: Literal["content"] = "content"


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenRouter's. ``effort`` means ``reasoning_effort``, ``max_tokens`` means ``reasoning_budget_tokens``.

    ``enabled``: false switches reasoning off, true switches it on. ``exclude``: true means ``include_reasoning`` false.
    """

    effort: Effort | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    summary: NoEffect = None


class ThinkingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DeepSeek's, GLM's and Kimi's, from Anthropic's API. ``budget_tokens`` means ``reasoning_budget_tokens``."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None


class ChatRequest(GeneratingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``max_tokens`` and ``max_completion_tokens`` mean the same; default, and -1: all that fits in the context.

    ``return_progress`` (llama-server's): chunks before the first token report how far the prompt is computed.

    ``tool_choice``: "auto", "none", "required", a function's name, or OpenAI's object. ``tool_prompt`` (TGI's):
    explains how to call functions to models whose template does not. ``continue_final_message``: by default true if the
    assistant's message is the last one. ``prompt_token_ids``: the whole prompt as token ids; ``messages`` is then
    empty.

    ``reasoning_effort``: "none" switches reasoning off; the others switch it on, and the template passes the effort on
    if it can. ``reasoning_budget_tokens`` (llama-server's, which also has ``thinking_budget_tokens``; vLLM:
    ``thinking_token_budget``): reasoning is cut off after this number of tokens; 0 switches it off, -1 means
    no limit. ``reasoning_format`` (llama-server's): "none" leaves reasoning in the content, as the model writes it.
    "auto", the default, and "deepseek" return it as ``reasoning_content``. ``include_reasoning`` (vLLM's): false leaves
    reasoning out of the reply; it is generated, and counted.

    ``reasoning_control`` (llama-server's): true lets ``/v1/chat/completions/control`` end the reasoning.

    ``chat_template_kwargs``: further variables of the chat template; those that it does not read are ignored.
    ``enable_thinking`` or ``thinking`` false also switches off the reasoning of a model whose template has no such
    option.

    ``truncation``: "auto" leaves out the oldest turns if not all fit, as in responses; "disabled", the default, refuses
    them.
    """

    messages: list[Message]
    prompt_token_ids: list[int] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    tool_prompt: str | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    reasoning_effort: Effort | None = None
    reasoning_budget_tokens: int | None = None
    thinking_budget_tokens: int | None = None
    thinking_token_budget: int | None = None
    reasoning_control: bool | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingOptions | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    include_reasoning: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    return_progress: bool | None = None
    modalities: TextOnly = None
    audio: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    web_search_options: OnlyNull = None
    echo: Unsupported = None
    prompt_logprobs: OnlyNull = None
    documents: Unsupported = None
    chat_template: Unsupported = None
    guideline: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    n_probs: Unsupported = None
    n_indent: Unsupported = None
    t_max_predict_ms: Unsupported = None
    response_fields: Unsupported = None


class LeftOut(msgspec.Struct, frozen=True):
    """The number of turns, and the places in ``messages``, that ``truncation`` left out of the prompt."""

    turns: int
    messages: list[int]


class TokenAlternative(msgspec.Struct, frozen=True):
    """``bytes``: the token's bytes. ``token`` shows bytes that form no character as U+FFFD."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TokenAlternative]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class CalledFunction(msgspec.Struct):
    """``arguments``: the JSON text that the model wrote."""

    name: str
    arguments: str


class ReplyToolCall(msgspec.Struct):
    id: str
    type: str
    function: CalledFunction


class ReplyMessage(msgspec.Struct):
    """``content`` is null if there are only tool calls.

    ``reasoning_content``: the reasoning before it, which ``reasoning`` repeats.
    """

    role: str
    content: str | None
    tool_calls: list[ReplyToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """``truncated``: what was left out of the prompt; absent if nothing was. ``store``: chats are never kept.

    ``timings``: of the first choice, with ``timings_per_token``. ``service_tier``: the one that was used, if the
    request names one. ``prompt_token_ids``, ``prompt_logprobs``: clients of vLLM read them without a check. The former
    is null unless ``return_token_ids``; the latter always is, in chat.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: None = None
    truncated: LeftOut | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    store: bool = False


class FunctionDelta(msgspec.Struct):
    """``name`` comes once. The ``arguments`` of all deltas, joined, are JSON text."""

    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct):
    """``id`` and ``type`` come with the first delta of a call."""

    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct):
    """``role`` comes with the first delta of a choice. ``reasoning`` repeats ``reasoning_content``."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct):
    """One chunk of a stream. ``usage`` is absent unless asked for, and null before the last chunk.

    ``truncated`` is in the first chunk, if something was left out of the prompt. ``timings``: of the choice, with
    ``timings_per_token``. ``prompt_progress``: in chunks before the first token, with ``return_progress``.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    truncated: LeftOut | msgspec.UnsetType = msgspec.UNSET
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    prompt_progress: ProgressShown | msgspec.UnsetType = msgspec.UNSET


class RenderedPrompt(msgspec.Struct, frozen=True):
    """``prompt``: the text that the model's chat template makes of a conversation."""

    prompt: str
