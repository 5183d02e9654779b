"""Reads responses, whole and streamed."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from caravan.client.errors import BadReplyError
from caravan.client.failures import read_event_failure, response_failure
from caravan.client.outputs import Response, ResponsePart, ResponseUsage
from caravan.outputs import ToolCall
from caravan_dialects.api.openai.responses.schema import ResponseEvent, ResponseObject

_LAST = frozenset({"response.completed", "response.incomplete"})


def read_response(reply: ResponseObject, request_id: str) -> Response:
    """Return a response that has ended. Raises BadReplyError."""
    calls = [item for item in reply.output if item.get("type") == "function_call"]
    try:
        return Response(
            id=reply.id,
            model=reply.model,
            status=reply.status,
            incomplete_reason="" if reply.incomplete_details is None else reply.incomplete_details.reason,
            items=reply.output,
            text=_text(reply.output, "message", "output_text"),
            reasoning=_text(reply.output, "reasoning", "reasoning_text"),
            tool_calls=[ToolCall(item["call_id"], item["name"], item["arguments"]) for item in calls],
            usage=_usage(reply),
            left_out=[] if reply.truncated is None else reply.truncated.items,
            request_id=request_id,
        )
    except (KeyError, TypeError) as error:
        raise BadReplyError(f"an item of the response is none of Caravan's: {error!r}") from None


def _usage(reply: ResponseObject) -> ResponseUsage:
    if reply.usage is None:
        raise BadReplyError("the response has no usage")
    return ResponseUsage(
        input_tokens=reply.usage.input_tokens,
        cached_tokens=reply.usage.input_tokens_details.cached_tokens,
        output_tokens=reply.usage.output_tokens,
        reasoning_tokens=reply.usage.output_tokens_details.reasoning_tokens,
    )


def _text(items: Iterable[Mapping[str, Any]], item_type: str, part_type: str) -> str:
    """Return the text of all parts of one type, in items of one type."""
    return "".join(
        part["text"]
        for item in items
        if item.get("type") == item_type
        for part in item.get("content") or ()
        if part.get("type") == part_type
    )


class ResponseReader:
    """Reads a streamed response."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._response_id = ""
        self.ended = False

    def read(self, event: str) -> Iterator[ResponsePart]:
        """Yield the parts that an event completes. Raises ApiError, BadReplyError, MsgspecError."""
        decoded = _decoded(event, self._request_id)
        match decoded.type:
            case "response.created":
                self._response_id = _response(decoded).id
                yield ResponsePart(response_id=self._response_id)
            case "response.output_text.delta":
                yield ResponsePart(response_id=self._response_id, text=_delta(decoded))
            case "response.reasoning_text.delta":
                yield ResponsePart(response_id=self._response_id, reasoning=_delta(decoded))
            case "response.failed":
                error = _response(decoded).error
                if error is None:
                    raise BadReplyError("the response failed without an error")
                raise response_failure(error.code, error.message, self._request_id)
            case kind if kind in _LAST:
                self.ended = True
                whole = read_response(_response(decoded), self._request_id)
                yield ResponsePart(response_id=self._response_id, response=whole)
            case _:
                # Other events repeat what these say.
                pass


def _decoded(event: str, request_id: str) -> ResponseEvent:
    try:
        return msgspec.json.decode(event, type=ResponseEvent)
    except msgspec.MsgspecError:
        failure = read_event_failure(event, request_id)
        if failure is None:
            raise
        raise failure from None


def _response(event: ResponseEvent) -> ResponseObject:
    if event.response is msgspec.UNSET:
        raise BadReplyError(f"the event {event.type} has no response")
    return event.response


def _delta(event: ResponseEvent) -> str:
    return "" if event.delta is msgspec.UNSET else event.delta
