"""A test fails when a dialect blocks the event loop, and closes what it has made."""

from caravan_testing.closing import closing
from caravan_testing.event_loop import loop_is_never_blocked

__all__ = ["closing", "loop_is_never_blocked"]
