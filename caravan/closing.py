"""What is closed at the end of its block."""

from types import TracebackType
from typing import Self


class Closing:
    """Closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Free what it holds. Closing it again does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClosing:
    """Closed at the end of an ``async with`` block."""

    async def close(self) -> None:
        """Free what it holds. Closing it again does nothing."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
