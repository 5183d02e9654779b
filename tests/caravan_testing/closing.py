"""Closes at the end of a test what it has made."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Protocol, TypeVar

import pytest


class Closable(Protocol):
    def close(self) -> Awaitable[None]: ...


Made = TypeVar("Made", bound=Closable)


class Closing(AsyncExitStack):
    """Takes what is to be closed, and returns it."""

    def __call__(self, made: Made) -> Made:
        self.push_async_callback(made.close)
        return made


@pytest.fixture
async def closing() -> AsyncIterator[Closing]:
    async with Closing() as stack:
        yield stack
