"""Which process has opened something: threads and locks of a model do not survive a fork."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from caravan.errors import ForkedError


@dataclass(frozen=True, slots=True)
class OpeningProcess:
    """The process that made it."""

    pid: int = field(default_factory=os.getpid)

    @property
    def is_this(self) -> bool:
        """Whether this process made it, and no child of it by fork runs this."""
        return os.getpid() == self.pid

    def call(self, close: Callable[[], None]) -> None:
        """Call ``close``, unless this is a child: what it would free is the parent's."""
        if self.is_this:
            close()

    def check(self, owner: str) -> None:
        """Raise ForkedError if this is a child. ``owner``: what the parent has opened."""
        if not self.is_this:
            raise ForkedError(
                f"the {owner} was opened by process {self.pid}, and a child of fork() cannot use it: its threads do "
                'not exist here. Open it in the child, or start children by multiprocessing.get_context("spawn")'
            )
