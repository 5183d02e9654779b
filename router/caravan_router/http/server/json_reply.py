"""Replies of routes that generate nothing."""

import msgspec
from aiohttp import web


def json_reply(reply: object, **headers: str) -> web.Response:
    """Return ``reply`` as JSON."""
    return web.Response(body=msgspec.json.encode(reply), headers=headers, content_type="application/json")
