"""The settings of the links to shards."""

from collections.abc import Callable
from dataclasses import dataclass

from caravan_router.engine.security import ShardTls
from caravan_router.engine.shard_calls import ShardCalls


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
