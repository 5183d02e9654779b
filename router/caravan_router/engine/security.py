"""TLS to shards: new channels, and why a handshake failed."""

import asyncio
import ssl
from dataclasses import dataclass

import grpc.aio

from caravan_proto.channel import open_channel
from caravan_proto.tls import MutualTls, TlsFileError

_PROBE_S = 1.0


@dataclass(frozen=True, slots=True)
class ShardTls:
    """Mutual TLS with every shard on TCP. Their certificates must have ``hostname``; empty: the host of the address."""

    tls: MutualTls
    hostname: str = ""

    async def open_channel(self, address: str) -> grpc.aio.Channel:
        """Open a channel with the certificates as they are now."""
        return await open_channel(address, self.tls, self.hostname)


async def find_tls_problem(address: str, security: ShardTls | None) -> str | None:
    """Return why no connection with the shard at ``address`` (host:port) is secure, or None if that is not the reason.

    gRPC does not say it in all cases, so this makes a handshake like gRPC's.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        context = await asyncio.to_thread(_context, security)
        async with asyncio.timeout(_PROBE_S):
            hostname = host if security is None else security.hostname or host
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=hostname)
            try:
                if security is None:
                    return "the shard requires TLS: pass --shard-certfile, --shard-keyfile and --shard-ca-certs"
                # After the handshake, the shard either begins to speak or has refused the certificate.
                refused = not await reader.read(1)
            finally:
                writer.transport.abort()
    except TlsFileError as error:
        return str(error)
    except ssl.SSLCertVerificationError as error:
        return f"the shard's certificate is refused: {error.verify_message}"
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        return None
    except ssl.SSLError as error:
        return None if security is None else f"the shard does not speak TLS as expected: {error.reason}"
    except (OSError, TimeoutError):
        return None
    return "the shard refuses the router's certificate; its log says why" if refused else None


def _context(security: ShardTls | None) -> ssl.SSLContext:
    if security is not None:
        context = security.tls.client_context()
    else:
        context = ssl.create_default_context()
        # Nothing is sent over this connection.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
