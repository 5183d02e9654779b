"""Certificates in PEM files, and mutual TLS between router and shards with them."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from caravan_proto.files import file_version

_log = logging.getLogger(__name__)


class TlsFileError(Exception):
    """The certificate, key or authorities cannot be used. The message names the flag and the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files, and what the names of their flags begin with.

    ``keyfile``: None if ``certfile`` has the key. ``ca_certs``: authorities, one of which must have signed the other
    side's certificate; None to accept clients without one.
    """

    prefix: str
    certfile: str
    keyfile: str | None = None
    ca_certs: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, each once."""
        return tuple(path for path in (self.certfile, self.keyfile, self.ca_certs) if path is not None)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Add the certificate, the key and the authorities to ``context``. Blocks; raises TlsFileError."""
        try:
            # OpenSSL asks for a missing password on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        except (OSError, ValueError) as error:
            named = self.certfile if self.keyfile is None else f"{self.certfile} and {self.keyfile}"
            raise TlsFileError(f"{self.prefix}certfile: {named}: {error}") from error
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except (OSError, ValueError) as error:
                raise TlsFileError(f"{self.prefix}ca-certs: {self.ca_certs}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Pems:
    chain: bytes
    key: bytes
    authorities: bytes


class MutualTls:
    """One side of mutual TLS: it shows its certificate and requires one of the other side.

    New connections use the files as they are then. If these are broken, the last good ones stay and an error is logged.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files, which must include authorities; blocks. Raises TlsFileError."""
        assert files.ca_certs is not None, files
        self._files = files
        self._paths = (files.certfile, files.keyfile or files.certfile, files.ca_certs)
        self._versions = tuple(map(file_version, self._paths))
        self._pems = self._read()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a new channel. Blocks while it reads files that have changed."""
        pems = self._current()
        return grpc.ssl_channel_credentials(
            root_certificates=pems.authorities, private_key=pems.key, certificate_chain=pems.chain
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a server, whose later handshakes use the files as they are then."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._configuration, require_client_authentication=True
        )

    def client_context(self) -> ssl.SSLContext:
        """Return a context for the same handshake as that of a new channel. Blocks; raises TlsFileError."""
        context = ssl.create_default_context(cafile=self._files.ca_certs)
        self._files.load_into(context)
        return context

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        """gRPC calls this on a thread of its own before each handshake."""
        pems = self._current()
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], pems.authorities)

    def _current(self) -> _Pems:
        versions = tuple(map(file_version, self._paths))
        if versions != self._versions:
            self._versions = versions
            try:
                self._pems = self._read()
            except TlsFileError as error:
                _log.error("certificates not reloaded, keeping the old ones: %s", error)
            else:
                _log.info("certificates reloaded", extra={"certfile": self._files.certfile})
        return self._pems

    def _read(self) -> _Pems:
        # gRPC does not say what is wrong with a file.
        self._files.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        try:
            return _Pems(*(Path(path).read_bytes() for path in self._paths))
        except OSError as error:
            raise TlsFileError(f"{self._files.prefix}certfile: {error}") from error
