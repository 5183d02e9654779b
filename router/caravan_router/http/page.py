"""The files of the page, read once."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from aiohttp import web

from caravan_dialects.api.errors import NotFoundError
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http.ops import health
from caravan_router.http.server.route import Compressed, Parameter, Route
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.tags import Tag

_CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}


# Stand in the HTML for the version, which is part of the paths of all other files, and for "yes" or "no".
_VERSION, _NEEDS_KEY = b"VERSION", b"NEEDS_KEY"


@dataclass(frozen=True, slots=True)
class Page:
    """``document`` and ``locked``: the HTML, without and with API keys. ``files``: all others, by folder and name.

    ``version`` changes with every byte of them, so that a browser may keep them for ever.
    """

    version: str
    document: Compressed
    locked: Compressed
    files: Mapping[str, Compressed]


@cache
def page() -> Page:
    """Read the page. Call before the event loop runs, which file access would block."""
    root = resources.files("caravan_studio.page")
    contents = dict(sorted(_contents(root)))
    digest = hashlib.sha256(root.joinpath("index.html").read_bytes())
    for name, content in contents.items():
        digest.update(name.encode() + b"\0" + content)
    version = digest.hexdigest()[:16]
    html = root.joinpath("index.html").read_bytes().replace(_VERSION, version.encode())
    document, locked = (_file("index.html", html.replace(_NEEDS_KEY, answer)) for answer in (b"no", b"yes"))
    return Page(version, document, locked, {name: _file(name, content) for name, content in contents.items()})


def _contents(root: Traversable) -> Iterator[tuple[str, bytes]]:
    for folder in root.iterdir():
        if folder.is_dir():
            for file in folder.iterdir():
                if _ending(file.name) in _CONTENT_TYPES:
                    yield f"{folder.name}/{file.name}", file.read_bytes()


def _file(name: str, content: bytes) -> Compressed:
    return Compressed(content, _CONTENT_TYPES[_ending(name)])


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


# Whether browsers get the page.
SHOWN = web.AppKey("page_shown", bool)


# Scripts and styles are files of the page alone, and no text becomes HTML but through the sanitiser's policy. Images
# and audio that a user sends are shown from memory. Nothing is fetched from, sent to or shown in the page of another
# host.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data: blob:",
        "media-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)


_SECURITY = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


_FOR_EVER = "public, max-age=31536000, immutable"


ROUTES = Routes(TGI, open=True, tag=Tag.STATE)


@ROUTES.route(
    "GET",
    "/",
    "Serve the page to browsers, unless `--no-page` is set; otherwise return 200 while a shard is up and "
    "makes progress, else 503",
    replies=(("text/html", str),),
    errors=(503,),
)
async def front_page(request: web.Request) -> web.StreamResponse:
    """Probes and libraries do not ask for HTML."""
    if not request.app[SHOWN] or "text/html" not in request.headers.get("Accept", ""):
        return await health(request)
    found, locked = page(), request.app[STATE].keyring is not None
    tag = f'"{found.version}{"-locked" * locked}"'
    headers = {"Cache-Control": "no-cache", "ETag": tag, "Vary": "Accept"}
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=_SECURITY | headers)
    return (found.locked if locked else found.document).reply(request, _SECURITY | headers)


@ROUTES.route(
    "GET",
    "/page/{version}/{folder}/{file}",
    "Return a file of the page",
    parameters=(
        Parameter(name="version", place="path", description="Digest of all files of the page"),
        Parameter(name="folder", place="path", description="Folder of the file"),
        Parameter(name="file", place="path", description="Name of the file"),
    ),
    replies=(("text/css", str), ("text/javascript", str), ("image/svg+xml", str), ("font/woff2", bytes)),
    errors=(404,),
)
async def page_file(request: web.Request) -> web.StreamResponse:
    """Raises NotFoundError."""
    found, asked = page(), request.match_info
    known = found.files.get(f"{asked['folder']}/{asked['file']}")
    if known is None or asked["version"] != found.version or not request.app[SHOWN]:
        raise NotFoundError(request.path)
    return known.reply(request, _SECURITY | {"Cache-Control": _FOR_EVER})


def root_routes(root_path: str) -> tuple[Route, ...]:
    """Return the route of ``root_path`` without a slash at its end, from which the page's own paths would not work."""
    if not root_path:
        return ()

    async def to_page(_request: web.Request) -> web.StreamResponse:
        raise web.HTTPPermanentRedirect(f"{root_path}/")

    route = Route(
        method="GET",
        path=root_path,
        handler=to_page,
        dialect=TGI,
        tag=Tag.STATE,
        summary="Redirect to the page",
        open=True,
    )
    return (route,)
