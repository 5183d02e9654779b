"""Turns calls of this package into the request bodies that the router validates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from caravan.errors import RequestError
from caravan.prompts import PlainPrompt
from caravan.request_fields import chat_fields, completion_fields
from caravan.sampling_params import SamplingParams
from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.marked_fields import without_effect
from caravan_dialects.api.openai.aliases import with_limit, with_one_name
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.completions.schema import CompletionRequest

_Body = TypeVar("_Body", CompletionRequest, ChatRequest)


def completion_body(prompt: PlainPrompt, params: SamplingParams, max_tokens: int) -> CompletionRequest:
    """Return the body of a completion. Raises RequestError."""
    _check_processors(params)
    return _converted(completion_fields(prompt, params) | {"max_tokens": max_tokens}, CompletionRequest, with_one_name)


def chat_body(messages: Sequence[Mapping[str, Any]], params: SamplingParams, options: Mapping[str, Any]) -> ChatRequest:
    """Return the body of a chat completion; ``options`` are fields of the body as they are. Raises RequestError."""
    _check_processors(params)
    return _converted(chat_fields(messages, params, options), ChatRequest, with_limit)


def _check_processors(params: SamplingParams) -> None:
    for function in params.logits_processors or ():
        if not callable(function):
            raise RequestError(f"`logits_processors` must be functions. Given: {function!r:.80}")
    if params.logits_processors and params.use_beam_search:
        raise RequestError("`logits_processors` cannot be used with `use_beam_search`: a search samples nothing")


def _converted(fields: dict[str, Any], body: type[_Body], meant: Callable[[_Body], _Body]) -> _Body:
    """Return the body that ``fields`` mean, where ``meant`` reads those that have several names."""
    try:
        converted = msgspec.convert(fields, body)
        # Raises for what a server refuses by name.
        without_effect(converted)
        return meant(converted)
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
    except ValidationError as error:
        raise RequestError(str(error).removeprefix("Input validation error: ")) from None
