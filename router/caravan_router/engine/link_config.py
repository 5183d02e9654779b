"""The settings of the links to shards, and their TLS."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from caravan_proto.channel import open_channel
from caravan_proto.tls import MutualTls, TlsFileError
from caravan_router.engine.shard_calls import ShardCalls

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Settings of the links to all shards.

    ``router_id`` names the holder of the leases, and other routers reach it at ``url``, if it has one. A lease ends
    ``lease_ttl_s`` seconds after its last renewal.

    A shard reports its progress every ``heartbeat_s`` seconds, also while it computes a step. It is given up if it
    reports nothing for ``silence_s`` seconds, or has work and completes no step for as long as `StepPace` allows, at
    most ``step_timeout_s`` seconds.

    A decode step that follows the last reply within ``stream_interval_ms`` is reported with the next step. Names and
    files of addresses are looked up every ``address_refresh_s`` seconds. Without ``tls``, nothing is encrypted.
    ``wants_drafts``: requests may have draft tokens, which is no reason to refuse a shard that cannot have any.
    ``connect`` makes the calls to an address in place of those over the network, for a shard in this process.
    ``outlives_bugs``: an engine that serves nothing, since its scheduler meets a bug at every call, is tried again. In
    a program it ends with the bug, or else calls would wait for ever.
    """

    router_id: str
    url: str = ""
    lease_ttl_s: float = 15.0
    heartbeat_s: float = 0.5
    silence_s: float = 1.5
    step_timeout_s: float = 60.0
    stream_interval_ms: int = 20
    address_refresh_s: float = 2.0
    tls: ShardTls | None = None
    wants_drafts: bool = False
    connect: Callable[[str], ShardCalls] | None = None
    outlives_bugs: bool = True
