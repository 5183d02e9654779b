"""Bodies of OpenAI's routes, with vLLM's extra parameters."""

from typing import Annotated, Any

import msgspec


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None


Prompt = Annotated[
    str | list[str | int | list[int]],
    msgspec.Meta(
        description="A text, a list of texts, the token ids of one prompt, or a list of such lists; not mixed.",
    ),
]


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``model`` may be anything: there is one. ``max_tokens`` is 16 by default, as OpenAI has it."""

    prompt: Prompt
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logit_bias: Any = None


class Logprobs(msgspec.Struct, frozen=True):
    """Columns, one entry a token; ``text_offset`` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(msgspec.Struct):
    """Also one chunk of a stream; there ``usage`` is absent unless asked for, and null before the last chunk."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class Model(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    owned_by: str


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[Model]
