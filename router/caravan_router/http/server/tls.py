"""HTTPS: a certificate, its key, and perhaps whose clients to believe."""

import asyncio
import logging
import ssl
from dataclasses import dataclass

_log = logging.getLogger(__name__)


class TlsFileError(Exception):
    """The certificate, its key or the authorities cannot be used; the message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. ``keyfile``: None if it is in ``certfile``. ``ca_certs``: whose certificate a client must show."""

    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None


class Tls:
    """The context that the port uses; a reload changes what later handshakes get, and only adds to the authorities."""

    def __init__(self, files: TlsFiles) -> None:
        """Blocks: reads the files. Raises TlsFileError."""
        self._files = files
        self.context = _context(files)
        self._told = asyncio.Event()

    def reload(self) -> None:
        """Soon."""
        self._told.set()

    async def run(self) -> None:
        """Until cancelled. Files that are broken change nothing and are logged."""
        while True:
            await self._told.wait()
            self._told.clear()
            try:
                await asyncio.to_thread(self._read_again)
            except TlsFileError as error:
                _log.error("certificate not reloaded, the old one stays: %s", error)
            else:
                _log.info("certificate reloaded")

    def _read_again(self) -> None:
        # The context in use would be left half changed by a key that does not fit: another one tries first.
        _context(self._files)
        _load(self.context, self._files)


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    if files.ca_certs is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(files.certfile, files.keyfile, password="")
    except (OSError, ValueError) as error:
        named = files.certfile if files.keyfile is None else f"{files.certfile} and {files.keyfile}"
        raise TlsFileError(f"{named}: {error}") from error
    if files.ca_certs is not None:
        try:
            context.load_verify_locations(files.ca_certs)
        except (OSError, ValueError) as error:
            raise TlsFileError(f"{files.ca_certs}: {error}") from error
