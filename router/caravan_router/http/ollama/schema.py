"""Bodies of Ollama's routes."""

from typing import Annotated, Any, Literal

import msgspec

from caravan_router.http.generation.serving_fields import CacheSalt, Priority, Timeout
from caravan_router.http.openai.chat.schema import Tool

KeepAlive = Annotated[
    str | float | None, msgspec.Meta(description="Taken and without effect: the one model stays loaded.")
]
Format = Annotated[
    str | dict[str, Any] | None,
    msgspec.Meta(description='"json" for any JSON object, or a JSON schema; "" for anything.'),
]


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Left out: Ollama's defaults, which are ``temperature`` 0.8, ``top_k`` 40 and ``top_p`` 0.9.

    ``num_predict``: -1 and -2 are what the context leaves. ``num_ctx``: at most the context that is served, which is
    what there is. ``repeat_penalty`` counts prompt and output, and is 1 by default. A ``seed`` below 0 is none.
    """

    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of both routes. ``model``: an adapter's name selects it; anything else is the model that is served.

    ``stream``: true by default. ``think``: false tells the template so.
    """

    model: str
    stream: bool | None = None
    format: Format = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None


class OllamaGenerateRequest(OllamaFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``raw``: ``prompt`` is the whole prompt. Else it is the user's message, after ``system`` if there is one."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None


class OllamaCalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    arguments: dict[str, Any]
    index: int | None = None


class OllamaToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    function: OllamaCalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None


class OllamaChatRequest(OllamaFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None


class OllamaStatistics(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Of the last line of a stream, and of a whole reply; durations in nanoseconds."""

    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaGenerateReply(OllamaStatistics, omit_defaults=True, kw_only=True):
    """Also one line of a stream: then ``response`` is its next part."""

    model: str
    created_at: str
    response: str
    done: bool


class OllamaReplyMessage(msgspec.Struct, omit_defaults=True):
    role: str
    content: str
    tool_calls: list[OllamaToolCall] | None = None


class OllamaChatReply(OllamaStatistics, omit_defaults=True, kw_only=True):
    """Also one line of a stream: then ``message`` is its next part; calls come whole."""

    model: str
    created_at: str
    message: OllamaReplyMessage
    done: bool


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the router knows of a model's file."""

    parent_model: str
    format: str = "gguf"


class OllamaTag(msgspec.Struct, frozen=True, kw_only=True):
    """``digest``: the model's fingerprint."""

    name: str
    model: str
    digest: str
    details: OllamaDetails


class OllamaTagList(msgspec.Struct, frozen=True):
    models: list[OllamaTag]


class OllamaShowRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any name: there is one model."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaShowReply(msgspec.Struct, frozen=True, kw_only=True):
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]


class OllamaVersion(msgspec.Struct, frozen=True):
    version: str
