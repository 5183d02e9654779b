"""The objects of ``/v1/messages/batches``, and its results, which are lines of output files in Anthropic's form."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from caravan_dialects.api.anthropic.rules import custom_id_error, params_error, repeated_custom_id_error
from caravan_dialects.bulk.records import Batch, BatchStatus, Counts

_MOST_ID_CHARACTERS = 64


class BatchedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """``params``: a body of ``/v1/messages``."""

    custom_id: str
    params: msgspec.Raw


class MessageBatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    requests: list[BatchedMessage]


class MessageCounts(msgspec.Struct, frozen=True, kw_only=True):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in RFC 3339. ``results_url``: null until the batch has ended."""

    id: str
    processing_status: str
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    results_url: str | None
    archived_at: None = None
    type: Literal["message_batch"] = "message_batch"


class MessageBatchList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(msgspec.Struct, frozen=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class MessageResult(msgspec.Struct, frozen=True):
    """A line of the results. ``result``: its ``type`` is succeeded, errored, canceled or expired."""

    custom_id: str
    result: dict[str, Any]


def input_lines(body: MessageBatchRequest, url: str) -> Iterator[bytes]:
    """Yield the lines of the input file. Raises ValidationError for the first request that cannot be a line."""
    seen: set[str] = set()
    for place, one in enumerate(body.requests):
        field = f"requests[{place}].custom_id"
        if not 0 < len(one.custom_id) <= _MOST_ID_CHARACTERS:
            raise custom_id_error(field, _MOST_ID_CHARACTERS, len(one.custom_id))
        if one.custom_id in seen:
            raise repeated_custom_id_error(field, one.custom_id)
        seen.add(one.custom_id)
        if bytes(memoryview(one.params)[:1]) != b"{":
            raise params_error(f"requests[{place}].params", bytes(one.params))
        line = {"custom_id": one.custom_id, "method": "POST", "url": url, "body": one.params}
        yield msgspec.json.encode(line) + b"\n"


def message_batch(batch: Batch, counts: Counts, results_url: str) -> MessageBatch:
    """Return a batch as clients see it."""
    has_ended = batch.status.has_ended
    cancelling = batch.times.get(BatchStatus.CANCELLING)
    status = "ended" if has_ended else "in_progress" if cancelling is None else "canceling"
    was_cancelled = batch.status is BatchStatus.CANCELLED
    ended = max(batch.times.values(), default=batch.created)
    return MessageBatch(
        id=batch.id,
        processing_status=status,
        request_counts=MessageCounts(
            processing=max(0, batch.total - counts.completed - counts.failed - counts.dropped),
            succeeded=counts.completed,
            errored=counts.failed,
            canceled=counts.dropped if was_cancelled else 0,
            expired=0 if was_cancelled else counts.dropped,
        ),
        created_at=_time(batch.created),
        expires_at=_time(batch.deadline),
        ended_at=_time(ended) if has_ended else None,
        cancel_initiated_at=None if cancelling is None else _time(cancelling),
        results_url=results_url if has_ended else None,
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Failure(msgspec.Struct):
    code: str


class _OutputLine(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Failure | None = None


_OUTPUT = msgspec.json.Decoder(_OutputLine)
_SUCCESS = 200
_DROPPED = {"batch_cancelled": "canceled", "batch_expired": "expired"}


def result_line(line: bytes) -> bytes:
    """Return a line of an output file or of an error file in Anthropic's form."""
    read = _OUTPUT.decode(line)
    result: dict[str, Any]
    if read.response is None:
        assert read.error is not None, "a line has a response or an error"
        result = {"type": _DROPPED[read.error.code]}
    elif read.response.status_code == _SUCCESS:
        result = {"type": "succeeded", "message": read.response.body}
    else:
        result = {"type": "errored", "error": read.response.body}
    return msgspec.json.encode(MessageResult(read.custom_id, result)) + b"\n"
