"""Which router may command this shard: one at a time, under an epoch that only grows.

Nothing of a router stays when its lease expires, is given back, or changes hands.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from caravan_proto.errors import ShardError
from caravan_proto.messages.model import ShardClaim
from caravan_shard.protocol.results import Refusal

_log = logging.getLogger(__name__)

_MAX_ROUTER_ID = 256
# A router that asks for a shard which another one holds asks again within this time, in seconds.
_CLAIM_S = 2.5
# When the holder's connection breaks, it has this time to renew its lease, in seconds.
_BROKEN_S = 2.0
EXPIRED = Refusal(ShardError.NOT_LEASED, "the lease has expired")
RELEASED = Refusal(ShardError.NOT_LEASED, "the router gave the shard back")
OVERTAKEN = Refusal(ShardError.STALE_EPOCH, "another lease took the shard")


@dataclass(slots=True)
class _Holder:
    router_id: str
    url: str
    expires_at: float


class ShardLease:
    """The last epoch, and its holder until the lease ends. Every method first ends a lease whose time is over."""

    def __init__(self, release_all: Callable[[Refusal], None], clock: Callable[[], float] = monotonic) -> None:
        """``release_all`` releases every sequence, and refuses queued commands. ``clock``: monotonic, in seconds."""
        self._release_all = release_all
        self._clock = clock
        self._epoch = 0
        self._holder: _Holder | None = None
        self._claim: ShardClaim | None = None
        self._claimed_at = 0.0

    @property
    def epoch(self) -> int:
        """The last epoch granted; 0 before the first."""
        return self._epoch

    @property
    def is_held(self) -> bool:
        """Whether a router holds the shard."""
        return self._current() is not None

    @property
    def holder_url(self) -> str:
        """Where other routers reach the router that holds the shard; empty if none does, or they cannot."""
        holder = self._current()
        return "" if holder is None else holder.url

    def request(self, router_id: str, epoch: int, ttl_s: float, url: str = "") -> Refusal | None:
        """Grant the shard to a higher epoch, or renew the lease of the same one. Return why not, if refused."""
        holder, now = self._current(), self._clock()
        if not 0 < len(router_id) <= _MAX_ROUTER_ID:
            return Refusal(ShardError.BAD_REQUEST, f"router_id must have 1 to {_MAX_ROUTER_ID} characters")
        if ttl_s <= 0:
            return Refusal(ShardError.BAD_REQUEST, "ttl_ms must be >= 1")
        if epoch > self._epoch:
            self._epoch = epoch
            self._holder = _Holder(router_id, url, now + ttl_s)
            self._claim = None
            # The sequences on the shard belong to nobody now.
            self._release_all(OVERTAKEN)
            return None
        if epoch == self._epoch and holder is not None and holder.router_id == router_id:
            holder.expires_at = now + ttl_s
            return None
        return Refusal(ShardError.STALE_EPOCH, f"epoch {self._epoch} was granted. Given: {epoch}")

    def ask(self, router_id: str, claim: ShardClaim) -> Refusal | None:
        """Return None if no other router holds the shard; else note that ``router_id`` would like to."""
        holder = self._current()
        if holder is None or holder.router_id == router_id:
            return None
        noted = self.claim
        if noted is None or claim.urgent or not noted.urgent:
            self._claim, self._claimed_at = claim, self._clock()
        return Refusal(ShardError.HELD, f"another router holds this shard under epoch {self._epoch}")

    @property
    def claim(self) -> ShardClaim | None:
        """The claim of another router that asked for this shard a short time ago, an urgent one first."""
        return None if self._clock() - self._claimed_at > _CLAIM_S else self._claim

    def note_broken(self, epoch: int) -> None:
        """Let the lease of ``epoch``, whose holder's connection broke, end soon unless it is renewed."""
        holder = self._current()
        if holder is not None and epoch == self._epoch:
            holder.expires_at = min(holder.expires_at, self._clock() + _BROKEN_S)

    def release(self, router_id: str, epoch: int) -> Refusal | None:
        """End the lease of ``epoch``, which its holder gives back. Return why not, if refused."""
        holder = self._current()
        if holder is None or epoch != self._epoch or holder.router_id != router_id:
            return Refusal(ShardError.STALE_EPOCH, f"{router_id} does not hold this shard with epoch {epoch}")
        self._holder = None
        self._release_all(RELEASED)
        return None

    def check(self, epoch: int) -> Refusal | None:
        """Return None if a command under ``epoch`` may run, else why not."""
        if self._current() is None:
            return Refusal(ShardError.NOT_LEASED, "no router holds this shard")
        if epoch != self._epoch:
            return Refusal(ShardError.STALE_EPOCH, f"epoch {self._epoch} holds this shard. Given: {epoch}")
        return None

    def expire(self) -> None:
        """End the lease if its time is over, and release every sequence."""
        if self._holder is not None and self._clock() >= self._holder.expires_at:
            self._holder = None
            _log.warning("the lease expired: every sequence is released", extra={"epoch": self._epoch})
            self._release_all(EXPIRED)

    def _current(self) -> _Holder | None:
        self.expire()
        return self._holder
