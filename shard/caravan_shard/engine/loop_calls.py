"""Calls from the worker's thread to the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[[*Ts], object], *args: *Ts) -> None:
    """Let ``loop`` call ``function`` soon. If it is closed, nobody is left to hear of it, and nothing happens.

    A program that closes a model waits for the end of a step for a limited time, then closes its loop.
    """
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
