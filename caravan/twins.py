"""What a class with calls that are awaited and its twin with calls that block share, so that it is written once."""

import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from functools import wraps
from types import GenericAlias, TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, get_args

_A = TypeVar("_A")
_A_co = TypeVar("_A_co", covariant=True)
_P = ParamSpec("_P")
_T = TypeVar("_T")


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


class Loop(Protocol):
    """An event loop on its own thread."""

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work`` to its end and return its result. An interrupt, such as Ctrl-C, cancels it first."""
        ...

    def iterate(self, items: AsyncGenerator[_T, None]) -> Iterator[_T]:
        """Yield the items; closing the iterator closes ``items``."""
        ...


class Twin(Generic[_A_co]):
    """Something whose calls block, while those of its asynchronous twin run on a loop."""

    def __init__(self, awaited: _A_co, loop: Loop) -> None:
        """``awaited``: the asynchronous twin."""
        self._awaited, self._loop = awaited, loop


def blocking(method: Callable[Concatenate[_A, _P], Coroutine[Any, Any, _T]]) -> Callable[Concatenate[Twin[_A], _P], _T]:
    """Make a call that blocks of a method that is awaited. `help` shows it with the words of ``method``."""

    @wraps(method)
    def call(self: Twin[_A], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._loop.run(method(self._awaited, *args, **kwargs))

    return call


def iterated(
    method: Callable[Concatenate[_A, _P], AsyncGenerator[_T, None]],
) -> Callable[Concatenate[Twin[_A], _P], Iterator[_T]]:
    """Make a method that returns an iterator of one that returns an asynchronous generator."""

    @wraps(method)
    def call(self: Twin[_A], /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        return self._loop.iterate(method(self._awaited, *args, **kwargs))

    item = get_args(inspect.signature(method).return_annotation)[0]
    return returning(GenericAlias(Iterator, item), call)


def plain(method: Callable[Concatenate[_A, _P], _T]) -> Callable[Concatenate[Twin[_A], _P], _T]:
    """Make a call of a method that waits for nothing, and runs on the thread of its caller."""

    @wraps(method)
    def call(self: Twin[_A], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(self._awaited, *args, **kwargs)

    return call


def returning(kind: Any, call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let `help` show ``call``, which wraps another function, with ``kind`` as what it returns."""
    shown = inspect.signature(call).replace(return_annotation=kind)
    call.__signature__ = shown  # type: ignore[attr-defined]
    return call
