"""A bug that shows while the scheduler works, and for which request it was working then."""

import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class FaultError(Exception):
    """``error`` was raised while the scheduler worked for ``request_ids``; none if nobody knows for which.

    They are one request, or those of one beam search. ``is_contained``: no other request was touched meanwhile, so that
    the state is right once they are gone.
    """

    def __init__(self, error: Exception, request_ids: tuple[int, ...] = (), *, is_contained: bool = False) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error
        self.request_ids = request_ids
        self.is_contained = is_contained


class _Member(Protocol):
    @property
    def request_id(self) -> int: ...


class _Group(Protocol):
    @property
    def members(self) -> Iterable[_Member]: ...


class _Cause(Protocol):
    """A request, its sequence or its resident. The latter two may know of a beam search."""

    @property
    def request_id(self) -> int: ...


def _requests_of(cause: _Cause) -> tuple[int, ...]:
    group: _Group | None = getattr(getattr(cause, "sequence", cause), "group", None)
    return (cause.request_id,) if group is None else tuple(member.request_id for member in group.members)


def on_behalf(place: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Blame what a function raises on a request: that of its argument at ``place``, such as a sequence or a resident.

    The innermost such function counts. It costs nothing but a call where nothing is raised.
    """

    def blaming(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except FaultError:
                raise
            except Exception as error:
                raise FaultError(error, _requests_of(cast("_Cause", args[place]))) from error

        return call

    return blaming
