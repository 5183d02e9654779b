"""How the clients of one API family expect errors, and which family a request belongs to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from caravan_router.http.server.errors import ErrorKind, ends_connection, headers_of, kind_of


def path_of(request: web.Request) -> str:
    """Return the path of the request's route, as in "/v1/requests/{id}"; the request's own if it has no route."""
    resource = request.match_info.route.resource
    return request.path if resource is None else resource.canonical


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API family: TGI's, OpenAI's, Ollama's, Anthropic's.

    ``status`` returns the HTTP status of an error, ``body`` its JSON body of type ``envelope``; its second argument is
    the id of the request, "" if it has none. ``id_header``: header in which clients look for that id, beside the one
    that every reply has.
    """

    name: str
    envelope: type
    status: Callable[[ErrorKind], int]
    body: Callable[[Exception, str], bytes]
    id_header: str | None = None

    def response(self, error: Exception, request_id: str = "") -> web.Response:
        """Return ``error`` as a response."""
        response = web.Response(
            status=self.status(kind_of(error)),
            body=self.body(error, request_id),
            headers=headers_of(error),
            content_type="application/json",
        )
        if ends_connection(error):
            response.force_close()
        return response


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialects:
    """The dialect of every request: its route's, else that of the longest path prefix, else the default."""

    by_path: Mapping[str, Dialect]
    by_prefix: Mapping[str, Dialect]
    default: Dialect

    def of(self, request: web.Request) -> Dialect:
        """Return the dialect in which ``request`` is answered; also for a path that no route has."""
        path = path_of(request)
        if path in self.by_path:
            return self.by_path[path]
        matching = [prefix for prefix in self.by_prefix if path.startswith(prefix)]
        return self.by_prefix[max(matching, key=len)] if matching else self.default


DIALECTS = web.AppKey("dialects", Dialects)
