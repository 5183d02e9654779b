"""Turns calls of this package into the request bodies that the router validates."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from caravan.errors import RequestError
from caravan.prompts import PlainPrompt
from caravan.request_fields import chat_fields, completion_fields
from caravan.sampling_params import SamplingParams
from caravan_router.http.openai.chat.schema import ChatRequest
from caravan_router.http.openai.completions.schema import CompletionRequest

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)


def completion_body(prompt: PlainPrompt, params: SamplingParams, max_tokens: int) -> CompletionRequest:
    """Return the body of a completion. Raises RequestError."""
    return _converted(completion_fields(prompt, params) | {"max_tokens": max_tokens}, CompletionRequest)


def chat_body(messages: Sequence[Mapping[str, Any]], params: SamplingParams, options: Mapping[str, Any]) -> ChatRequest:
    """Return the body of a chat completion; ``options`` are fields of the body as they are. Raises RequestError."""
    return _converted(chat_fields(messages, params, options), ChatRequest)


def _converted(fields: dict[str, Any], body: type[_Body]) -> _Body:
    try:
        return msgspec.convert(fields, body)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
