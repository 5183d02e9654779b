"""A test fails when it blocks its event loop."""

from caravan_testing.event_loop import grpc_stays_up, loop_is_never_blocked, router_files_are_read

__all__ = ["grpc_stays_up", "loop_is_never_blocked", "router_files_are_read"]
