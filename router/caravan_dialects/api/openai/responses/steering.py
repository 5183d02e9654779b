"""Steering: a user's messages for a response that is being generated, which a successor answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from caravan_dialects.api.errors import RequestError
from caravan_dialects.api.openai.responses.items import check_size, read_items
from caravan_dialects.api.openai.responses.rules import steering_empty_error, steering_item_error
from caravan_dialects.api.openai.responses.schema import Input
from caravan_dialects.api.openai.responses.socket_schema import CreateEvent, SteerError
from caravan_dialects.conversations.nodes import Json

MAX_PENDING = 8
"""Steering inputs of a response that wait."""
WAITING = "waiting_for_required_input"

_FIELDS = frozenset({"type", "role", "content"})
# Types of calls, and of the items that have their results.
_RESULTS = {
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "tool_search_call": "tool_search_output",
}
_SENTENCES = {
    "response_not_found": "There is no such response on this connection",
    "response_already_completed": "The response has ended",
    "response_not_active": "The response ended without a successor",
    "too_many_pending_steers": f"At most {MAX_PENDING} inputs may wait for a response, within the memory for bodies",
    "steering_not_supported": "A response of a conversation, or one without output, cannot be steered",
}


def steer_error(code: str) -> SteerError:
    """Return the error of this code."""
    return SteerError(code=code, message=_SENTENCES[code])


def uncommitted(error: Exception) -> SteerError:
    """Return the error of input whose successor could not be made."""
    return SteerError(code="successor_creation_failed", message=str(error) or "The successor could not be created")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """Accepted input. ``given``: as the client wrote it. ``size``: bytes that are held for it."""

    id: str
    target: str
    given: Input
    size: int


def check_steering(given: Input) -> SteerError | None:
    """Return why ``given`` is not valid steering input; None if it is."""
    try:
        if not given:
            raise steering_empty_error()
        if not isinstance(given, str):
            for number, item in enumerate(given):
                if item.get("type", "message") != "message" or item.get("role") != "user" or item.keys() - _FIELDS:
                    raise steering_item_error(f"input[{number}]")
        check_size("input", read_items("input", given, {}))
    except RequestError as error:
        return SteerError(code="invalid_input", message=str(error))
    return None


def with_steering(body: CreateEvent, steers: Sequence[Steering]) -> dict[str, Any]:
    """Return the ``input`` of ``body`` after that of ``steers``, as a field to replace."""
    return {"input": [*(item for one in steers for item in _items(one.given)), *_items(body.input or "")]}


def required_input(output: Sequence[Json]) -> list[Json]:
    """Return what the client has to send before anything else, without its content."""
    stubs = []
    for item in output:
        if (kind := _RESULTS.get(item["type"])) is not None:
            named = {"name": item["name"]} if kind == "function_call_output" else {}
            client = {"execution": "client"} if kind == "tool_search_output" else {}
            stubs.append({"type": kind, "call_id": item["call_id"], **named, **client})
    return stubs


def _items(given: Input) -> Sequence[Json]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    return given
