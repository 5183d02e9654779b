"""Finds what may follow while the pass runs that is to say which of it will."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from caravan_shard.constraints.matching import Matching


class Finder:
    """The worker's thread calls it: `begin` before a pass and `wait` after it. llguidance works without the GIL."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "constraints")
        self._running: list[Future[None]] = []

    def begin(self, work: Sequence[tuple[Matching, Sequence[int]]]) -> None:
        """Each matching comes with what its sequence said so far."""
        parts = (work[start :: self._threads] for start in range(self._threads))
        self._running = [self._pool.submit(_find_all, part) for part in parts if part]

    def wait(self) -> None:
        """Until all is found."""
        while self._running:
            self._running.pop().result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _find_all(work: Sequence[tuple[Matching, Sequence[int]]]) -> None:
    for matching, output in work:
        matching.find(output)
