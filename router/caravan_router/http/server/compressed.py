"""Replies of fixed content, compressed once."""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Compressed:
    """``compressed``: the content under gzip."""

    content: bytes
    compressed: bytes
    content_type: str

    @classmethod
    def of(cls, content: bytes, content_type: str) -> "Compressed":
        """Compress ``content``."""
        return cls(content, gzip.compress(content, 9, mtime=0), content_type)

    def reply(self, request: web.Request, headers: Mapping[str, str]) -> web.Response:
        """Return the content in a form that the client takes. ``headers`` may have a ``Vary``."""
        body, sent = self.content, {**headers, "Content-Type": self.content_type}
        sent["Vary"] = ", ".join(filter(None, (headers.get("Vary"), "Accept-Encoding")))
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            body, sent["Content-Encoding"] = self.compressed, "gzip"
        return web.Response(body=body, headers=sent)
