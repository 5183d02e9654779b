"""Random faults of shards and of their links, of which at least one shard is always spared."""

import asyncio
import random
import signal
import time
from dataclasses import dataclass
from enum import Enum

from chaos.fleet import Fleet, Spot

_PAUSE_S = (0.5, 4.0)
_POLL_S = 0.1
_RETURN_S = 90.0


class Kind(Enum):
    """What is done to a shard or its link."""

    KILL = "SIGKILL, started again"
    FREEZE = "SIGSTOP, SIGCONT after seconds"
    BLINK = "SIGSTOP, SIGCONT at once"
    CUT = "connections reset (proxy)"
    STALL = "bytes held back (proxy)"
    SLOW = "slow link (proxy)"
    UNPLUG = "link down (network namespace)"


# The shard is out of reach for longer than the router waits.
LOSING = frozenset({Kind.KILL, Kind.FREEZE, Kind.CUT, Kind.STALL, Kind.UNPLUG})


@dataclass(slots=True, eq=False)
class Fault:
    """A fault that began ``at`` seconds of ``time.time``. ``returned``: whether the shard served again afterwards."""

    kind: Kind
    spot: Spot
    at: float
    returned: bool = False


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

    def _untried(self) -> list[Kind]:
        """Return the kinds of faults that are possible here and were not tried."""
        tried = {fault.kind for fault in self.faults}
        return [kind for kind in Kind if kind not in tried and any(_can(kind, spot) for spot in self._fleet.spots)]

    async def _calm(self) -> list[Spot]:
        """Return the shards that serve and have no fault."""
        states = await self._fleet.standings()
        spots = self._fleet.spots
        return [spot for spot in spots if states.get(spot.address) == "serving" and spot not in self._disturbed]

    async def _disturb(self, fault: Fault) -> None:
        self.faults.append(fault)
        await self._carry_out(fault)
        deadline = time.monotonic() + _RETURN_S
        while not fault.returned and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
            fault.returned = (await self._fleet.standings()).get(fault.spot.address) == "serving"
        self._disturbed.discard(fault.spot)

    async def _carry_out(self, fault: Fault) -> None:
        """Begin the fault, wait, and mend it."""
        spot, chance = fault.spot, self._chance
        # Longer than the router waits for a sign of life.
        long_s = chance.uniform(2.5, 6.0)
        match fault.kind:
            case Kind.KILL:
                await spot.kill()
                await asyncio.sleep(chance.uniform(0.0, 2.0))
                await spot.start()
            case Kind.FREEZE | Kind.BLINK:
                spot.send(signal.SIGSTOP)
                await asyncio.sleep(long_s if fault.kind is Kind.FREEZE else chance.uniform(0.1, 0.6))
                spot.send(signal.SIGCONT)
            case Kind.UNPLUG:
                assert spot.network is not None
                await spot.network.set_link("down")
                await asyncio.sleep(long_s)
                await spot.network.set_link("up")
            case Kind.CUT | Kind.STALL | Kind.SLOW:
                assert spot.proxy is not None
                if fault.kind is Kind.CUT:
                    await spot.proxy.cut()
                elif fault.kind is Kind.STALL:
                    spot.proxy.stall()
                else:
                    spot.proxy.slow(chance.uniform(0.01, 0.05), 200_000)
                await asyncio.sleep(long_s)
                spot.proxy.mend()


def _can(kind: Kind, spot: Spot) -> bool:
    match kind:
        case Kind.CUT | Kind.STALL | Kind.SLOW:
            return spot.proxy is not None
        case Kind.UNPLUG:
            return spot.network is not None
        case Kind.KILL | Kind.FREEZE | Kind.BLINK:
            return True
