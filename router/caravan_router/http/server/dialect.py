"""The API family that a request belongs to, and its errors as responses."""

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from caravan_dialects.api.error_table import Dialect, ends_connection, headers_of, kind_of


def path_of(request: web.Request) -> str:
    """Return the path of the request's route, as in "/v1/requests/{id}"; the request's own if it has no route."""
    resource = request.match_info.route.resource
    return request.path if resource is None else resource.canonical


def error_response(dialect: Dialect, error: Exception, request_id: str = "") -> web.Response:
    """Return ``error`` as the clients of ``dialect`` expect it."""
    response = web.Response(
        status=dialect.status(kind_of(error)),
        body=dialect.body(error, request_id),
        headers=headers_of(error),
        content_type="application/json",
    )
    if ends_connection(error):
        response.force_close()
    return response


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialects:
    """The dialect of every request: its route's, else that of the longest path prefix, else the default.

    ``by_header``: by the path of a route and the name of a header, where a path belongs to two dialects.
    """

    by_header: Mapping[tuple[str, str], Dialect]
    by_path: Mapping[str, Dialect]
    by_prefix: Mapping[str, Dialect]
    default: Dialect

    def of(self, request: web.Request) -> Dialect:
        """Return the dialect in which ``request`` is answered; also for a path that no route has."""
        path = path_of(request)
        for (where, header), dialect in self.by_header.items():
            if where == path and header in request.headers:
                return dialect
        return self.of_path(path)

    def of_path(self, path: str) -> Dialect:
        """Return the dialect in which requests of ``path`` are answered."""
        if path in self.by_path:
            return self.by_path[path]
        matching = [prefix for prefix in self.by_prefix if path.startswith(prefix)]
        return self.by_prefix[max(matching, key=len)] if matching else self.default


DIALECTS = web.AppKey("dialects", Dialects)
