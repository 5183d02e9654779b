"""Embeds texts side by side, each of them with the threads of one lane."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from caravan_shard.engine.replies import Replies
from caravan_shard.protocol.commands import EmbedText


@dataclass(frozen=True, slots=True)
class WaitingText:
    """A text, and where its vector goes."""

    command: EmbedText
    replies: Replies


class TextLanes:
    """Lanes that take texts of a queue as long as any waits, or any lane computes: the next text may come meanwhile."""

    def __init__(
        self,
        changed: threading.Condition,
        take: Callable[[], Sequence[WaitingText] | None],
        embed: Callable[[Sequence[WaitingText], int], None],
    ) -> None:
        """``changed`` is notified when the queue changes, and held when ``take`` is called.

        ``take`` returns the next texts of a lane, none if none waits, and None if the lanes should end. ``embed``
        computes texts on a lane and answers them.
        """
        self._changed = changed
        self._take = take
        self._embed = embed
        self._computing = 0
        self._failed = False

    def run(self, lanes: int, first: Sequence[WaitingText]) -> None:
        """Embed ``first`` and others on ``lanes`` lanes, of which the caller is one. Raises what ``embed`` raises."""
        self._computing = 1
        with ThreadPoolExecutor(lanes - 1, thread_name_prefix="embed") as threads:
            others = [threads.submit(self._run, lane) for lane in range(1, lanes)]
            self._run(0, first)
        for other in others:
            other.result()

    def _run(self, lane: int, texts: Sequence[WaitingText] = ()) -> None:
        while texts or (texts := self._next()):
            done = False
            try:
                self._embed(texts, lane)
                done = True
            finally:
                texts = ()
                with self._changed:
                    self._failed = self._failed or not done
                    self._computing -= 1
                    self._changed.notify_all()

    def _next(self) -> Sequence[WaitingText]:
        """Wait for texts, which then count as computed; empty if there is nothing more to do."""
        with self._changed:
            while not self._failed and (texts := self._take()) is not None:
                if texts:
                    self._computing += 1
                    return texts
                if not self._computing:
                    break
                self._changed.wait()
        return ()
