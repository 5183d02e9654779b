"""`/` for browsers, and the files of the page."""

from aiohttp import web

from caravan_dialects.api.errors import NotFoundError
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http.ops.routes import health
from caravan_router.http.page.files import page
from caravan_router.http.server.route import Parameter
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE

# Whether browsers get the page.
SHOWN = web.AppKey("page_shown", bool)

# Scripts and styles are files of the page alone, and no text becomes HTML but through the sanitiser's policy. Pictures
# that a user sends are shown from memory. Nothing is fetched from, sent to or shown in the page of another host.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
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

ROUTES = Routes(TGI, open=True)


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
    replies=(("text/css", str), ("text/javascript", str), ("image/svg+xml", str)),
    errors=(404,),
)
async def page_file(request: web.Request) -> web.StreamResponse:
    """Raises NotFoundError."""
    found, asked = page(), request.match_info
    known = found.files.get(f"{asked['folder']}/{asked['file']}")
    if known is None or asked["version"] != found.version or not request.app[SHOWN]:
        raise NotFoundError(request.path)
    return known.reply(request, _SECURITY | {"Cache-Control": _FOR_EVER})
