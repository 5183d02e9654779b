"""Texts to embed that no shard has yet, and when they go to one.

A call is what a shard may compute in one forward pass. Shards get calls of a few passes only, so that one pass can be
packed while another runs; all other calls wait here, where fair shares and priorities count and callers may leave.
"""

import math
from dataclasses import dataclass

from caravan_scheduler.core.generation import ANYONE, Tenant
from caravan_scheduler.waiting.fair_share import PROMPT_TOKEN, FairShare

# Tokens that each shard may have at least: those of two calls, of which one waits while the other runs.
LEAST_ROOM = 1024


def room_of(tokens_at_once: int) -> int:
    """Return how many tokens a shard may have that embeds so many at the same time: as many again wait there."""
    return max(LEAST_ROOM, 2 * tokens_at_once)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """Texts of ``tokens`` tokens in all. ``call_id`` ascends with the order of arrival.

    ``tokens`` is the room that they take. ``cost``: what their tenant is charged, if it is something else.
    """

    call_id: int
    tokens: int
    cost: int | None = None
    arrived_s: float
    priority: int = 0
    tenant: Tenant = ANYONE


class TextQueue:
    """Order: priority, one higher for every ``aging_s`` of waiting; then fair share; then arrival.

    The first in order waits until there is room for it and lets nobody pass, so that small calls never starve a large
    one. A call that is larger than all of the room goes when nothing else is under way.
    """

    def __init__(self, aging_s: float = math.inf, fair_share: FairShare | None = None) -> None:
        self._aging_s = aging_s
        self._fair_share = FairShare() if fair_share is None else fair_share
        # By priority and the tenant's name, in the order of arrival: of a bucket, only the first can be the next.
        self._waiting: dict[tuple[int, str], dict[int, TextCall]] = {}
        self._under_way: dict[int, TextCall] = {}
        # Tokens of the calls under way.
        self.tokens = 0

    def __len__(self) -> int:
        """Return how many calls wait."""
        return sum(map(len, self._waiting.values()))

    def push(self, call: TextCall) -> None:
        """Add a call, which waits."""
        active = {tenant for _, tenant in self._waiting} | {one.tenant.name for one in self._under_way.values()}
        self._fair_share.activate(call.tenant.name, active)
        self._waiting.setdefault(_bucket(call), {})[call.call_id] = call

    def remove(self, call: TextCall) -> None:
        """Take out a call that has ended, or whose caller has gone."""
        if self._under_way.pop(call.call_id, None) is not None:
            self.tokens -= call.tokens
        elif (bucket := self._waiting.get(_bucket(call))) is not None:
            bucket.pop(call.call_id, None)
            if not bucket:
                del self._waiting[_bucket(call)]

    def start(self, room: float, now: float) -> list[TextCall]:
        """Return the calls that go to a shard now, in order; they are under way until they are removed.

        ``room``: the tokens that all shards which are up may have. While none is, one call at a time looks for one.
        """
        started: list[TextCall] = []
        while self._waiting:
            call = min(
                (next(iter(bucket.values())) for bucket in self._waiting.values()), key=lambda one: self._rank(one, now)
            )
            if self._under_way and self.tokens + call.tokens > room:
                break
            self.remove(call)
            self._under_way[call.call_id] = call
            self.tokens += call.tokens
            self._fair_share.charge(call.tenant, PROMPT_TOKEN * (call.tokens if call.cost is None else call.cost))
            started.append(call)
        return started

    def _rank(self, call: TextCall, now: float) -> tuple[int, float, int]:
        priority = call.priority + math.floor((now - call.arrived_s) / self._aging_s)
        return -priority, self._fair_share.counter(call.tenant), call.call_id


def _bucket(call: TextCall) -> tuple[int, str]:
    return call.priority, call.tenant.name
