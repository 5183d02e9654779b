"""Environment variables of gRPC, which reads them when it is imported: import this module, not grpc, before."""

import os


def prepare_grpc() -> None:
    """Choose how gRPC works in this process and its children, where the environment does not say it already.

    Support for forking is off: children replace themselves by other programs and never use a channel of their parent,
    but each start of one would log a line.

    The event engine is off: it passes each message through three of its threads, and their wake-ups take a tenth of the
    CPU time that router and shard use between two forward passes. Without it the socket is read by the thread that
    grpc.aio has in any case.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
