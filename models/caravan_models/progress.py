"""How far a download is: a count that never goes backwards, shown to people as one bar on a terminal, or as lines."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TextIO

from caravan_models.bars import new_bar, shows_bars
from caravan_models.cached_model import FetchedModel
from caravan_models.listing import size_text

_log = logging.getLogger(__name__)
_PERCENT_OF_A_LINE = 10


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


Say = Callable[[str], None]


def log_line(line: str) -> None:
    """Log a line of a report; in a program that has set up no logging, write it to standard error."""
    if _log.hasHandlers():
        _log.info("%s", line)
    else:
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - a download of minutes must not look like a hang


def note(fetched: FetchedModel) -> None:
    """Log what the download of a model has to say, if it could not ask the hub."""
    if fetched.note:
        _log.warning("%s", fetched.note)


_WORDS = {
    FetchStage.WAITING: "waiting for another process that downloads {}",
    FetchStage.DOWNLOADING: "downloading {}",
    FetchStage.CHECKING: "checking {}",
}


@contextmanager
def shown(name: str, say: Say = log_line, terminal: TextIO | None = None) -> Iterator[OnProgress]:
    """Yield what shows a download: as a bar on ``terminal``, stderr by default, or in a notebook; else by ``say``."""
    terminal = sys.stderr if terminal is None else terminal
    report: _Bar | _Lines = _Bar(name, terminal) if shows_bars(terminal) else _Lines(name, say)
    try:
        yield report.show
    finally:
        report.close()


class _Bar:
    """One bar for all files, made when the first byte is told of: what the cache has needs none."""

    def __init__(self, name: str, terminal: TextIO) -> None:
        self._name = name
        self._terminal = terminal
        self._bar: Any = None

    def show(self, progress: Progress) -> None:
        if self._bar is None:
            # The bytes of an earlier download are no part of the rate.
            self._bar = new_bar(
                total=progress.size, initial=progress.done, unit="B", unit_scale=True, file=self._terminal
            )
        self._bar.set_description_str(_WORDS[progress.stage].format(self._name), refresh=False)
        self._bar.update(progress.done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _Lines:
    """A line at the start, for each tenth, and for each stage."""

    def __init__(self, name: str, say: Say) -> None:
        self._name = name
        self._say = say
        self._last: tuple[FetchStage, int] | None = None

    def show(self, progress: Progress) -> None:
        percent = 100 * progress.done // progress.size if progress.size else 100
        step = (progress.stage, percent // _PERCENT_OF_A_LINE)
        if step != self._last:
            self._last = step
            what = _WORDS[progress.stage].format(self._name)
            self._say(f"{what}: {percent} % of {size_text(progress.size)}")

    def close(self) -> None:
        """Nothing is left to do."""
