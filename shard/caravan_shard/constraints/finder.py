"""Computes the masks of constrained sequences while the forward pass runs, so that they cost no time of their own."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from caravan_shard.constraints.matching import Matching
from caravan_shard.constraints.thought import ThoughtMatching


class Finder:
    """Threads for `Matching.find`; llguidance releases the GIL.

    The worker's thread calls `begin` before a forward pass and `wait` after it.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "constraints")
        self._running: list[Future[None]] = []

    def begin(self, work: Sequence[tuple[Matching | ThoughtMatching, Sequence[int]]]) -> None:
        """Start `Matching.find` for each matching with the output of its sequence so far."""
        parts = (work[start :: self._threads] for start in range(self._threads))
        self._running = [self._pool.submit(_find_all, part) for part in parts if part]

    def wait(self) -> None:
        """Wait until all are done."""
        while self._running:
            self._running.pop().result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _find_all(work: Sequence[tuple[Matching | ThoughtMatching, Sequence[int]]]) -> None:
    for matching, output in work:
        matching.find(output)
