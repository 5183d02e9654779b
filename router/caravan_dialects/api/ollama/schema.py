"""Bodies and replies of Ollama's routes."""

from typing import Annotated, Any, Literal

import msgspec

from caravan_dialects.api.generation.schema import (
    CacheSalt,
    NoEffect,
    Priority,
    SessionId,
    Speculate,
    Timeout,
    Unsupported,
)
from caravan_dialects.api.openai.chat.schema import NamedToolChoice, TokenLogprob, Tool

KeepAlive = Annotated[
    str | float | None,
    msgspec.Meta(
        description="Seconds, or a duration such as 5m, that a model of --models-dir or --models-file stays loaded "
        "without requests; negative: until its room is needed. Any other model stays loaded."
    ),
]
Format = Annotated[
    str | dict[str, Any] | None,
    msgspec.Meta(description='"json" for any JSON object, or a JSON schema; "" for anything.'),
]


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defaults are the model's, else Ollama's: ``temperature`` 0.8, ``top_k`` 40, ``top_p`` 0.9; but no penalty.

    ``num_predict``: -1 and -2 mean all that fits in the context, and so does more than that. ``num_ctx``: more than
    the context that is served counts as that; it limits no generation. ``repeat_penalty`` counts prompt and output
    tokens, the last ``repeat_last_n`` of them if that is set. With ``mirostat`` the defaults of ``top_k`` and ``top_p``
    do not apply. A ``seed`` below 0 means no seed.
    """

    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: Annotated[int | None, msgspec.Meta(extra_json_schema={"maximum": 2**63 - 1})] = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both routes take. ``model``: name of a model or an adapter, with or without ``:latest``.

    A single model answers to any name.

    ``stream``: true by default. ``think``: whether the model thinks, or how much: "low", "medium", "high" or "max". By
    default as its chat template has it.
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
    session_id: SessionId = None
    speculate: Speculate = None


class OllamaGenerateRequest(OllamaFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``raw``: ``prompt`` is the whole prompt. Otherwise it is the user's message, after ``system`` if that is set.

    With ``suffix``, the output belongs between ``prompt``, which is used as it is, and this text; for models whose
    vocabulary has tokens for that.

    ``context``: the one of an earlier reply, which this request continues: its tokens come before the prompt's.

    ``images``: files before the prompt, each the base64 of a PNG, JPEG, WebP or GIF, if the model reads images.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class OllamaCalledFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    arguments: dict[str, Any]
    index: NoEffect = None


class OllamaToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    function: OllamaCalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A turn. ``images``: files before its text, each as base64, if the model reads images.

    ``name``: another name of ``tool_name`` in the message of a tool; without effect in others.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    thinking: str | None = None
    images: list[str] | None = None


class OllamaChatRequest(OllamaFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``truncate``: true by default; the oldest turns are left out if the prompt has more than ``num_ctx`` tokens.

    False refuses them. ``shift`` must not be true: what reaches the end of the context ends there. ``tool_choice``: as
    in OpenAI's API; Ollama has no such field, but some of its clients send it.
    """

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaStatistics(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Statistics in a whole reply and in the last line of a stream. Durations are in nanoseconds.

    ``logprobs``: of the tokens of the reply, or of those since the line before, if they were asked for.
    """

    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[TokenLogprob] | None = None


class OllamaGenerateReply(OllamaStatistics, omit_defaults=True, kw_only=True):
    """A whole reply, or one line of a stream: there ``response`` is the next part.

    ``context``: token ids of the prompt and the response, in a whole reply and in the last line; not with ``raw``, nor
    with images, which have no ids.
    """

    model: str
    created_at: str
    response: str
    done: bool
    context: list[int] | None = None
    thinking: str | None = None


class OllamaReplyMessage(msgspec.Struct, omit_defaults=True):
    role: str
    content: str
    tool_calls: list[OllamaToolCall] | None = None
    thinking: str | None = None


class OllamaChatReply(OllamaStatistics, omit_defaults=True, kw_only=True):
    """A whole reply, or one line of a stream: there ``message`` is the next part. Tool calls are sent whole."""

    model: str
    created_at: str
    message: OllamaReplyMessage
    done: bool


class OllamaEmbedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter has no vectors. Without texts the reply has no vectors either.

    ``truncate``: true by default; a text that is too long loses its end. False refuses it. ``dimensions``: how many
    first numbers of a vector to return, scaled to length 1. ``num_ctx`` limits the tokens of a text; no other option
    has to do with vectors.
    """

    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None


class OllamaEmbedReply(msgspec.Struct, frozen=True, kw_only=True):
    """One vector of length 1 for each text, in their order. ``prompt_eval_count``: tokens of all texts together.

    Durations are in nanoseconds.
    """

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The older request for one vector. Without a ``prompt`` the vector is empty. ``truncate``: as in /api/embed."""

    model: str
    prompt: str | None = None
    truncate: bool | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None


class OllamaEmbeddingsReply(msgspec.Struct, frozen=True):
    """A vector of length 1."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The model's file; what it does not say is left out. ``family`` and ``families`` name the architecture.

    ``parameter_size`` is a number such as "134.52M", ``quantization_level`` the type of most weights, such as "Q4_K_M".
    ``parent_model``: for an adapter, or for a model that was made of another one, that model; else "".
    """

    parent_model: str
    format: str
    family: str | msgspec.UnsetType = msgspec.UNSET
    families: list[str] | msgspec.UnsetType = msgspec.UNSET
    parameter_size: str | msgspec.UnsetType = msgspec.UNSET
    quantization_level: str | msgspec.UnsetType = msgspec.UNSET


class OllamaTag(msgspec.Struct, frozen=True, kw_only=True):
    """``size``: bytes of the model's weights, also for an adapter. ``modified_at``: when the model's file was changed.

    ``digest``: SHA-256 of the model's file; until it has been read, another text that differs between most files.
    """

    name: str
    model: str
    modified_at: str | msgspec.UnsetType = msgspec.UNSET
    size: int | msgspec.UnsetType = msgspec.UNSET
    digest: str
    details: OllamaDetails


class OllamaTagList(msgspec.Struct, frozen=True):
    models: list[OllamaTag]


class OllamaRunningModel(msgspec.Struct, frozen=True, kw_only=True):
    """``expires_at``: when the model is unloaded if no request comes, centuries ahead if never.

    ``context_length``: tokens of a prompt and its output. ``size``: bytes of the model's weights.
    ``size_vram``: of those in the memory of accelerators, where it is known.
    """

    name: str
    model: str
    size: int | msgspec.UnsetType = msgspec.UNSET
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int | msgspec.UnsetType = msgspec.UNSET
    context_length: int


class OllamaRunningList(msgspec.Struct, frozen=True):
    models: list[OllamaRunningModel]


class OllamaShowRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A single model answers to any name. ``verbose`` has no effect."""

    model: str | None = None
    name: str | None = None
    verbose: NoEffect = None


class OllamaShowReply(msgspec.Struct, frozen=True, kw_only=True):
    """``model_info``: texts, whole numbers and flags of the file's metadata by their GGUF keys; and what is served.

    ``template`` is the chat template in Jinja. ``caravan.context_length``: tokens of a prompt and its output.
    ``parameters``, ``system``, ``license``: what was given when the model was made of another one.
    """

    modified_at: str | msgspec.UnsetType = msgspec.UNSET
    parameters: str | msgspec.UnsetType = msgspec.UNSET
    system: str | msgspec.UnsetType = msgspec.UNSET
    license: str | msgspec.UnsetType = msgspec.UNSET
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int | bool]
    capabilities: list[str]


class OllamaVersion(msgspec.Struct, frozen=True):
    version: str


class OllamaPullRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model``, or ``name``: a known name, or OWNER/REPOSITORY:QUANTISATION, also after hf.co/."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: bool | None = None


class OllamaPullReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``digest``: SHA-256 of the file; ``completed``: bytes of it that were downloaded, of ``total``."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


class OllamaCopyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``source``: a model; ``destination``: another name for it, which becomes no path and no URL."""

    source: str
    destination: str


class OllamaCreateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model``, or ``name``: of what is made. ``from``: a model that is here, or a known name, which is downloaded.

    ``parameters``, ``system``: of requests of Ollama's routes that do not set them. ``license`` is shown. The files of
    the model are those of ``from``: ``quantize``, ``files``, ``adapters``, ``template`` and ``messages`` are refused.
    """

    from_: str = msgspec.field(name="from")
    model: str | None = None
    name: str | None = None
    parameters: OllamaOptions | None = None
    system: str | None = None
    license: str | list[str] | None = None
    stream: bool | None = None
    quantize: str | None = None
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    template: str | None = None
    messages: list[OllamaMessage] | None = None
    modelfile: Unsupported = None
    renderer: Unsupported = None
    parser: Unsupported = None


class OllamaDeleteRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    name: str | None = None
