"""HTTPS: the server's certificate and key, and authorities for client certificates."""

import asyncio
import logging
import ssl

from caravan_proto.tls import TlsFileError, TlsFiles

_log = logging.getLogger(__name__)


class Tls:
    """Owns the SSL context. A reload affects later handshakes; it adds authorities and removes none."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files, which blocks. Raises TlsFileError."""
        self._files = files
        self.context = _context(files)
        self._reload_asked = asyncio.Event()

    def reload(self) -> None:
        """Ask `run` to read the files again."""
        self._reload_asked.set()

    async def run(self) -> None:
        """Reload when asked to, until cancelled. Broken files are logged and change nothing."""
        while True:
            await self._reload_asked.wait()
            self._reload_asked.clear()
            try:
                await asyncio.to_thread(self._read_again)
            except TlsFileError as error:
                _log.error("certificate not reloaded, the old one stays: %s", error)
            else:
                _log.info("certificate reloaded")

    def _read_again(self) -> None:
        # A key that does not fit would leave the context half changed, so another context tries the files first.
        _context(self._files)
        self._files.load_into(self.context)


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    if files.ca_certs is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    files.load_into(context)
    return context
