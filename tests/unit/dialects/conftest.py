"""A test fails when a dialect blocks the event loop."""

from caravan_testing.event_loop import loop_is_never_blocked

__all__ = ["loop_is_never_blocked"]
