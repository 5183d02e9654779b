"""Decides who may use a model on other threads than its own, so that none does when it is freed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ModelUsers:
    """Threads that use a model: its vocabulary, its media encoder. Any thread may call it.

    A call that nobody waits for any more still has a thread that reads the model, so threads are counted, not calls.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._are_refused = False

    @property
    def are_refused(self) -> bool:
        """Whether nobody may begin to use the model any more."""
        return self._are_refused

    @contextmanager
    def using(self) -> Iterator[bool]:
        """Yield whether the model may be used. If so, it stays until the block ends."""
        with self._changed:
            may_use = not self._are_refused
            self._inside += may_use
        try:
            yield may_use
        finally:
            if may_use:
                with self._changed:
                    self._inside -= 1
                    self._changed.notify_all()

    def refuse(self) -> None:
        """Let nobody begin to use the model from now on."""
        with self._changed:
            self._are_refused = True

    def end(self) -> None:
        """Refuse users and wait until those inside have left, without a limit. Whoever frees the model calls it first.

        One text, one medium or one reading of the vocabulary is what each of them does.
        """
        with self._changed:
            self._are_refused = True
            while self._inside:
                self._changed.wait()
