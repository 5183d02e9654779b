"""Turns calls of this package into the request bodies of the HTTP API, whose rules and defaults they share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from caravan.errors import RequestError
from caravan.prompts import PlainPrompt
from caravan.sampling_params import SamplingParams
from caravan_router.http.openai.chat.schema import ChatRequest
from caravan_router.http.openai.completions.schema import CompletionRequest

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)

_DEFAULTS = SamplingParams()
# Fields whose names or forms differ from those of the bodies.
_TRANSLATED = {"max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs"}


def completion_body(prompt: PlainPrompt, params: SamplingParams, max_tokens: int) -> CompletionRequest:
    """Return the body of a completion. Raises RequestError."""
    fields = _fields(params) | {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
    }
    return _converted(fields, CompletionRequest)


def chat_body(messages: Sequence[Mapping[str, Any]], params: SamplingParams, options: Mapping[str, Any]) -> ChatRequest:
    """Return the body of a chat completion; ``options`` are fields of the body as they are. Raises RequestError."""
    if params.prompt_logprobs is not None:
        raise RequestError("`prompt_logprobs` needs a prompt, not messages")
    fields = _fields(params) | {
        "messages": list(messages),
        "max_tokens": params.max_tokens,
        "logprobs": None if params.logprobs is None else True,
        "top_logprobs": params.logprobs or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return _converted(fields | given, ChatRequest)


def _fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that are not at their defaults: a beam search refuses those of sampling, whatever they say."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name not in _TRANSLATED and value != getattr(_DEFAULTS, field.name):
            fields[field.name] = value if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    if params.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if (outputs := params.structured_outputs) is not None:
        fields["structured_outputs"] = {
            field.name: list(value) if field.name == "choice" else value
            for field in dataclasses.fields(outputs)
            if (value := getattr(outputs, field.name)) is not None
        }
    return fields


def _converted(fields: dict[str, Any], body: type[_Body]) -> _Body:
    try:
        return msgspec.convert(fields, body)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
