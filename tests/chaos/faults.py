"""Random faults of shards and of their links, of which at least one shard is always spared."""

import asyncio
import random
import signal
import time
from dataclasses import dataclass
from enum import Enum

from caravan_testing.waiting import eventually
from chaos.fleet import Fleet, Spot

_PAUSE_S = (0.5, 4.0)
_POLL_S = 0.1
# A start may take a minute on a busy host.
_RETURN_S = 300.0
_BETWEEN_HANDOVERS_S = (10.0, 40.0)
# A router gives its requests 90 s to end.
_HANDOVER_S = 300.0


class Kind(Enum):
    """What is done to a shard or its link."""

    KILL = "SIGKILL, started again"
    FREEZE = "SIGSTOP, SIGCONT after seconds"
    BLINK = "SIGSTOP, SIGCONT at once"
    CUT = "connections reset (proxy)"
    STALL = "bytes held back (proxy)"
    SLOW = "slow link (proxy)"
    UNPLUG = "link down (network namespace)"
    DRAIN = "SIGTERM, started again"
    HANDOVER = "another router takes over"


# The shard is out of reach for longer than the router waits.
LOSING = frozenset({Kind.KILL, Kind.FREEZE, Kind.CUT, Kind.STALL, Kind.UNPLUG})


@dataclass(slots=True, eq=False)
class Fault:
    """A fault from ``at`` to ``mended_at``, in seconds of ``time.time``. ``spot``: None for one of the router.

    ``overcome``: whether the shard, or all shards of a new router, served afterwards.
    """

    kind: Kind
    spot: Spot | None
    at: float
    mended_at: float = float("inf")
    overcome: bool = False

    def __str__(self) -> str:
        return self.kind.name if self.spot is None else f"{self.kind.name} of {self.spot.name}"


class Disturber:
    """Injects faults into ``fleet``. Their number at a time is limited: one shard serves without one."""

    def __init__(self, fleet: Fleet, chance: random.Random) -> None:
        self._fleet = fleet
        self._chance = chance
        self._disturbed: set[Spot] = set()
        self.faults: list[Fault] = []

    async def run(self, seconds: float) -> None:
        """Inject faults for ``seconds`` and until every kind was tried, and wait until all are mended."""
        ends = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._replace_routers(ends))
            while time.monotonic() < ends or self._untried():
                await asyncio.sleep(self._chance.uniform(*_PAUSE_S))
                calm = await self._calm()
                if len(calm) < 2:
                    continue
                # Kinds that were not tried come first, so that short runs have them all.
                kinds = [kind for kind in self._untried() or Kind if any(_can(kind, spot) for spot in calm)]
                if kinds:
                    kind = self._chance.choice(kinds)
                    spot = self._chance.choice([spot for spot in calm if _can(kind, spot)])
                    self._disturbed.add(spot)
                    tasks.create_task(self._disturb(Fault(kind, spot, time.time())))

    async def _replace_routers(self, ends: float) -> None:
        """Replace the router, one handover after another, until ``ends``; at least once."""
        while True:
            await asyncio.sleep(self._chance.uniform(*_BETWEEN_HANDOVERS_S))
            fault = Fault(Kind.HANDOVER, None, time.time())
            self.faults.append(fault)
            before = self._fleet.routers[-1]
            await self._fleet.start_router()
            async with asyncio.timeout(_HANDOVER_S):
                assert await before.process.wait() == 0, before.text
            fault.overcome = await self._fleet.wait_until_all_serve(_HANDOVER_S)
            if time.monotonic() > ends:
                return

    def _untried(self) -> list[Kind]:
        """Return the kinds of faults of shards that are possible here and were not tried."""
        tried = {fault.kind for fault in self.faults}
        return [kind for kind in Kind if kind not in tried and any(_can(kind, spot) for spot in self._fleet.spots)]

    async def _calm(self) -> list[Spot]:
        """Return the shards that serve and have no fault."""
        states = await self._fleet.standings()
        spots = self._fleet.spots
        return [spot for spot in spots if states.get(spot.address) == "serving" and spot not in self._disturbed]

    async def _disturb(self, fault: Fault) -> None:
        spot = fault.spot
        assert spot is not None
        self.faults.append(fault)
        await self._carry_out(fault.kind, spot)
        fault.mended_at = time.time()
        deadline = time.monotonic() + _RETURN_S
        while not fault.overcome and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            fault.overcome = (await self._fleet.standings()).get(spot.address) == "serving"
        self._disturbed.discard(spot)

    async def _until_noticed(self, spot: Spot) -> None:
        """Wait until the shard is given up. A router that did not run meanwhile asks it once more first."""
        await eventually(
            self._fleet.standings, f"{spot.name} is given up", lambda found: found.get(spot.address) != "serving"
        )

    async def _carry_out(self, kind: Kind, spot: Spot) -> None:
        """Begin the fault, wait, and mend it."""
        chance = self._chance
        # Longer than the router waits for a sign of life.
        long_s = chance.uniform(2.5, 6.0)
        match kind:
            case Kind.KILL:
                await spot.kill()
                await asyncio.sleep(chance.uniform(0.0, 2.0))
                await spot.start()
            case Kind.DRAIN:
                await spot.drain()
                await spot.start()
            case Kind.FREEZE | Kind.BLINK:
                spot.send(signal.SIGSTOP)
                await asyncio.sleep(long_s if kind is Kind.FREEZE else chance.uniform(0.1, 0.6))
                if kind is Kind.FREEZE:
                    await self._until_noticed(spot)
                spot.send(signal.SIGCONT)
            case Kind.UNPLUG:
                assert spot.network is not None
                await spot.network.set_link("down")
                await asyncio.sleep(long_s)
                await self._until_noticed(spot)
                await spot.network.set_link("up")
            case Kind.CUT | Kind.STALL | Kind.SLOW:
                assert spot.proxy is not None
                if kind is Kind.CUT:
                    await spot.proxy.cut()
                elif kind is Kind.STALL:
                    spot.proxy.stall()
                else:
                    spot.proxy.slow(chance.uniform(0.01, 0.05), 200_000)
                await asyncio.sleep(long_s)
                if kind is Kind.STALL:
                    await self._until_noticed(spot)
                spot.proxy.mend()
            case Kind.HANDOVER:
                raise AssertionError("a shard cannot be handed over")


def _can(kind: Kind, spot: Spot) -> bool:
    match kind:
        case Kind.CUT | Kind.STALL | Kind.SLOW:
            return spot.proxy is not None
        case Kind.UNPLUG:
            return spot.network is not None
        case Kind.KILL | Kind.DRAIN | Kind.FREEZE | Kind.BLINK:
            return True
        case Kind.HANDOVER:
            return False
