"""Checks the variables that a request sets for the chat template."""

from collections.abc import Mapping
from typing import Any

import msgspec

from caravan_dialects.api.generation.rules import TooManyBytesError
from caravan_dialects.api.openai.chat.messages import check_depth
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.rules import template_option_error

_FIELD = "chat_template_kwargs"
_MAX_BYTES = 1 << 16
# Variables that the server sets: of the conversation, of the model, and what transformers takes in the same place.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "bos_token",
        "chat_template",
        "continue_final_message",
        "eos_token",
        "messages",
        "pad_token",
        "raise_exception",
        "strftime_now",
        "tokenize",
        "tools",
        "unk_token",
    }
)
_SWITCHES = ("enable_thinking", "thinking")


def template_kwargs_of(body: ChatRequest) -> dict[str, Any]:
    """Return the variables that ``body`` sets for the template. Raises ValidationError."""
    return checked_kwargs(body.chat_template_kwargs or {})


def checked_kwargs(given: Mapping[str, Any], field: str = _FIELD) -> dict[str, Any]:
    """Return ``given`` without what is null and switches thoughts. Raises ValidationError, which names ``field``."""
    for key in given:
        if key in _RESERVED:
            raise template_option_error(f"{field}.{key}", "be left to the server", given[key])
    for key in _SWITCHES:
        if given.get(key) is not None and not isinstance(given[key], bool):
            raise template_option_error(f"{field}.{key}", "be true or false", given[key])
    if not isinstance(effort := given.get("reasoning_effort"), str | None):
        raise template_option_error(f"{field}.reasoning_effort", "be a string", effort)
    check_depth(field, dict(given))
    size = len(msgspec.json.encode(given))
    if size > _MAX_BYTES:
        raise TooManyBytesError(field, _MAX_BYTES, size)
    return {
        key: value for key, value in given.items() if value is not None or key not in (*_SWITCHES, "reasoning_effort")
    }
