"""The objects of ``/v1/files`` and ``/v1/batches``."""

from typing import Literal

import msgspec

from caravan_dialects.bulk.records import Batch, BatchStatus, Counts, StoredFile

Metadata = dict[str, str]


class FileForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an upload. It is read as it comes, see `caravan_router.http.bulk.files`."""

    file: bytes
    purpose: str
    anchor: str | None = msgspec.field(name="expires_after[anchor]", default=None)
    seconds: int | None = msgspec.field(name="expires_after[seconds]", default=None)


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """Times are Unix time in seconds. ``expires_at``: null for a file that is kept."""

    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class DeletedFile(msgspec.Struct, frozen=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


class OutputExpiry(msgspec.Struct, frozen=True, kw_only=True):
    """``seconds`` from the creation of an output file."""

    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``completion_window``: hours that the batch may take, such as ``24h``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class BatchError(msgspec.Struct, frozen=True):
    """Why a batch failed before any request was answered. ``line``: counted from 1."""

    code: str
    line: int | None
    message: str
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """``failed``: the requests of the error file."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """Times are Unix time in seconds; null for a status that was not reached."""

    id: str
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: Metadata | None
    object: Literal["batch"] = "batch"


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"


def file_object(file: StoredFile) -> FileObject:
    """Return a file as clients see it."""
    return FileObject(
        id=file.id,
        bytes=file.size,
        created_at=int(file.created),
        expires_at=None if file.expires is None else int(file.expires),
        filename=file.name,
        purpose=file.purpose,
    )


def batch_object(batch: Batch, counts: Counts) -> BatchObject:
    """Return a batch as clients see it. Its output files are named once they are there."""

    def time_of(status: BatchStatus) -> int | None:
        reached = batch.times.get(status)
        return None if reached is None else int(reached)

    has_files = batch.status.has_ended
    errors = [BatchError(error.code, error.line, error.message) for error in batch.errors]
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=BatchErrors(errors) if errors else None,
        input_file_id=batch.input_file,
        completion_window=batch.window,
        status=batch.status,
        output_file_id=batch.output_file if has_files else None,
        error_file_id=batch.error_file if has_files else None,
        created_at=int(batch.created),
        in_progress_at=time_of(BatchStatus.IN_PROGRESS),
        expires_at=int(batch.deadline),
        finalizing_at=time_of(BatchStatus.FINALIZING),
        completed_at=time_of(BatchStatus.COMPLETED),
        failed_at=time_of(BatchStatus.FAILED),
        expired_at=time_of(BatchStatus.EXPIRED),
        cancelling_at=time_of(BatchStatus.CANCELLING),
        cancelled_at=time_of(BatchStatus.CANCELLED),
        request_counts=RequestCounts(batch.total, counts.completed, counts.failed + counts.dropped),
        metadata=batch.metadata,
    )
