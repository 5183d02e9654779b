"""Messages of a WebSocket connection of ``/v1/responses``, as openai-python's `responses_client_event` has them."""

from typing import Annotated, Any, Literal

import msgspec

from caravan_dialects.api.openai.responses.schema import Input, ResponseRequest

CREATE, STEER = "response.create", "response.steer"
StreamId = str | msgspec.UnsetType


class ClientEvent(msgspec.Struct, frozen=True):
    """What decides where a message goes. ``stream_id``: each event repeats it, so it is short."""

    type: str
    stream_id: Annotated[str, msgspec.Meta(max_length=256)] | None = None


class CreateEvent(ResponseRequest, frozen=True, kw_only=True):
    """A request for a response. Those with the same ``stream_id`` are answered one after the other."""

    type: Literal["response.create"]
    stream_id: str | None = None


class SteerEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """User's messages for a response that is being generated."""

    type: Literal["response.steer"]
    previous_response_id: str
    input: Input


class Steer(msgspec.Struct, frozen=True, kw_only=True):
    """Steering input. ``id``: absent if it was not accepted. ``input``: present if it is returned."""

    previous_response_id: str
    id: StreamId = msgspec.UNSET
    input: Input | msgspec.UnsetType = msgspec.UNSET


class SteerError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    type: str = "invalid_request_error"


class SteeringEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What became of steering input: ``response.steer.accepted``, ``.pending`` or ``.failed``.

    ``required_input``: the results that the response waits for, without their content.
    """

    type: str
    sequence_number: int
    steer: Steer
    stream_id: StreamId = msgspec.UNSET
    error: SteerError | msgspec.UnsetType = msgspec.UNSET
    reason: StreamId = msgspec.UNSET
    required_input: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class ErrorEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was not answered. ``error``: OpenAI's."""

    status: int
    error: dict[str, Any]
    type: str = "error"
    stream_id: StreamId = msgspec.UNSET
