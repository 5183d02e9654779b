"""What stands before the shards: the router's one scheduler, or a gateway that chooses a shard when a request arrives.

Behind a gateway each shard has a scheduler of its own, the same one, so that only placement differs.
"""

import bisect
import hashlib
import math
from array import array
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

# Places of each shard on the ring.
_VIRTUAL_NODES = 100
# A shard gets at most so many times the mean number of requests.
_LOAD_FACTOR = 1.25


class Policy(Enum):
    """How requests are placed."""

    ROUND_ROBIN = "round robin"
    LEAST_REQUESTS = "least requests"
    PREFIX_HASH = "prefix hash"
    CARAVAN = "Caravan"


class Gateway(Protocol):
    """Chooses a shard for each request."""

    def choose(self, beginning: tuple[int, ...], in_flight: Sequence[int]) -> int:
        """Return the shard for a prompt that begins so. ``in_flight``: requests that have not ended, of each shard."""


class RoundRobin:
    """Takes the shards in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, beginning: tuple[int, ...], in_flight: Sequence[int]) -> int:
        """Return the next shard."""
        chosen = self._next % len(in_flight)
        self._next = chosen + 1
        return chosen


class LeastRequests:
    """Takes a shard with the fewest requests; of several the one that was chosen longest ago."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, beginning: tuple[int, ...], in_flight: Sequence[int]) -> int:
        """Return the shard with the fewest requests."""
        count = len(in_flight)
        chosen = min(range(count), key=lambda shard: (in_flight[shard], (shard - self._next) % count))
        self._next = chosen + 1
        return chosen


class PrefixHash:
    """Consistent hashing with bounded loads (Mirrokni et al., arXiv 1608.01350), as KubeAI and Envoy do it."""

    def __init__(self, shards: int) -> None:
        points = [
            (_hash(array("q", [shard, node])), shard) for shard in range(shards) for node in range(_VIRTUAL_NODES)
        ]
        self._ring = sorted(points)

    def choose(self, beginning: tuple[int, ...], in_flight: Sequence[int]) -> int:
        """Return the first shard on the ring, from the hash of ``beginning`` on, that has not too many requests."""
        most = math.ceil(_LOAD_FACTOR * (sum(in_flight) + 1) / len(in_flight))
        start = bisect.bisect(self._ring, (_hash(array("q", beginning)), 0))
        ring = (self._ring[(start + place) % len(self._ring)][1] for place in range(len(self._ring)))
        return next(shard for shard in ring if in_flight[shard] < most)


def gateway_of(policy: Policy, shards: int) -> Gateway | None:
    """Return the gateway of ``policy``; None for the router, which needs none."""
    match policy:
        case Policy.ROUND_ROBIN:
            return RoundRobin()
        case Policy.LEAST_REQUESTS:
            return LeastRequests()
        case Policy.PREFIX_HASH:
            return PrefixHash(shards)
        case Policy.CARAVAN:
            return None


def _hash(data: "array[int]") -> int:
    return int.from_bytes(hashlib.blake2b(data.tobytes(), digest_size=8).digest())
