"""Shows a download to people: one bar on a terminal, some lines elsewhere."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from caravan_models.fetched import FetchedModel
from caravan_models.listing import size_text
from caravan_models.progress import FetchStage, OnProgress, Progress

_log = logging.getLogger(__name__)

_PERCENT_OF_A_LINE = 10
_PHASES = {
    FetchStage.WAITING: "waiting for another process that downloads {}",
    FetchStage.DOWNLOADING: "downloading {}",
    FetchStage.CHECKING: "checking {}",
}
Say = Callable[[str], None]


def log_line(line: str) -> None:
    """Log a line of a report."""
    _log.info("%s", line)


def note(fetched: FetchedModel) -> None:
    """Log what the download of a model has to say, if it could not ask the hub."""
    if fetched.note:
        _log.warning("%s", fetched.note)


@contextmanager
def shown(name: str, say: Say = log_line, terminal: TextIO | None = None) -> Iterator[OnProgress]:
    """Yield what shows a download: on ``terminal``, stderr by default, if it is a terminal; else by ``say``."""
    terminal = sys.stderr if terminal is None else terminal
    report: _Bar | _Lines = _Bar(name, terminal) if terminal.isatty() else _Lines(name, say)
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
            from tqdm import tqdm

            # The bytes of an earlier download are no part of the rate.
            self._bar = tqdm(
                total=progress.size,
                initial=progress.done,
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                file=self._terminal,
            )
        self._bar.set_description_str(_PHASES[progress.stage].format(self._name), refresh=False)
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
            what = _PHASES[progress.stage].format(self._name)
            self._say(f"{what}: {percent} % of {size_text(progress.size)}")

    def close(self) -> None:
        """Nothing is left to do."""
