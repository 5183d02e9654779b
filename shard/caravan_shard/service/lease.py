"""Which router may command this shard: one at a time, under an epoch that only grows.

Pure: the caller passes the time as ``now``, in seconds of a monotonic clock.
"""

from dataclasses import dataclass
from enum import Enum

from caravan_proto.errors import ShardError
from caravan_proto.messages.model import ShardClaim
from caravan_shard.protocol.results import Refusal

_MAX_ROUTER_ID = 256
# A router that asks for a shard which another one holds asks again within this time, in seconds.
_CLAIM_S = 2.5
# When the holder's connection breaks, it has this time to renew its lease, in seconds.
_BROKEN_S = 2.0


class LeaseChange(Enum):
    """What a granted lease changed."""

    TAKEN = "taken"  # the sequences on the shard belong to nobody now
    RENEWED = "renewed"


@dataclass(slots=True)
class _Holder:
    router_id: str
    url: str
    expires_at: float


class LeaseBook:
    """The last epoch, and its holder until the lease ends."""

    def __init__(self) -> None:
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
        return self._holder is not None

    @property
    def holder_url(self) -> str:
        """Where other routers reach the holder; empty if there is none, or they cannot."""
        return "" if self._holder is None else self._holder.url

    def request(self, router_id: str, epoch: int, ttl_s: float, now: float, url: str = "") -> LeaseChange | Refusal:
        """Grant the shard to a higher epoch, or renew the lease of the same one."""
        if not 0 < len(router_id) <= _MAX_ROUTER_ID:
            return Refusal(ShardError.BAD_REQUEST, f"router_id must have 1 to {_MAX_ROUTER_ID} characters")
        if ttl_s <= 0:
            return Refusal(ShardError.BAD_REQUEST, "ttl_ms must be >= 1")
        if epoch > self._epoch:
            self._epoch = epoch
            self._holder = _Holder(router_id, url, now + ttl_s)
            self._claim = None
            return LeaseChange.TAKEN
        if epoch == self._epoch and self._holder is not None and self._holder.router_id == router_id:
            self._holder.expires_at = now + ttl_s
            return LeaseChange.RENEWED
        return Refusal(ShardError.STALE_EPOCH, f"epoch {self._epoch} was granted. Given: {epoch}")

    def ask(self, router_id: str, claim: ShardClaim, now: float) -> Refusal | None:
        """Return None if no other router holds the shard; else note that ``router_id`` would like to."""
        if self._holder is None or self._holder.router_id == router_id:
            return None
        noted = self.claim(now)
        if noted is None or claim.urgent or not noted.urgent:
            self._claim, self._claimed_at = claim, now
        return Refusal(ShardError.HELD, f"another router holds this shard under epoch {self._epoch}")

    def claim(self, now: float) -> ShardClaim | None:
        """Return the claim of a router that asked for this shard a short time ago, an urgent one first."""
        return None if now - self._claimed_at > _CLAIM_S else self._claim

    def note_broken(self, epoch: int, now: float) -> None:
        """Let the lease of ``epoch``, whose holder's connection broke, end soon unless it is renewed."""
        if self._holder is not None and epoch == self._epoch:
            self._holder.expires_at = min(self._holder.expires_at, now + _BROKEN_S)

    def release(self, router_id: str, epoch: int) -> Refusal | None:
        """End the lease of ``epoch``, which its holder gives back."""
        if self._holder is None or epoch != self._epoch or self._holder.router_id != router_id:
            return Refusal(ShardError.STALE_EPOCH, f"{router_id} does not hold this shard with epoch {epoch}")
        self._holder = None
        return None

    def check(self, epoch: int) -> Refusal | None:
        """Return None if a command under ``epoch`` may run, else why not."""
        if self._holder is None:
            return Refusal(ShardError.NOT_LEASED, "no router holds this shard")
        if epoch != self._epoch:
            return Refusal(ShardError.STALE_EPOCH, f"epoch {self._epoch} holds this shard. Given: {epoch}")
        return None

    def expire(self, now: float) -> bool:
        """End the lease if its time is over. Return True once for each lease that ends this way."""
        if self._holder is None or now < self._holder.expires_at:
            return False
        self._holder = None
        return True
