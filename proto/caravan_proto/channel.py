"""Channels to shards, and the options that both ends must agree on."""

import asyncio

import grpc.aio

from caravan_proto.tls import MutualTls

# A reply with 256 rows and alternatives is far smaller; a prompt of a million tokens is 4 MB.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# Keepalive alone does not notice a stopped peer (SIGSTOP); ping_timeout_ms does. Neither notices a peer whose event
# loop hangs, since gRPC answers pings beside it: the router also watches for the shard's reports.
KEEPALIVE_MS = 1_000
PING_TIMEOUT_MS = 1_500

# A busy host or a distant one takes more than a few hundred milliseconds to accept a connection.
CONNECT_TIMEOUT_MS = 5_000

Options = list[tuple[str, int]]


def client_options() -> Options:
    """Options of the router's channel to one shard: no retries (Decode is not idempotent), no shared subchannels."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name, this is the time that a connection may take.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def is_tcp(address: str) -> bool:
    """Whether ``address`` is host:port, not a Unix socket."""
    return not address.startswith(("unix:", "unix-abstract:"))


async def open_channel(address: str, tls: MutualTls | None = None, hostname: str = "") -> grpc.aio.Channel:
    """Open a channel to a shard, on TCP over ``tls``; in plaintext without it and over Unix sockets.

    The shard's certificate must have ``hostname``, by default the host of ``address``.
    """
    if tls is None or not is_tcp(address):
        return grpc.aio.insecure_channel(address, options=client_options())
    named = [("grpc.ssl_target_name_override", hostname)] if hostname else []
    credentials = await asyncio.to_thread(tls.channel_credentials)
    return grpc.aio.secure_channel(address, credentials, options=[*client_options(), *named])


def server_options() -> Options:
    """Options of the shard's server, which accept the router's pings."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),
    ]
