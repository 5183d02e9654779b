"""Shows progress: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from caravan_serve.bench.load import OnDone
from caravan_serve.bench.request import RequestResult

_LINE_EVERY_S = 5.0


@contextmanager
def progress(console: Console, name: str, total: int) -> Iterator[OnDone]:
    """Show the progress of a phase. Yield the function to call at the end of each request."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        # Redrawing takes CPU time from the server under test, so do it only twice a second.
        with Progress(*columns, console=console, refresh_per_second=2, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda _: bar.advance(task)
        return
    yield _Lines(console, name, total).done


class _Lines:
    def __init__(self, console: Console, name: str, total: int) -> None:
        self._console = console
        self._name = name
        self._total = total
        self._done = 0
        self._failed = 0
        self._last_line = time.monotonic()

    def done(self, result: RequestResult) -> None:
        self._done += 1
        self._failed += result.failure is not None
        now = time.monotonic()
        if self._done < self._total and now - self._last_line < _LINE_EVERY_S:
            return
        self._last_line = now
        failed = f", {self._failed} failed" if self._failed else ""
        self._console.print(f"{self._name}: {self._done}/{self._total} requests{failed}", highlight=False)
