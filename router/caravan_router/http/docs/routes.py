"""The route `/docs`."""

import asyncio
from functools import cache

import msgspec
from aiohttp import web

from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http.docs.page import DocsPage, render
from caravan_router.http.ops import openapi_document
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.tags import Tag

ROUTES = Routes(TGI, tag=Tag.STATE, open=True)


@cache
def docs_page() -> DocsPage:
    """Return the page of the committed document, made once. It reads files, which would block an event loop."""
    return render(msgspec.json.decode(openapi_document()))


@ROUTES.route("GET", "/docs", "Show this API's description, with examples to send", replies=(("text/html", str),))
async def docs(request: web.Request) -> web.Response:
    page = await asyncio.to_thread(docs_page)
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": page.policy,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return page.html.reply(request, headers)
