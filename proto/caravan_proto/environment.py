"""What a program does before its slow imports: variables that gRPC reads when it is imported, limits, early signals."""

import os
import resource
import signal


def prepare_grpc() -> None:
    """Choose how gRPC works in this process and its children, where the environment does not say it already.

    Support for forking is off: children replace themselves by other programs and never use a channel of their parent,
    but each start of one would log a line.

    The event engine is off: it passes each message through three of its threads. Without it, the thread that grpc.aio
    has in any case reads the socket, which saves 30 to 50 us of CPU time a step, router and shard together.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")


def raise_open_files() -> None:
    """Let this process and its children open as many files and connections as the system allows them.

    The usual soft limit, 1024, is for programs that use select(), and fewer than a router has connections.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_on_early_sigterm() -> None:
    """Let SIGTERM end a container's first process until the program handles it.

    The kernel drops signals to process 1 that it has no handler for, so the container would run until it is killed.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda _number, _frame: os._exit(128 + signal.SIGTERM))
