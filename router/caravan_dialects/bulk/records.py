"""What is known of a file, of a batch and of its lines."""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """``size`` in bytes; ``created`` and ``expires`` in Unix time in seconds; ``expires`` is None for never."""

    id: str
    owner: str
    purpose: str
    name: str
    size: int
    created: float
    expires: float | None = None


class BatchStatus(StrEnum):
    """OpenAI's names."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the batch changes any more."""
        return self in _ENDED


_ENDED = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch was refused. ``line``: counted from 1; None if it is not one line."""

    code: str
    message: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """How many lines have an answer of each kind."""

    completed: int = 0
    failed: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch. All times are Unix time in seconds.

    ``endpoint``: the path of each request. ``window``: the time it may take, as the client wrote it. ``deadline``: when
    that ends. ``times``: when it reached each status. ``output_life_s``: how long its output files are kept; None for
    the life of all files. ``anthropic``: whether it is one of ``/v1/messages/batches``. ``counts``: once it has ended
    and its lines are gone.
    """

    id: str
    owner: str
    endpoint: str
    input_file: str
    window: str
    created: float
    deadline: float
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: dict[str, str] | None = None
    times: dict[str, float] = field(default_factory=dict)
    total: int = 0
    errors: tuple[LineError, ...] = ()
    output_file: str | None = None
    error_file: str | None = None
    output_life_s: float | None = None
    anthropic: bool = False
    counts: Counts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request of a batch: where its body stands in the input file.

    ``number``: counted from 0. ``start`` and ``size``: of the whole line in the file, in bytes. ``rank``: its place in
    the order in which lines are worked off.
    """

    number: int
    custom_id: str
    start: int
    size: int
    rank: int = 0


class AnswerKind(IntEnum):
    """What became of a line. ``DROPPED``: its batch was cancelled or expired before."""

    COMPLETED = 0
    FAILED = 1
    DROPPED = 2


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer of a line, as a line of the output file, or of the error file if it is not ``COMPLETED``."""

    number: int
    answer: bytes
    kind: AnswerKind
