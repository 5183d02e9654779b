"""Fields of llama-server that mean what fields of OpenAI's or vLLM's mean, and the number that means no limit."""

import secrets
from typing import Any, TypeVar

import msgspec

from caravan_proto.messages.sampling import RANGES
from caravan_router.api.generation.checks import check_range
from caravan_router.api.openai.chat.schema import ChatRequest
from caravan_router.api.openai.completions.schema import CompletionRequest
from caravan_router.api.openai.sampling import one_of

# Of new tokens: all that fit.
UNLIMITED = -1

_Body = TypeVar("_Body", ChatRequest, CompletionRequest)


def with_one_name(body: _Body) -> _Body:
    """Return ``body`` with llama-server's fields under the names that the other fields have. Raises ValidationError."""
    changes: dict[str, Any] = {}
    if body.n_predict is not None:
        changes["max_tokens"] = one_of("max_tokens", "n_predict", body.max_tokens, body.n_predict)
    if (penalty := body.repeat_penalty) is not None:
        allowed = RANGES["repetition_penalty"]
        check_range("repeat_penalty", penalty, allowed.low, allowed.high)
        name = "repetition_penalty"
        changes[name] = one_of(name, "repeat_penalty", body.repetition_penalty, penalty)
    if body.cache_prompt is False:
        changes["cache_salt"] = secrets.token_hex(8)
    return msgspec.structs.replace(body, **changes) if changes else body


def with_limit(body: ChatRequest) -> ChatRequest:
    """Return ``body`` with one number of new tokens at most, and none if it is -1. Raises ValidationError."""
    named = with_one_name(body)
    if UNLIMITED not in {named.max_tokens, named.max_completion_tokens}:
        return named
    # Both names of it say the same, if both are set.
    one_of("max_tokens", "max_completion_tokens", named.max_tokens, named.max_completion_tokens)
    return msgspec.structs.replace(named, max_tokens=None, max_completion_tokens=None)
