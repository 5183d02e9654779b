"""HTTPS: the server's certificate and key, and authorities for client certificates."""

import asyncio
import logging
import ssl

from caravan_proto.files import CHECK_S, FileWatch
from caravan_proto.tls import TlsFileError, TlsFiles

_log = logging.getLogger(__name__)


class Tls:
    """Owns the SSL context. Changed files are for later handshakes; authorities are added to it, and none removed."""

    def __init__(self, files: TlsFiles, check_s: float = CHECK_S) -> None:
        """Read the files, which blocks. Raises TlsFileError."""
        self._files = files
        self.file = FileWatch(files.paths, check_s)
        self.context = _context(files)

    async def run(self) -> None:
        """Read changed files again, until cancelled. Broken ones are logged and change nothing."""
        async for _ in self.file.changes():
            try:
                # A key that does not fit would leave the context half changed, so another context tries the files.
                await asyncio.to_thread(_context, self._files)
                # Not in a thread: between the certificate and its key, a handshake on this loop would fail.
                self._files.load_into(self.context)
            except TlsFileError as error:
                _log.error("certificate not reloaded, keeping the old one: %s", error)
            else:
                _log.info("certificate reloaded")


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    if files.ca_certs is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    files.load_into(context)
    return context
