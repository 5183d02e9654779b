"""Tells which fields of a body were ignored: the log once, and each reply in a header."""

import logging
from collections.abc import Iterable
from urllib.parse import quote

from aiohttp import web

from caravan_router.http.server.dialect import path_of

log = logging.getLogger(__name__)

IGNORED_HEADER = "X-Caravan-Ignored"

_MOST_NAMES = 256
_SHOWN_CHARACTERS = 60
_MOST_HEADER_BYTES = 1024
_MOST_PATH_CHARACTERS = 120
# Besides letters, digits and "_.-~". A comma separates the paths.
_PLAIN = "[]$@/:+*"


class IgnoredNames:
    """Logs each name that a router ignores once. Clients choose the names, so only the first few hundred count."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def note(self, where: str, name: str) -> None:
        """Log that ``name`` is ignored in ``where``, such as a route, unless this was logged before."""
        entry = (where, name[:_SHOWN_CHARACTERS])
        if entry not in self._seen and len(self._seen) < _MOST_NAMES:
            self._seen.add(entry)
            log.info("ignored %r in %s", entry[1], where)


IGNORED = web.AppKey("ignored", IgnoredNames)
_PATHS = web.RequestKey("ignored_paths", list[str])


def note_ignored(request: web.Request, paths: Iterable[str]) -> None:
    """Tell of the fields at ``paths`` of the body, such as "messages[0].id"."""
    noted = list(paths)
    if not noted:
        return
    request[_PATHS] = noted
    for path in noted:
        request.app[IGNORED].note(path_of(request), path.rpartition(".")[2])


async def add_ignored(request: web.Request, response: web.StreamResponse) -> None:
    """Add the header just before headers are sent, on streams too."""
    paths = request.get(_PATHS)
    if paths:
        response.headers[IGNORED_HEADER] = header_of(paths)


def header_of(paths: Iterable[str]) -> str:
    """Return the value of the header: as many paths as it has room for, and "..." if it has no room for all."""
    shown: list[str] = []
    left = _MOST_HEADER_BYTES
    for path in dict.fromkeys(paths):
        text = quote(path[:_MOST_PATH_CHARACTERS], safe=_PLAIN, errors="replace")
        if len(text) + len(", ...") > left:
            return ", ".join([*shown, "..."])
        left -= len(text) + len(", ")
        shown.append(text)
    return ", ".join(shown)
