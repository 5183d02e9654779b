"""Turns calls of this package into the request bodies that the router validates."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from caravan.errors import RequestError
from caravan.prompts import PlainPrompt
from caravan.request_fields import chat_fields, completion_fields, sampling_fields
from caravan.sampling_params import SamplingParams
from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.reading import without_effect
from caravan_dialects.api.openai.aliases import with_limit
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.completions.schema import CompletionRequest
from caravan_dialects.api.openai.decisions.schema import DecisionRequest
from caravan_dialects.api.openai.schema import GeneratingFields

_Fields = TypeVar("_Fields", bound=GeneratingFields)


@contextmanager
def named_refusals() -> Iterator[None]:
    """Turn what the router's rules say of parameters into a RequestError."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise RequestError(_in_python(str(error))) from None
    except ValidationError as error:
        raise RequestError(str(error).removeprefix("Input validation error: ")) from None


# What msgspec calls after JSON.
_PYTHON_TYPES = {"null": "None", "array": "list", "object": "dict"}


def _in_python(message: str) -> str:
    """Return what msgspec says of a body in the names of Python, after the field that it says it of."""
    what, _, place = message.rpartition(" - at `$")
    if not what:
        return message
    # What `LLM.chat` calls it.
    place = place.replace(".json_schema", ".schema")
    what = re.sub(r"\b(null|array|object)\b", lambda found: _PYTHON_TYPES[found[1]], what)
    return f"`{place.strip('.`')}`: {what[0].lower()}{what[1:]}"


def completion_body(prompt: PlainPrompt, params: SamplingParams, max_tokens: int) -> CompletionRequest:
    """Return the body of a completion. Raises RequestError."""
    with named_refusals():
        return _body(completion_fields(prompt, params) | {"max_tokens": max_tokens}, params, CompletionRequest)


def chat_body(messages: Sequence[Mapping[str, Any]], params: SamplingParams, options: Mapping[str, Any]) -> ChatRequest:
    """Return the body of a chat completion; ``options`` are fields of the body as they are. Raises RequestError."""
    with named_refusals():
        return with_limit(_body(chat_fields(messages, params, options), params, ChatRequest))


def decision_body(given: Any, questions: Any, *, average_orders: bool) -> DecisionRequest:
    """Return the body of a request for decisions. Raises RequestError."""
    with named_refusals():
        return msgspec.convert(
            {"input": given, "questions": questions, "average_orders": average_orders}, DecisionRequest
        )


def generating_fields(params: SamplingParams) -> GeneratingFields:
    """Return the fields that all bodies have, for a conversation that is stepped by hand. Raises RequestError."""
    with named_refusals():
        return _body(sampling_fields(params), params, GeneratingFields)


def _body(fields: Mapping[str, Any], params: SamplingParams, kind: type[_Fields]) -> _Fields:
    if params.logits_processors and params.use_beam_search:
        raise RequestError("`logits_processors` cannot be used with `use_beam_search`: a search samples nothing")
    body = msgspec.convert(fields, kind)
    # Raises for what a server refuses by name.
    without_effect(body)
    return body
