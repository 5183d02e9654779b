"""What other routers want of a shard, and whose it is when its turn has ended."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from caravan_proto.messages.model import ShardClaim

# A router that lent a shard has asked for it again after so many seconds, and the borrower has heard of it.
_FIRST_ASKED_S = 3.0


class ShardTurns:
    """Of one shard, as its link knows.

    A router that lets its only shard go for requests that wait at another one lends it. It has it back for good when
    those have ended: what begins meanwhile is for the lender.
    """

    def __init__(self) -> None:
        # The claim of another router that wants the shard; None if there is none.
        self.wanted_by: ShardClaim | None = None
        # The shard drains because another router takes it over, which has requests that wait for it.
        # The seconds after that before it is asked for again; 0 if it is not to be taken over.
        self.yields_for_s = 0.0
        # The URL of the router that lent it, while it is borrowed; "" if it is not, or that one cannot be reached.
        self.lender = ""
        self.lent = False
        # The URL of the router that has just got back what it had lent, until the shard says who holds it.
        self.returned_to = ""
        self._taken_s = time.monotonic()

    @property
    def is_wanted_urgently(self) -> bool:
        """Whether requests of another router wait for the shard."""
        return self.wanted_by is not None and self.wanted_by.urgent

    @property
    def is_borrowed(self) -> bool:
        """Whether the shard goes back once what has begun here has ended.

        The lender asks for it all the time; if it does not, it is gone.
        """
        if not self.lender:
            return False
        return self.wanted_by is not None or time.monotonic() - self._taken_s < _FIRST_ASKED_S

    def take(self, holder_url: str, *, for_turn: bool) -> None:
        """Note that the shard is this router's now. ``for_turn``: requests waited for it that ``holder_url`` held."""
        # What was lent is not borrowed from the borrower.
        self.lender = holder_url if for_turn and not self.lent else ""
        self.lent = False
        self._taken_s = time.monotonic()

    def yield_for(self, seconds: float, *, lend: bool) -> None:
        """Note that the shard goes to another router; ``lend``: it is this router's only one."""
        self.yields_for_s = seconds
        # One that is borrowed is not lent, but given back.
        self.lent = lend and not self.lender

    def leave(self) -> None:
        """Note that the shard is no longer this router's."""
        self.returned_to = self.lender if self.yields_for_s else ""
        self.wanted_by, self.yields_for_s, self.lender = None, 0.0, ""
