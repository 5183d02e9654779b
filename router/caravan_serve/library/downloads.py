"""Which downloads are under way, and how far they are."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from caravan_scheduler.core.library import Download


class Downloads:
    """Downloads by the name of their model. Several of one model share their files, and are told of as one."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        """``on_change``: called with the name of a model of which more has come, or whose download has ended."""
        self._on_change = on_change
        self._under_way: dict[object, tuple[str, Download]] = {}

    @contextmanager
    def of(self, name: str) -> Iterator[Callable[[Download], None]]:
        """Yield what notes how far the download of a model is; it is under way from the first note on."""
        key = object()

        def note(download: Download) -> None:
            self._under_way[key] = name, download
            self._on_change(name)

        try:
            yield note
        finally:
            if self._under_way.pop(key, None) is not None:
                self._on_change(name)

    def find(self, name: str) -> Download | None:
        """Return how far the download of a model is; None if there is none."""
        found = [download for other, download in self._under_way.values() if other == name]
        return max(found, key=lambda download: download.done, default=None)

    @property
    def names(self) -> Sequence[str]:
        """The models that are being downloaded, in the order in which that began."""
        return list(dict.fromkeys(name for name, _ in self._under_way.values()))
