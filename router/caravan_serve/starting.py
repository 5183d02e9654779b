"""Lets requests wait for a shard that this program is starting, for as long as it loads its model."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence

from caravan_router.engine.absence import Absence
from caravan_router.engine.fleet import Fleet
from caravan_scheduler.core.shards import ShardState
from caravan_serve.shard_process import ShardProcess

_POLL_S = 0.1


class Starting:
    """Watches ``shards``, by the name of their model, "" where that is not known before it is loaded.

    Requests wait without a limit while a shard of their model starts: from the start of its process until the router
    holds it, at most ``grace_s`` seconds after it has begun to listen. Else they wait ``grace_s`` seconds.
    """

    def __init__(self, fleet: Fleet, shards: Mapping[str, Sequence[ShardProcess]], grace_s: float) -> None:
        self._fleet = fleet
        self._shards = shards
        self._grace_s = grace_s
        # Until when each shard counts as starting although it listens, by address.
        self._until_s: dict[str, float] = {}
        # Names for which requests wait without a limit.
        self._awaited: set[str] = set()

    async def run(self) -> None:
        """Keep the fleet's patience current, until cancelled."""
        while True:
            self.update(time.monotonic())
            await asyncio.sleep(_POLL_S)

    def update(self, now_s: float) -> None:
        """Look at all shards at ``now_s``, in seconds on ``time.monotonic``."""
        reports = {report.address: report for report in self._fleet.shards()}
        awaited: set[str] = set()
        for name, shards in self._shards.items():
            found = [reports[shard.address] for shard in shards if shard.address in reports]
            serving = {report.address for report in found if report.standing.state is ShardState.SERVING}
            starts = [self._starts(shard, serving, now_s) for shard in shards]
            if any(starts):
                awaited |= {name, *(report.model for report in found if report.model)}
        for name in awaited - self._awaited:
            self._fleet.demand.set_absence(name, Absence(math.inf))
        for name in self._awaited - awaited:
            self._fleet.demand.set_absence(name, Absence(self._grace_s))
        self._awaited = awaited

    def _starts(self, shard: ShardProcess, serving: set[str], now_s: float) -> bool:
        if shard.is_starting:
            self._until_s[shard.address] = now_s + self._grace_s
        return shard.address not in serving and now_s < self._until_s.get(shard.address, -math.inf)
