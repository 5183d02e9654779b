"""How far a download is: a record for callers, and a count that never goes backwards."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class FetchStage(Enum):
    """What is done with the file that a `Progress` names."""

    WAITING = "waiting"
    """Another process downloads it."""
    DOWNLOADING = "downloading"
    CHECKING = "checking"
    """Its SHA-256 is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Bytes that are here, of ``file`` and of all files of the model. ``etag``: the digest that names its content.

    In the course of a download, also of one that continues an earlier one, no count gets smaller.
    """

    stage: FetchStage
    file: str
    etag: str
    file_done: int
    file_size: int
    done: int
    size: int


OnProgress = Callable[[Progress], None]


def ignore_progress(_progress: Progress) -> None:
    """Tell nobody."""


class Meter:
    """Counts the bytes of one file after another. A file that begins again is told of once it has caught up."""

    def __init__(self, size: int, on_progress: OnProgress) -> None:
        """``size``: bytes of all files."""
        self._size = size
        self._on_progress = on_progress
        self._before = 0
        self._file_done = 0

    def tell(self, stage: FetchStage, path: str, etag: str, file_done: int, file_size: int) -> None:
        """Note that ``file_done`` bytes of the present file are here."""
        self._file_done = max(self._file_done, min(file_done, file_size))
        self._on_progress(
            Progress(
                stage=stage,
                file=path,
                etag=etag,
                file_done=self._file_done,
                file_size=file_size,
                done=self._before + self._file_done,
                size=self._size,
            )
        )

    def end_file(self, file_size: int) -> None:
        """Go on to the next file."""
        self._before += file_size
        self._file_done = 0
