"""Makes the rows of the route table of functions that answer requests."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypedDict, Unpack

from aiohttp import web

from caravan_dialects.api.error_table import Dialect
from caravan_dialects.api.generation.reading import BodyReader
from caravan_router.http.server.body import Tolerance, read_body
from caravan_router.http.server.route import EVENTS, JSON, Handler, Parameter, Route
from caravan_router.http.server.tags import Tag

# Takes the request and, if it has a second parameter, the body of that type.
Answering = Callable[..., Awaitable[web.StreamResponse]]


class RouteOptions(TypedDict, total=False):
    """Fields of `Route` that may be left out. ``body``: by default the type that the function takes.

    ``reply``, ``events``: the types of a JSON reply and of the data of an event, for ``replies``.
    """

    parameters: tuple[Parameter, ...]
    body: tuple[type, ...]
    form: type
    replies: tuple[tuple[str, object], ...]
    reply: object
    events: object
    errors: tuple[int, ...]
    open: bool
    operator: bool
    alias: str
    slashes: bool
    tag: Tag


class Routes(list[Route]):
    """Routes of one dialect, in the order in which their functions are defined."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        tolerance: Tolerance = Tolerance.BY_DEFAULT,
        any_type: bool = False,
        **common: Unpack[RouteOptions],
    ) -> None:
        """``any_type``: a body is JSON whatever its content type says. ``common``: options of every route."""
        super().__init__()
        self._dialect = dialect
        self._tolerance = tolerance
        self._any_type = any_type
        self._common = common

    def route(
        self,
        method: str,
        path: str,
        summary: str,
        around: Callable[[Handler], Handler] | None = None,
        **options: Unpack[RouteOptions],
    ) -> Callable[[Answering], Handler]:
        """Return what adds a route and returns its handler.

        ``around``: wraps the handler, the reading of the body included.
        """

        def add(answering: Answering) -> Handler:
            described: dict[str, Any] = {**self._common, **options}
            forms = ((JSON, described.pop("reply", None)), (EVENTS, described.pop("events", None)))
            described.setdefault("replies", tuple((form, kind) for form, kind in forms if kind is not None))
            handler: Handler = answering
            if (kind := _body_of(answering)) is not None:
                described.setdefault("body", (kind,))
                handler = self._reading(answering, kind)
            if around is not None:
                handler = around(handler)
            self.append(
                Route(method=method, path=path, handler=handler, dialect=self._dialect, summary=summary, **described)
            )
            return handler

        return add

    def also(self, path: str, alias: str) -> None:
        """Serve the last route under another path, too. ``alias``: see `Route`."""
        self.append(replace(self[-1], path=path, alias=alias))

    def _reading(self, answering: Answering, kind: type) -> Handler:
        reader: BodyReader[Any] = BodyReader(kind)

        @wraps(answering)
        async def handler(request: web.Request) -> web.StreamResponse:
            body = await read_body(request, reader, self._tolerance, any_type=self._any_type)
            return await answering(request, body)

        return handler


def _body_of(answering: Answering) -> type | None:
    """Return the type of the second parameter, None if there is only the request."""
    _, *body = inspect.signature(answering, follow_wrapped=False).parameters.values()
    return body[0].annotation if body else None
